from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fabricate import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.training.head import Shard, Tile, chosen_logprobs


def draw(rows=7, words=23, width=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, dtype=dtype, generator=generator)
    weight = torch.randn(words, width, dtype=dtype, generator=generator)
    targets = torch.randint(0, words, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden, weight, targets, temperature=1.0):
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    words=st.integers(1, 40),
    tile=st.builds(
        Tile,
        whole_rows=st.integers(1, 25),
        whole_logits=st.integers(1, 300),
        rows=st.integers(1, 25),
        logits=st.integers(1, 300),
    ),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
)
def test_any_tiles_give_the_plain_answer_and_gradients(rows, words, tile, temperature):
    given = draw(rows, words, seed=rows)
    ups = torch.randn(2, rows, dtype=torch.float64)
    ours = chosen_logprobs(*given, temperature=temperature, tile=tile)
    theirs = plain(*given, temperature)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    grads = [
        torch.autograd.grad((ups[0] * one[0] + ups[1] * one[1]).sum(), given[:2])
        for one in (ours, theirs)
    ]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_pass_gradcheck():
    hidden, weight, targets = draw(4, 9, 3)

    def both(hidden, weight):
        return chosen_logprobs(hidden, weight, targets, temperature=0.7, tile=Tile(whole_logits=12))

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_a_second_backward_gives_the_same_gradients():
    hidden, weight, targets = draw()
    logprobs, _ = chosen_logprobs(hidden, weight, targets, tile=Tile(whole_logits=40))
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("whole_rows", [7, 1])
def test_a_backward_takes_no_more_room_than_there_are_words(whole_rows):
    hidden, weight, targets = draw()
    tile = Tile(whole_rows=whole_rows, rows=3)
    logprobs, _ = chosen_logprobs(hidden, weight, targets, tile=tile)
    torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)
    again = _largest_allocation(lambda: torch.autograd.grad(logprobs.sum(), hidden))
    assert again <= 8 * 7 * 23


def test_float32_is_within_1e_5_of_float64_at_a_real_vocabulary():
    hidden, weight, targets = draw(6, 151_936, 16, torch.float32)
    ours = chosen_logprobs(hidden, weight, targets, tile=Tile(whole_rows=4, rows=4, logits=2**14))
    exact = plain(hidden.double(), weight.double(), targets)
    for mine, other in zip(ours, exact, strict=True):  # torch's own log_softmax is off by 2.6e-5
        torch.testing.assert_close(mine.double(), other, atol=1e-5, rtol=0)


def test_only_the_gradients_asked_for_are_made():
    hidden, weight, targets = draw()
    chosen_logprobs(hidden.detach(), weight, targets)[0].sum().backward()
    assert hidden.grad is None
    torch.testing.assert_close(
        weight.grad, torch.autograd.grad(plain(hidden, weight, targets)[0].sum(), weight)[0]
    )


def test_an_upstream_that_is_no_number_is_seen_in_the_gradients():
    hidden, weight, targets = draw()
    logprobs, _ = chosen_logprobs(hidden, weight, targets)
    (logprobs * torch.tensor([1.0, torch.nan, 1, 1, 1, 1, 1])).sum().backward()
    assert hidden.grad[1].isnan().all()
    assert weight.grad.isnan().all()


def test_no_rows_give_no_numbers_and_zero_gradients():
    hidden, weight, targets = draw(0)
    logprobs, _ = chosen_logprobs(hidden, weight, targets)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert not weight.grad.any()


@pytest.mark.slow
def test_peak_memory_is_a_tile_not_the_logits():
    hidden, weight, targets = draw(512, 32_768, 4, torch.float32)
    tile = Tile(whole_rows=1, rows=128, logits=2**17)
    largest = _largest_allocation(
        lambda: chosen_logprobs(hidden, weight, targets, tile=tile)[0].sum().backward()
    )
    assert largest < 4 * 512 * 32_768 / 16


def _largest_allocation(work):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    return max(event.self_cpu_memory_usage for event in seen.events())


def test_hidden_and_weight_of_two_kinds_are_refused():
    hidden, weight, targets = draw()
    with pytest.raises(ValueError, match="give one dtype"):
        chosen_logprobs(hidden.float(), weight, targets)


def cut_heads(rank: int, size: int, folder: str) -> None:
    """Run in each gloo process: note how far a head cut in two, or held by one, is from a whole."""
    off = [cut_head(rank, cut) for cut in (22 // size, 22)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(off))


def cut_head(rank: int, cut: int) -> list[float]:
    """Return the largest differences of its answers and of both gradients."""
    import torch.distributed as dist

    hidden, weight, targets = draw(9, 22)
    mine = weight.detach()[rank * cut : (rank + 1) * cut].clone().requires_grad_()
    shard = Shard(start=rank * cut, group=dist.group.WORLD)
    ours = chosen_logprobs(
        hidden, mine, targets, tile=Tile(whole_rows=4, rows=4, logits=20), shard=shard
    )
    whole = plain(hidden, weight, targets)
    ups = torch.linspace(-1, 1, 9, dtype=torch.float64)
    found = torch.autograd.grad((ups * ours[0] + ours[1]).sum(), (hidden, mine))
    wanted = torch.autograd.grad((ups * whole[0] + whole[1]).sum(), (hidden, weight))
    here = wanted[1][rank * cut : (rank + 1) * cut]
    pairs = [*zip(ours, whole, strict=True), (found[0], wanted[0]), (found[1], here)]
    return [float((one - other).abs().sum()) for one, other in pairs]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_head_cut_over_two_ranks_equals_a_whole_one(tmp_path):
    run_ranks(tmp_path, "test_head:cut_heads", 2, str(tmp_path))
    for rank in range(2):
        halved, held_by_one = json.loads((tmp_path / f"{rank}.json").read_bytes())
        assert max(halved + held_by_one) < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole_rows", [70, 1])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
def test_the_kernels_of_a_gpu_do_what_plain_torch_does(dtype, whole_rows, size):
    hidden, weight, targets = (one.detach().cuda() for one in draw(70, 5000, 64))
    turned = (hidden / 8).T.contiguous().T  # not in the order in which it is written
    given = [one.to(dtype).requires_grad_() for one in (turned, weight)]
    ups = size * torch.randn(2, 70, device="cuda")
    sizes = {"whole_logits": 70 * 600, "rows": 32, "logits": 32 * 3000}
    tile = Tile(whole_rows=whole_rows, **sizes)
    ours = chosen_logprobs(*given, targets, temperature=0.7, tile=tile)
    wide = [one.detach().double().requires_grad_() for one in given]
    theirs = plain(*wide, targets, 0.7)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-3  # to round the answer takes 1.7e-3
    nearness = 1e-4 if dtype == torch.float32 else 5e-3  # bfloat16's logits are float16's
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=nearness, rtol=1e-5)
    mine = torch.autograd.grad((ups[0] * ours[0] + ups[1] * ours[1]).sum(), given)
    other = torch.autograd.grad((ups[0] * theirs[0] + ups[1] * theirs[1]).sum(), wide)
    for one, wanted in zip(mine, other, strict=True):
        assert float((one.double() - wanted).norm() / wanted.norm()) < tolerance
