from __future__ import annotations

import pytest
import torch

from agentrl.training import gate


def draw(rows=5, inner=4, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(rows, 2 * inner, generator=generator, dtype=torch.float64)
    chances = torch.rand(rows, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return both.to(device, dtype).requires_grad_(), chances.to(device, wide).requires_grad_()


def test_the_gate_is_silu_times_up_times_chance():
    both, chances = draw()
    halves = both.chunk(2, -1)
    wanted = torch.nn.functional.silu(halves[0]) * halves[1] * chances[:, None]
    torch.testing.assert_close(gate.gated(both, chances), wanted)


def test_its_backward_passes_gradcheck():
    assert torch.autograd.gradcheck(gate.gated, draw())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("inner", [24, 768])
def test_the_kernels_of_a_gpu_do_what_plain_torch_does_to_the_gate(inner):
    from agentrl.training import gate_kernels

    both, chances = (one.detach() for one in draw(33, inner, torch.bfloat16, "cuda"))
    slope = torch.randn(33, inner, device="cuda", dtype=torch.bfloat16)
    pairs = [
        (gate_kernels.forward(both, chances), gate.forward(both, chances)),
        *zip(
            gate_kernels.backward(both, chances, slope),
            gate.backward(both, chances, slope),
            strict=True,
        ),
    ]
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, atol=2e-2, rtol=2e-2)
