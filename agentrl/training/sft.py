"""Supervised fine-tuning on traces: teaches the form of an attempt before RL searches."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.config import RunConfig
from agentrl.errors import CheckpointError, DivergedError, PublishError
from agentrl.events import NoEvents, Writer
from agentrl.handoff.publish import publish_json
from agentrl.hf_shape import read_vocabulary
from agentrl.model_fit import check_fit
from agentrl.training import checkpoint, ranks, rng
from agentrl.training.backend import OPTIMIZER, BackendState, check_tensor
from agentrl.training.backends import open_backend
from agentrl.training.checkpoint import Checkpoint, Files
from agentrl.training.model_folder import load_model, named_weights, write_model_folder
from agentrl.training.muon import Muon
from agentrl.training.sft_backed import BETAS, BackedLearner, fitted
from agentrl.training.traces import Trace, TraceBatch, check_words, deal, read_traces, stack

log = logging.getLogger(__name__)
DONE, SAVED = 0, 75
MUON: tuple[str, ...] = ("momentum",)
"""Kinds of Muon's state."""
SOME_WEIGHT = 1e-9
"""Of a batch in which nobody wrote anything: its loss is 0, and no division of 0 by 0."""
Progress = Callable[[int, int, float], None]
"""Told (step, steps, loss on the assistant's tokens) after each step."""


def run_sft(
    config: RunConfig,
    traces: Path,
    out: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    events: Writer | None = None,
    progress: Progress = lambda step, steps, loss: None,
) -> int:
    """Fine-tune the model at `model.path` on `traces`, and put the result at `out`.

    Returns 0 when done, 75 when `stop` asked for the end: the same call then goes on where it was;
    after a failure from the newest checkpoint. The last step has one, so a result that could not be
    written is all that is left to do.
    A summary with the loss curve is written beside `out`, as OUT.sft.json.
    Raises RecordError (traces), DivergedError, PublishError.
    """
    rng.seed_all(config.seed)
    data = read_traces(traces)
    check_words(data, read_vocabulary(Path(config.model.path)), traces)
    saved = Saves(config, out, data, events or NoEvents())
    with opened(config, data) as learner:
        saved.load_into(learner)
        started = time.monotonic()
        while learner.step < learner.steps:
            if stop():
                saved.save(learner)
                return SAVED
            loss = learner.take_step()
            progress(learner.step, learner.steps, loss)
            if learner.step == learner.steps:
                saved.save_last(learner)
            elif learner.step % config.sft.checkpoint_every == 0:
                saved.save(learner)
        write_model_folder(out, learner.weights(), Path(config.model.path))
        summary = {"seconds": time.monotonic() - started, **summary_of(learner)}
    publish_json(out.with_name(f"{out.name}.sft.json"), summary)
    saved.remove()
    return DONE


class Learner(Protocol):
    step: int
    steps: int
    tokens: int
    losses: list[float]
    ranks: int

    def take_step(self) -> float:
        """Take one step; return the mean loss on the tokens that are told of, nats."""

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def share(self, folder: Path) -> BackendState: ...

    def restore(self, state: BackendState) -> None: ...


@contextlib.contextmanager
def opened(config: RunConfig, traces: list[Trace]) -> Iterator[Learner]:
    """One process on a CPU learns by itself, Muon and all; by the run's back end GPUs, ranks, and
    who balances experts."""
    check_fit(config)
    if _is_small(config):
        yield _Learner(config, load_model(Path(config.model.path)).train(), traces)
        return
    _warn_of_muon(config)
    suited = fitted(config, len(traces))
    with ranks.started(suited) as world:
        yield BackedLearner(suited, open_backend(suited, world), traces)


def _is_small(config: RunConfig) -> bool:
    """Return whether one process on a CPU learns by itself, without a back end."""
    training = config.training
    is_alone = (training.device, training.ranks, training.backend) == ("cpu", 1, "torch")
    return is_alone and not training.router_balance_coef


def _warn_of_muon(config: RunConfig) -> None:
    sft, training = config.sft, config.training
    if sft.muon_lr > 0:
        log.warning(
            "sft.muon_lr=%g is not used: a back end (training.device=%s, ranks=%d, backend=%s) "
            "trains matrices, too, by Adam at sft.lr=%g; choose it for both, and set sft.muon_lr=0",
            *(sft.muon_lr, training.device, training.ranks, training.backend, sft.lr),
        )


