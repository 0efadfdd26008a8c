"""The trainer's arithmetic on a transformers model in plain torch, on one process or several.

Parameters and optimizer are float32; bfloat16 is for compute and for the engines. On several
ranks, and on a GPU in bfloat16, FSDP2 shards them; rank 0 is called, the others follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config import RunConfig
from agentrl.errors import DivergedError
from agentrl.training import ranks
from agentrl.training.attention import register
from agentrl.training.backend import Backend as Backend
from agentrl.training.backend import BackendState as BackendState
from agentrl.training.backend import check_state, check_tensor, learning_rate, refuse_divergence
from agentrl.training.balance import RouterBalance, metrics_of
from agentrl.training.convert import single_experts
from agentrl.training.model_folder import load_model
from agentrl.training.packing import MicroBatch, deal
from agentrl.training.policy import Policy, plain_name
from agentrl.training.ranks import ALONE, World
from agentrl.training.replay import Replay, share_of
from agentrl.training.sharding import layers_of, like, shard, whole
from agentrl.training.shares import ShareWriter, write_share
from agentrl.training.step_loss import Sums, batch_loss, mean_gaps, step_metrics
from agentrl.training.taken import Taken, as_tensors, reread
from agentrl.training.weight_files import WeightFiles

STEP, LOGPROBS, GATHER, RESTORE, SHARE, EXPORT = 1, 2, 3, 4, 5, 6
SCALARS = "step"
"""The optimizer's state that is one number a parameter."""


