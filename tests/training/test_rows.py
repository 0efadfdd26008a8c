from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.training.rows import collect, spread, sum_rows, way_of


def draw(tokens, owners, chosen, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(tokens, owners, generator=generator).topk(chosen, 1).indices
    rows = torch.randn(tokens, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    return found, rows


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_tokens_come_to_lie_by_their_owners_in_order(tokens, owners, chosen, seed):
    found, _ = draw(tokens, owners, min(owners, chosen), seed)
    way = way_of(found, owners)
    pairs = [
        (int(found.flatten()[number]), int(way.tokens[at])) for at, number in enumerate(way.order)
    ]
    assert pairs == sorted(pairs)
    assert all(token in way.tokens[way.places[token]] for token in range(tokens))


def test_what_is_spread_and_collected_is_each_row_as_often_as_it_has_owners():
    found, rows = draw(7, 5, 3)
    way = way_of(found, 5)
    torch.testing.assert_close(collect(spread(rows, way), way), 3 * rows)


def test_each_is_the_others_backward():
    found, rows = draw(5, 4, 2)
    way = way_of(found, 4)
    assert torch.autograd.gradcheck(lambda given: spread(given, way), (rows,))
    lying = spread(rows, way).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda given: collect(given, way), (lying,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("width", [40, 2048])
def test_the_kernel_sums_as_plain_torch_does(width):
    rows = torch.randn(64, width, device="cuda", dtype=torch.bfloat16)
    places = torch.randint(0, 64, (20, 8), device="cuda")
    found, _ = draw(20, 9, 2)
    way = way_of(found.cuda(), 9)
    assert torch.equal(way.order.cpu(), way_of(found, 9).order)
    from agentrl.training.rows_kernels import summed

    torch.testing.assert_close(summed(rows, places), sum_rows(rows, places), atol=1e-2, rtol=1e-2)