def summary_of(learner: Learner) -> dict[str, object]:
    every = max(1, len(learner.losses) // 200)
    return {"steps": learner.steps, "tokens": learner.tokens, "losses": learner.losses[::every]}


@dataclass
class _Learner:
    config: RunConfig
    model: nn.Module
    traces: list[Trace]
    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    ranks: int = 1

    def __post_init__(self) -> None:
        sft = self.config.sft
        torch.set_num_threads(sft.threads)
        per_epoch = math.ceil(len(self.traces) / sft.batch)
        self.steps = per_epoch * sft.epochs
        self.warmup = max(1, min(20, self.steps // 20))
        inner, outer = _split(self.model, has_muon=sft.muon_lr > 0)
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Adam(outer.values(), lr=sft.lr, betas=BETAS, fused=True), sft.lr)
        ]
        if inner:
            self.optimizers.append((Muon(inner.values(), lr=sft.muon_lr), sft.muon_lr))
        self._kinds = dict.fromkeys(inner, MUON) | dict.fromkeys(outer, OPTIMIZER)
        self._batches = self._stream()

    def take_step(self) -> float:
        """Take one step; return the mean loss on the assistant's tokens, nats."""
        batch = stack(
            [self.traces[index] for index in next(self._batches)], self.config.sft.context_weight
        )
        losses = token_losses(self.model, batch)
        loss = (losses * batch.weights).sum() / batch.weights.sum().clamp(min=SOME_WEIGHT)
        if not torch.isfinite(loss):
            raise DivergedError(
                f"SFT step {self.step + 1}: loss {float(loss)}; lower sft.lr and sft.muon_lr"
            )
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * self._schedule()
            optimizer.step()
        self.step += 1
        self.tokens += batch.real_tokens
        own = losses.detach()[batch.written]
        self.losses.append(float(own.mean()) if len(own) else 0.0)
        return self.losses[-1]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model)

    def share(self, folder: Path) -> BackendState:
        del folder  # nobody else writes
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return BackendState(
            model=dict(named_weights(self.model)),
            optimizer={
                f"{key}/{names[id(parameter)]}": value
                for optimizer, _ in self.optimizers
                for parameter, entry in optimizer.state.items()
                for key, value in entry.items()
            },
            updates=self.step,
        )

    @torch.no_grad()
    def restore(self, state: BackendState) -> None:
        self._check(state)
        parameters = dict(self.model.named_parameters())
        for name, parameter in parameters.items():
            check_tensor(name, state.model[name], parameter.shape)
            parameter.copy_(state.model[name])
        owners = {
            id(parameter): optimizer
            for optimizer, _ in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for key, value in state.optimizer.items():
            kind, _, name = key.partition("/")
            parameter = parameters[name]
            owners[id(parameter)].state[parameter][kind] = value.clone()
        self.step = state.updates
        for _ in range(self.step):
            next(self._batches)

    def _check(self, state: BackendState) -> None:
        """Raise CheckpointError for a state of another model, or by other optimizers."""
        wanted = {f"{kind}/{name}": kind for name, kinds in self._kinds.items() for kind in kinds}
        odd = (self._kinds.keys() ^ state.model.keys()) | (state.optimizer.keys() - wanted.keys())
        if state.updates:  # of each kind some, for a parameter that no trace reaches has none
            found = {key.partition("/")[0] for key in state.optimizer}
            odd |= set(wanted.values()) - found
        if odd:
            told = ", ".join(sorted(odd)[:3])
            raise CheckpointError(
                f"checkpoint is of another model, or by other optimizers: {told} differ; remove "
                "its folder to start over"
            )

    def _schedule(self) -> float:
        """Return the share of the peak rate: a short rise, then a line down to 0."""
        rise = (self.step + 1) / self.warmup
        return min(rise, (self.steps - self.step) / max(1, self.steps - self.warmup), 1.0)

    def _stream(self) -> Iterator[list[int]]:
        sft = self.config.sft
        for epoch in range(sft.epochs):
            yield from deal(self.traces, sft.batch, self.config.seed, epoch)


def token_losses(model: nn.Module, batch: TraceBatch) -> Tensor:
    """Return the cross-entropy of each weighted token, nats, [N]; other positions skip the head."""
    hidden = model.get_submodule("model")(input_ids=batch.tokens, use_cache=False).last_hidden_state
    logits = model.get_submodule("lm_head")(hidden.reshape(-1, hidden.shape[-1])[batch.source])
    return F.cross_entropy(logits.float(), batch.targets, reduction="none")


class Saves:
    """Checkpoints beside `out`; those of another config, learner or of other traces are not taken
    up. A back end's go on over other ranks, another cut, or the other back end."""

    def __init__(self, config: RunConfig, out: Path, traces: list[Trace], events: Writer) -> None:
        self.folder = out.with_name(f"{out.name}.checkpoints")
        self.model_folder = Path(config.model.path)
        self.limit_s = config.training.checkpoint_timeout_s
        self.events = events
        learner = "small" if _is_small(config) else "backed"  # their optimizers differ
        asked = [asdict(config.sft), config.seed, learner]
        digest = hashlib.sha256(json.dumps(asked).encode())
        for trace in traces:
            digest.update(trace.tokens.tobytes() + trace.loss_mask.tobytes())
        for path in sorted(self.model_folder.glob("*.safetensors")):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        self.identity = digest.hexdigest()

    def load_into(self, learner: Learner) -> None:
        try:
            found = checkpoint.load_latest(self.folder, self.events)
        except CheckpointError as error:
            log.warning("%s; starting over", error)
            found = None
        if found is not None and found.config_hash == self.identity:
            learner.restore(found.backend)
        else:
            self.remove()

    def save(self, learner: Learner) -> None:
        temporary = checkpoint.begin(self.folder, learner.step, 0)
        state = Checkpoint(
            step=learner.step,
            version=learner.step,
            backend=learner.share(temporary),
            config_hash=self.identity,
        )
        files = Files(
            model_folder=self.model_folder,
            keep=1,
            attempt=0,
            ranks=learner.ranks,
            limit_s=self.limit_s,
        )
        checkpoint.complete(temporary, state, files, self.events)

    def save_last(self, learner: Learner) -> None:
        """Save what is learnt before its result is written, which may fail.

        A disk may have room for the result and not for this, which is several times as large.
        """
        try:
            self.save(learner)
        except PublishError as error:
            log.warning("%s. The result is written without it", error)

    def remove(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)


def _split(
    model: nn.Module, *, has_muon: bool
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return (matrices for Muon, the rest for Adam): embeddings and head are the rest."""
    inner: dict[str, nn.Parameter] = {}
    outer: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (inner if is_matrix and has_muon else outer)[name] = parameter
    return inner, outer
