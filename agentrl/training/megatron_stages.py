"""Pipeline stages: micro-batches through them in Megatron's own schedule, and what one alone knows.

With one stage the schedule is a loop of forward and backward. With several it is 1F1B
(arXiv:2104.04473): each stage passes hidden states on and gets their gradients back, the last one
has the head and the loss. Idle is (stages − 1) / (micro-batches + stages − 1) of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]
from megatron.core.pipeline_parallel import (  # type: ignore[import-not-found, unused-ignore]
    get_forward_backward_func,
)
from torch import Tensor, nn

from agentrl.training.packing import MicroBatch

Answer = tuple[Tensor, Tensor]
"""Log-probabilities and entropy of a micro-batch's targets, on the last stage."""


def run_schedule(
    policy: nn.Module,
    batches: Sequence[MicroBatch],
    forward: Callable[[MicroBatch], Tensor | Answer],
    loss: Callable[[Answer, MicroBatch], Tensor],
    *,
    forward_only: bool = False,
) -> None:
    """Take every micro-batch through all stages; each rank of a pipeline gives the same ones.

    forward: what this stage makes of one; loss is called on the last stage only.
    """

    def step(
        waiting: Iterator[MicroBatch], _: nn.Module
    ) -> tuple[Tensor | Answer, Callable[[Answer], tuple[Tensor, Tensor, None]]]:
        batch = next(waiting)
        uncounted = torch.zeros((), dtype=torch.int)  # the loss has its weights already
        return forward(batch), lambda answer: (loss(answer, batch), uncounted, None)

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[policy],
        num_microbatches=len(batches),
        seq_length=1,  # rows differ: each says its own length before it is sent
        micro_batch_size=1,
        forward_only=forward_only,
    )


def stage() -> int:
    """Return this rank's place in its pipeline."""
    number: int = parallel_state.get_pipeline_model_parallel_rank()
    return number


def told_by(
    teller: int,
    tensor: Tensor | None,
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return stage `teller`'s tensor on every rank of the pipeline; the others may give None."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        assert tensor is not None
        return tensor
    if stage() != teller or tensor is None:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    told = tensor.contiguous()
    dist.broadcast(told, dist.get_global_rank(group, teller), group=group)
    return told


def summed(values: Tensor) -> Tensor:
    """Return `values` added up over the pipeline's stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values