class TorchBackend:
    """One policy in training; with a world of several ranks, this rank's part of it."""

    def __init__(self, folder: Path, config: RunConfig, *, world: World = ALONE) -> None:
        torch.set_num_threads(config.training.threads)
        self.run, self.config = config, config.training
        self.temperature = config.agent.temperature
        self.world = world
        self.device = world.device
        is_half = self.config.dtype == "bfloat16"
        self.dtype = torch.bfloat16 if is_half else torch.float32
        self.is_sharded = world.size > 1 or (is_half and world.mesh is not None)
        self.policy = self._policy(folder)
        self.reference = (
            self._policy(Path(config.model.path)).requires_grad_(False)
            if self.config.kl_coef
            else None
        )
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self.config.lr,
            betas=(self.config.beta1, self.config.beta2),
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        self.updates = 0
        self.gaps: list[float] = []
        replays = config.engine.sglang.routed_experts
        self.replay = Replay(self.policy.model, self.device) if replays else None
        # FSDP takes the mean over ranks: see _backward
        coefficient = self.config.router_balance_coef * world.size
        self.balance = (
            RouterBalance(self.policy.model, coefficient, self.device) if coefficient else None
        )

    @property
    def model(self) -> nn.Module:
        return self.policy.model

    def logprobs(self, batch: MicroBatch) -> Tensor:
        self.world.tell(LOGPROBS, ranks.to_tensors([[batch]]))
        return self._logprobs(batch)

    def train_step(
        self, batches: Sequence[MicroBatch], taken: Taken | None = None
    ) -> dict[str, float]:
        hands = deal(batches, self.world.size)
        if self.world.size > 1:
            told = ranks.to_tensors(hands) if taken is None else as_tensors(taken, batches)
            self.world.tell(STEP, told)
        return self._step(hands[0])

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        self.world.tell(EXPORT)
        yield from single_experts(self._gathered(self.dtype))

    def state(self) -> BackendState:
        self.world.tell(GATHER)
        model = self._kept(self._gathered())
        self.world.tell(GATHER, {"optimizer": torch.ones(1)})
        optimizer = self._kept(self._gathered_optimizer())
        return BackendState(model=model, optimizer=optimizer, updates=self.updates)

    def share(self, folder: Path) -> BackendState:
        self.world.tell(SHARE, {"folder": ranks.from_text(str(folder))})
        return self._share()

    def restore(self, state: BackendState) -> None:
        names = {plain_name(name) for name, _ in self.policy.named_parameters()}
        check_state(state, names)
        kinds = sorted({key.partition("/")[0] for key in state.optimizer})
        told = {kind: torch.ones(1) for kind in kinds}
        self.world.tell(RESTORE, told | {"updates": torch.tensor([state.updates])})
        self._restore(state, kinds, state.updates)

    def follow(self) -> None:
        """Take part in what rank 0 calls, until it ends."""
        with ShareWriter(self.config.checkpoint_timeout_s) as writer:
            while self._take_part(writer):
                pass

    def _take_part(self, writer: ShareWriter) -> bool:
        """Take part in one call; return whether there may be another."""
        call, told = self.world.heed()
        if call == STEP:
            with suppress(DivergedError):  # rank 0 has the same, and decides
                self._step(self._hand(told))
        elif call == LOGPROBS:
            self._logprobs(ranks.from_tensors(told, 0)[0])
        elif call == GATHER:
            for _ in self._gathered_optimizer() if told else self._gathered():
                pass
        elif call == EXPORT:
            for _ in self._gathered(self.dtype):
                pass
        elif call == SHARE:
            share, folder = self._share(), Path(ranks.to_text(told["folder"]))
            writer.begin(partial(write_share, folder, share, self.world.part))
        elif call == RESTORE:
            updates = int(told.pop("updates"))
            self._restore(None, sorted(told), updates)
        return call != ranks.END

    def _hand(self, told: dict[str, Tensor]) -> Sequence[MicroBatch]:
        if "draws" not in told:
            return ranks.from_tensors(told, self.world.rank)
        return deal(reread(told, self.run), self.world.size)[self.world.rank]

    def _policy(self, folder: Path) -> Policy:
        if self.world.size == 1:
            return self._loaded(folder)
        needed_mb = 4 * WeightFiles(folder).elements >> 20  # each rank reads all of it, in float32
        with self.world.by_turns(needed_mb):
            return self._loaded(folder)

    def _loaded(self, folder: Path) -> Policy:
        attention = register() if self.config.packing == "packed" else "sdpa"
        model = load_model(folder, attention=attention).train()
        policy = Policy(model, temperature=self.temperature, config=self.config)
        if self.config.recompute == "layers":
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        for layer in layers_of(policy) if self.config.compile else ():
            layer.compile()
        if self.is_sharded:
            assert self.world.mesh is not None
            shard(policy, self.world.mesh, self.dtype)
            return policy
        return policy.to(self.device)

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self._forward(self.policy, batch)[0].cpu()

    def _step(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums()
        for batch in batches:
            if len(batch.targets) or self.is_sharded or self.balance:
                self._backward(batch, sums)
        lr = learning_rate(self.config, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        summed = self.world.summed(sums.as_tensor())
        metrics = step_metrics(summed, has_kl=self.reference is not None)
        changes = share_of(self.world.summed(self.replay.taken_changes())) if self.replay else {}
        if self.balance:
            metrics |= metrics_of(self.world.summed(self.balance.tally.taken().cpu()))
        self.gaps = mean_gaps(self.world.summed(sums.gap_sums(self.world.most(sums.samples))))
        norm = whole(nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm))
        refuse_divergence(float(norm), loss=metrics["loss"], updates=self.updates)
        self.optimizer.step()
        self.updates += 1
        return {**metrics, **changes, "grad_norm": float(norm), "lr": lr}

    def _backward(self, batch: MicroBatch, sums: Sums) -> None:
        logprobs, entropy = self._forward(self.policy, batch)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference = self._forward(self.reference, batch)[0]
        loss = batch_loss(logprobs, entropy, batch, self.config, sums, reference)
        # FSDP takes the mean over ranks; the weights in the loss are of the whole step's sum
        (loss * self.world.size).backward()  # type: ignore[no-untyped-call]

    def _forward(self, policy: Policy, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if self.replay is not None and policy is self.policy:  # the reference routes by itself
            self.replay.tell(batch.experts)
        if self.balance is not None and policy is self.policy:
            self.balance.tell(batch)
        tokens, source, targets = (
            part.to(self.device, non_blocking=True)
            for part in (batch.tokens, batch.source, batch.targets)
        )
        with self._autocast():
            answer: tuple[Tensor, Tensor] = policy(
                tokens, source, targets, _sequences(batch, self.device), self.dtype
            )
        return answer

    def _autocast(self) -> AbstractContextManager[None]:
        is_on = self.dtype == torch.bfloat16 and not self.is_sharded
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_on)

    def _gathered(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter whole, one at a time, where it is computed with.

        In another `dtype` it is before it is gathered, so that no more than that is moved.
        """
        for name, parameter in self.policy.named_parameters():
            yield plain_name(name), whole(parameter, dtype)

    def _gathered_optimizer(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.policy.named_parameters():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{kind}/{plain_name(name)}", whole(value)

    def _kept(self, gathered: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: one.cpu() if self.is_sharded else one for name, one in gathered}

    def _share(self) -> BackendState:
        """Return a copy of every size-th tensor, on the CPU; every rank takes part."""
        has = self.world.part.has
        model = {
            name: tensor.to("cpu", copy=True)
            for number, (name, tensor) in enumerate(self._gathered())
            if has(number)
        }
        optimizer = {
            name: tensor.to("cpu", copy=True)
            for number, (name, tensor) in enumerate(self._gathered_optimizer())
            if has(number)
        }
        return BackendState(model=model, optimizer=optimizer, updates=self.updates)

    @torch.no_grad()
    def _restore(self, state: BackendState | None, kinds: Sequence[str], updates: int) -> None:
        """Cut rank 0's state over the ranks; None on the others."""
        self.optimizer.state.clear()
        for long_name, parameter in self.policy.named_parameters():
            name = plain_name(long_name)
            weight = state.model[name] if state else None
            if weight is not None:
                check_tensor(name, weight, parameter.shape)
            parameter.copy_(like(weight, parameter))
            for kind in kinds:
                value = state.optimizer[f"{kind}/{name}"] if state else None
                if value is not None and kind != SCALARS:
                    check_tensor(f"{kind}/{name}", value, parameter.shape)
                self.optimizer.state[parameter][kind] = (
                    _step_count(updates, value, parameter)
                    if kind == SCALARS
                    else like(value, parameter)
                )
        self.updates = updates


def _step_count(updates: int, value: Tensor | None, parameter: Tensor) -> Tensor:
    known = value if value is not None else torch.tensor(float(updates))
    return known.to(parameter.device, torch.float32, copy=True)


def _sequences(batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Return what tells a packed row's sequences apart; {} for rows of one each."""
    if batch.ends is None:
        return {}
    ends, length = batch.ends.long(), batch.tokens.shape[1]
    lengths = ends.diff()
    positions = torch.arange(length) - ends[:-1].repeat_interleave(lengths)
    longest = int(lengths.max())
    cut = batch.ends.to(device, non_blocking=True)
    return {
        "position_ids": positions[None].to(device, non_blocking=True),
        "cu_seq_lens_q": cut,
        "cu_seq_lens_k": cut,
        "max_length_q": longest,
        "max_length_k": longest,
    }
