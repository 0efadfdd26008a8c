"""The trainer's arithmetic on a transformers model, behind a Protocol for others to fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from agentrl.config import RunConfig
from agentrl.errors import CheckpointError, DivergedError
from agentrl.training import grpo
from agentrl.training.model_folder import load_model, named_weights
from agentrl.training.packing import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendState:
    """All that a back end needs to go on bit for bit."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """`exp_avg/NAME` and so on; scalars as 0-d tensors."""
    updates: int
    """Optimizer steps taken: the learning-rate schedule is a function of it."""


class Backend(Protocol):
    """One policy in training. Batches are whole steps; the back end splits work over its ranks."""

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [N] float32 at the sampling temperature, without gradient."""

    def train_step(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Take one optimizer step over all of `batches`; return its metrics."""

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names, in the dtype that engines load."""

    def state(self) -> BackendState: ...

    def restore(self, state: BackendState) -> None: ...


class TorchBackend:
    """One process, one device, float32 parameters; bfloat16 is for compute and for the engines."""

    def __init__(self, folder: Path, config: RunConfig, *, device: str = "cpu") -> None:
        torch.set_num_threads(config.training.threads)
        self.config = config.training
        self.temperature = config.agent.temperature
        self.device = torch.device(device)
        self.model = load_model(folder).to(self.device).train()
        self.reference = (
            load_model(Path(config.model.path)).to(self.device).eval().requires_grad_(False)
            if self.config.kl_coef
            else None
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.config.lr,
            betas=(self.config.beta1, self.config.beta2),
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        self.updates = 0

    @property
    def lr(self) -> float:
        """Of the next update: a linear rise to `lr`, then constant."""
        return self.config.lr * min(1.0, (self.updates + 1) / max(1, self.config.warmup_steps))

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        logits = self._logits(self.model, batch)
        return _chosen(logits, batch.targets.to(self.device)).cpu()

    def train_step(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        sums = _Sums()
        for batch in batches:
            if len(batch.targets):
                self._backward(batch, sums)
        lr = self.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        if not torch.isfinite(norm):
            raise DivergedError(
                f"update {self.updates + 1}: gradient norm {float(norm)}, loss {sums.loss}; the "
                "weights are unchanged. Resume from the last checkpoint with a lower training.lr"
            )
        self.optimizer.step()
        self.updates += 1
        return {**sums.means(), "grad_norm": float(norm), "lr": lr}

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32
        for name, tensor in named_weights(self.model):
            yield name, tensor.to(dtype)

    def state(self) -> BackendState:
        return BackendState(
            model=dict(named_weights(self.model)),
            optimizer={
                f"{key}/{name}": value
                for name, parameter in self.model.named_parameters()
                for key, value in self.optimizer.state.get(parameter, {}).items()
            },
            updates=self.updates,
        )

    @torch.no_grad()
    def restore(self, state: BackendState) -> None:
        parameters = dict(self.model.named_parameters())
        if parameters.keys() != state.model.keys():
            odd = sorted(parameters.keys() ^ state.model.keys())
            raise CheckpointError(f"checkpoint is of another model: {', '.join(odd[:3])} differ")
        for name, parameter in parameters.items():
            parameter.copy_(state.model[name])
        self.optimizer.state.clear()
        for key, value in state.optimizer.items():
            kind, _, name = key.partition("/")
            self.optimizer.state[parameters[name]][kind] = value.clone()
        self.updates = state.updates

    def _backward(self, batch: MicroBatch, sums: _Sums) -> None:
        logits = self._logits(self.model, batch)
        logprobs = _chosen(logits, batch.targets.to(self.device))
        old = logprobs.detach()  # one update a step: the policy at its start is the one we have
        engine = batch.engine_logprobs.to(self.device)
        advantages, weights = batch.advantages.to(self.device), batch.weights.to(self.device)
        clips = {"clip_low": self.config.clip_low, "clip_high": self.config.clip_high}
        importance = grpo.importance_weights(old, engine, cap=self.config.importance_cap)
        per_token = importance * grpo.clipped_surrogate(logprobs, old, advantages, **clips)
        with torch.set_grad_enabled(self.config.entropy_coef != 0):
            entropy = grpo.entropy(logits)
        if self.config.entropy_coef:
            per_token = per_token - self.config.entropy_coef * entropy
        if self.reference is not None:
            kl = self._kl(batch, logprobs)
            per_token = per_token + self.config.kl_coef * kl
            sums.add("kl", kl)
        loss = (weights * per_token).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        sums.loss += float(loss.detach())
        sums.add("entropy", entropy)
        sums.add("gap", (old - engine).abs())
        sums.add("ratio", grpo.raw_ratio(old, engine))
        sums.add("ratio_square", grpo.raw_ratio(old, engine).square())
        sums.add("capped", (importance < grpo.raw_ratio(old, engine)).float())
        clipped = grpo.clip_fraction(logprobs.detach(), old, advantages, **clips)
        sums.add("clip_fraction", clipped.expand(len(old)))
        sums.count += len(old)

    def _kl(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        assert self.reference is not None
        with torch.no_grad():
            logits = self._logits(self.reference, batch)
            reference = _chosen(logits, batch.targets.to(self.device))
        kind: grpo.Estimator = self.config.kl_estimator  # type: ignore[assignment]
        return grpo.kl_divergence(logprobs, reference, kind)

    def _logits(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Return [N, vocabulary] float32, divided by the temperature.

        The head sees only the positions in the loss, a fifth of all or fewer.
        """
        tokens, source = batch.tokens.to(self.device), batch.source.to(self.device)
        body, head = model.get_submodule("model"), model.get_submodule("lm_head")
        with self._autocast():
            hidden = body(input_ids=tokens, use_cache=False).last_hidden_state
            logits: Tensor = head(hidden.reshape(-1, hidden.shape[-1])[source])
        return logits.float() / self.temperature

    def _autocast(self) -> AbstractContextManager[None]:
        is_on = self.config.dtype == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_on)


class _Sums:
    """Sums over a step's tokens, float64."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.count = 0
        self._sums: dict[str, float] = {}

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.detach().double().sum())

    def means(self) -> dict[str, float]:
        ess = grpo.effective_sample_size(
            self._sums.get("ratio", 0.0), self._sums.get("ratio_square", 0.0), self.count
        )
        names = [name for name in self._sums if not name.startswith("ratio")]
        return {
            "loss": self.loss,
            "ess": ess,
            **{name: self._sums[name] / max(1, self.count) for name in names},
        }


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
