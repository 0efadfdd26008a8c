from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.training.attention import attend_packed
from agentrl.training.windows import attend_windows, window


def draw(lengths, dtype=torch.float64, device="cpu", dim=4):
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    shapes = [(total, 4, dim), (total, 2, dim), (total, 2, dim), (total, 4, dim)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    *parts, slope = (one.to(device, dtype) for one in drawn)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    return [one.requires_grad_() for one in parts], slope, ends


def assert_same(lengths, tolerance=None, **more):
    parts, slope, ends = draw(lengths, **more)
    ours = attend_windows(*parts, lengths, None)
    theirs = attend_packed(*parts, ends, max(lengths))
    tolerances = {} if tolerance is None else {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(ours, theirs, **tolerances)
    mine, other = (torch.autograd.grad(one, parts, slope) for one in (ours, theirs))
    for one, wanted in zip(mine, other, strict=True):
        torch.testing.assert_close(one, wanted, **tolerances)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_windows_give_what_each_sequence_by_itself_gives(lengths):
    assert_same(lengths)


@given(st.integers(1, 70_000))
def test_a_window_holds_its_sequence_and_little_more(length):
    assert length <= window(length) < max(length + 512, length * 9 / 8)


def test_there_are_few_windows():
    assert len({window(length) for length in range(1, 65_537)}) == 40


def test_without_gradients_none_are_kept():
    parts, _, _ = draw([3, 2])
    with torch.no_grad():
        assert not attend_windows(*parts, [3, 2], None).requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_windows_give_what_the_varlen_kernel_gives():
    more = {"dtype": torch.bfloat16, "device": "cuda", "dim": 64}
    assert_same([700, 1500, 90], tolerance=3e-2, **more)
