"""Supervised fine-tuning by a run's own back end: on GPUs, over its ranks, with Adam alone.

Apart from Muon it learns what the CPU's learner does (`sft`), whatever is set for RL.

A trace is a sample whose every token has advantage 1 and no importance weight: the gradient of the
clipped surrogate at ratio 1 is then that of −w · log π, so the loss is one code with RL's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from agentrl.config import RunConfig
from agentrl.training.backend import Backend, BackendState
from agentrl.training.packing import Sample, pack_step
from agentrl.training.traces import Trace, deal

BETAS = (0.9, 0.95)
"""Adam's two decays in fine-tuning, by any learner."""


def fitted(config: RunConfig, traces: int) -> RunConfig:
    """Return the config whose `training` does what `sft` asks for.

    What RL alone has is off: decay, and the temperature that engines sample at.
    """
    steps = math.ceil(traces / config.sft.batch) * config.sft.epochs
    training = dataclasses.replace(
        config.training,
        steps=steps,
        lr=config.sft.lr,
        lr_decay="linear",
        warmup_steps=max(1, min(20, steps // 20)),
        weight_decay=0.0,
        beta1=BETAS[0],
        beta2=BETAS[1],
        max_grad_norm=1.0,
        importance_cap=0.0,
        kl_coef=0.0,
        entropy_coef=0.0,
    )
    agent = dataclasses.replace(config.agent, temperature=1.0)
    return dataclasses.replace(config, training=training, agent=agent)


@dataclass
class BackedLearner:
    config: RunConfig
    """As `fitted` returns it."""
    backend: Backend
    traces: list[Trace]
    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps, self.ranks = self.config.training.steps, self.config.training.ranks
        self._batches = self._stream()

    def take_step(self) -> float:
        """Take one step; return the mean loss of the tokens in it, nats. Raises DivergedError."""
        chosen = [self.traces[index] for index in next(self._batches)]
        samples = samples_of(chosen, self.config.sft.context_weight)
        found = self.backend.train_step(pack_step(samples, self.config.training))
        self.step += 1
        self.tokens += sum(len(trace.tokens) for trace in chosen)
        self.losses.append(found["gap"])  # against log-probabilities of 0
        return self.losses[-1]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.backend.export_hf()

    def share(self, folder: Path) -> BackendState:
        return self.backend.share(folder)

    def restore(self, state: BackendState) -> None:
        self.backend.restore(state)
        self.step = state.updates
        for _ in range(self.step):
            next(self._batches)

    def _stream(self) -> Iterator[list[int]]:
        for epoch in range(self.config.sft.epochs):
            yield from deal(self.traces, self.config.sft.batch, self.config.seed, epoch)


def samples_of(traces: Sequence[Trace], context_weight: float) -> list[Sample]:
    """Return traces as samples: the assistant's tokens weigh 1, others `context_weight`."""
    shares = [np.where(trace.loss_mask, 1.0, context_weight).astype(np.float32) for trace in traces]
    total = float(sum(share[1:].sum() for share in shares))
    return [
        Sample(
            tokens=trace.tokens,
            loss_mask=share > 0,
            engine_logprobs=np.zeros(len(trace.tokens), dtype=np.float32),
            advantage=1.0,
            weight=1 / total if total else 0.0,
            shares=share,
            place=place,
        )
        for place, (trace, share) in enumerate(zip(traces, shares, strict=True))
    ]
