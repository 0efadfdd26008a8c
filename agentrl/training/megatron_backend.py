"""The same arithmetic as TorchBackend's on megatron-core: TP, EP, PP and DP ranks.

Layers are Megatron's `local` ones (megatron_layers), packed rows only; the loss and the head are
shared with TorchBackend, and tests hold the two equal. Every rank calls each method with the same
whole step (led). Its state is whole and under TorchBackend's names: a run may go on with another
layout, or with the other back end. Context parallelism is not here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]
from megatron.core.distributed import (  # type: ignore[import-not-found, unused-ignore]
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (  # type: ignore[import-not-found, unused-ignore]
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.tensor_parallel.random import (  # type: ignore[import-not-found, unused-ignore]
    model_parallel_cuda_manual_seed,
)
from torch import Tensor

from agentrl.config import RunConfig
from agentrl.hf_shape import Layout, ModelShape, read_shape
from agentrl.training.backend import (
    OPTIMIZER,
    WHOLE,
    BackendState,
    Part,
    check_kinds,
    learning_rate,
    refuse_divergence,
)
from agentrl.training.balance import Balance, Tally, balance_of, metrics_of
from agentrl.training.convert import fused_experts, single_experts
from agentrl.training.grouped_experts import Mixture, check_experts
from agentrl.training.megatron_attention import Rotary
from agentrl.training.megatron_layers import make_body
from agentrl.training.megatron_policy import MegatronPolicy
from agentrl.training.megatron_stages import Answer, run_schedule, summed, told_by
from agentrl.training.megatron_state import WEIGHT, OptimizerShards
from agentrl.training.megatron_weights import MegatronWeights
from agentrl.training.packing import OWN, MicroBatch, deal
from agentrl.training.replay import share_of
from agentrl.training.step_loss import Sums, batch_loss, mean_gaps, step_metrics

*MOMENTS, STEP = OPTIMIZER


class MegatronBackend:
    """One policy in training on the ranks of torch.distributed's default group."""

    def __init__(self, folder: Path, config: RunConfig, layout: Layout) -> None:
        self.config, self.layout = config.training, layout
        hf = json.loads((folder / "config.json").read_bytes())
        self.shape: ModelShape = read_shape(hf)
        layout.check(self.shape)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=1,
            )
            model_parallel_cuda_manual_seed(config.seed)
        dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32
        self.dtype = dtype
        megatron_config, body = make_body(
            self.shape, hf, layout, dtype=dtype, recomputes=self.config.recompute == "layers"
        )
        check_experts(body, self.shape.layers // layout.pp if self.shape.experts else 0)
        policy = MegatronPolicy(
            megatron_config, body, self.shape.vocabulary, config.agent.temperature
        )
        parameters = dict(body.named_parameters())
        self.rotary = Rotary(hf, self.shape.head_dim, next(body.parameters()).device)
        self.weights = MegatronWeights(parameters, self.shape, layout)
        self.weights.load(folder)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.policy = DistributedDataParallel(megatron_config, ddp, policy)
        self.optimizer = get_megatron_optimizer(
            self._optimizer_config(),
            [self.policy],
            config_overrides={},  # all weights decay alike, as TorchBackend's do
        )
        self.weights.shards = OptimizerShards(self.optimizer)
        self.updates = 0
        self.gaps: list[float] = []
        self.replays = config.engine.sglang.routed_experts
        self.tally = Tally(self.shape.layers, self.shape.experts, self._device)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [N] float32 at the sampling temperature, on every rank."""
        found: list[Tensor] = []

        def keep(answer: Answer, _: MicroBatch) -> Tensor:
            found.append(answer[0])
            return answer[0].sum()

        run_schedule(self.policy, [batch], self._forward, keep, forward_only=True)
        known, shape = found[0] if found else None, batch.targets.shape
        last, device = self.layout.pp - 1, self._device
        return told_by(last, known, shape, dtype=torch.float32, device=device).cpu()

    def train_step(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Take one optimizer step over all of `batches`; return its metrics."""
        dp = parallel_state.get_data_parallel_group()
        sums = self.backward(deal(batches, dp.size())[dp.rank()])
        finalize_model_grads([self.policy])
        totals = sums.as_tensor().to(self._device)
        dist.all_reduce(totals, group=dp)
        metrics = step_metrics(summed(totals), has_kl=False)
        metrics |= self._rerouted() | self._balanced()
        self.gaps = self._gaps_over(dp, sums)
        lr = learning_rate(self.config, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        refuse_divergence(norm, loss=metrics["loss"], updates=self.updates)
        self.optimizer.step()
        self.updates += 1
        return {**metrics, "grad_norm": norm, "lr": lr}

    def backward(self, batches: Sequence[MicroBatch]) -> Sums:
        """Add up the gradients of these alone; return their sums: zeros but on the last stage."""
        self.policy.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = Sums()

        def loss(answer: Answer, batch: MicroBatch) -> Tensor:
            return batch_loss(*answer, batch, self.config, sums)

        run_schedule(self.policy, batches, self._forward, loss)
        return sums

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names on every rank, one place at a time."""
        for name, tensor in self.weights.named():
            yield name, tensor if tensor.dtype == self.dtype else tensor.to(self.dtype)

    @torch.no_grad()
    def state(self, part: Part = WHOLE) -> BackendState:
        """Return this part of the state, on the CPU; every rank takes part in gathering it."""
        kept: dict[str, dict[str, Tensor]] = {}
        for kind in (WEIGHT, *(MOMENTS if self.updates else ())):
            named = self.weights.named(kind)
            gathered = fused_experts(named, self.shape) if self.shape.experts else named
            kept[kind] = {
                name: tensor.cpu()
                for number, (name, tensor) in enumerate(gathered)
                if part.has(number)
            }
        model = kept.pop(WEIGHT)
        optimizer = {
            f"{kind}/{name}": tensor
            for kind, tensors in kept.items()
            for name, tensor in tensors.items()
        }
        if self.updates:
            optimizer |= {f"{STEP}/{name}": torch.tensor(float(self.updates)) for name in model}
        return BackendState(model=model, optimizer=optimizer, updates=self.updates)

    @torch.no_grad()
    def restore(self, state: BackendState | None, *, updates: int, kinds: Sequence[str]) -> None:
        """Cut rank 0's state over the ranks; None on the others."""
        check_kinds(kinds)
        self.weights.shards.clear()
        for kind in (WEIGHT, *(kind for kind in kinds if kind != STEP)):
            found = None if state is None else dict(single_experts(_of_kind(state, kind)))
            self.weights.take(kind, found)
        if kinds:
            self.weights.shards.set_step(updates)
        self.updates = updates

    def _gaps_over(self, dp: dist.ProcessGroup, sums: Sums) -> list[float]:
        most = torch.tensor(sums.samples, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=dp)
        summed(most)  # known to the last stage only
        gaps = sums.gap_sums(int(most)).to(self._device)
        dist.all_reduce(gaps, group=dp)
        return mean_gaps(summed(gaps))

    def _optimizer_config(self) -> Any:
        return OptimizerConfig(
            optimizer="adam",
            lr=self.config.lr,
            weight_decay=self.config.weight_decay,
            adam_beta1=self.config.beta1,
            adam_beta2=self.config.beta2,
            adam_eps=1e-8,
            clip_grad=self.config.max_grad_norm,
            params_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            use_distributed_optimizer=True,
        )

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.policy.parameters()).device
        return device

    def _forward(self, batch: MicroBatch) -> Tensor | Answer:
        if batch.ends is None:
            batch = _in_one_row(batch)
        batch = _filled(batch, -batch.tokens.shape[1] % self.layout.tp)
        assert batch.ends is not None
        packing = replace(
            self.rotary.packing(batch.ends),
            experts=self._experts(batch),
            balance=self._balance(batch),
        )
        answer: Tensor | Answer = self.policy(batch, packing)
        return answer

    def _experts(self, batch: MicroBatch) -> Tensor | None:
        """Return what this rank's layers are told of a row: its own tokens' experts, by layer."""
        if batch.experts is None:
            return None
        rank = parallel_state.get_tensor_model_parallel_rank()
        here: Tensor = batch.experts[0].chunk(self.layout.tp)[rank]
        return here.to(self._device, non_blocking=True).transpose(0, 1).contiguous()

    def _balance(self, batch: MicroBatch) -> Balance | None:
        """Return what this rank's layers are told of its own tokens of a row."""
        found = balance_of(batch, self.config.router_balance_coef, self.tally)
        group = parallel_state.get_tensor_model_parallel_group()
        return None if found is None else found.part(group.rank(), group)

    def _balanced(self) -> dict[str, float]:
        """Return what balancing found, of all ranks: each has its own tokens and layers."""
        if not self.config.router_balance_coef:
            return {}
        found = self.tally.taken()
        dist.all_reduce(found)
        return metrics_of(found)

    def _rerouted(self) -> dict[str, float]:
        """Return the share of choices that replay changed, of all ranks: each has its own tokens
        and layers."""
        if not self.replays:
            return {}
        changes = torch.zeros(2, dtype=torch.int64, device=self._device)
        for mixture in self.policy.modules():
            if isinstance(mixture, Mixture) and mixture.changes is not None:
                changes += mixture.changes
                mixture.changes = None
        dist.all_reduce(changes)
        return share_of(changes)


def _of_kind(state: BackendState, kind: str) -> Iterator[tuple[str, Tensor]]:
    if kind == WEIGHT:
        yield from state.model.items()
        return
    for key, tensor in state.optimizer.items():
        if key.startswith(f"{kind}/"):
            yield key.removeprefix(f"{kind}/"), tensor


def _in_one_row(batch: MicroBatch) -> MicroBatch:
    """Return padded rows end to end."""
    rows, width = batch.tokens.shape
    return replace(
        batch,
        tokens=batch.tokens.reshape(1, -1),
        ends=torch.arange(0, rows * width + 1, width, dtype=torch.int32),
        experts=None if batch.experts is None else batch.experts.flatten(0, 1)[None],
        token_shares=None if batch.token_shares is None else batch.token_shares.reshape(1, -1),
    )


def _filled(batch: MicroBatch, missing: int) -> MicroBatch:
    """Lengthen a packed row by a sequence of its own, which is in no loss."""
    assert batch.ends is not None
    if not missing:
        return batch
    tokens = torch.cat([batch.tokens, batch.tokens.new_zeros(1, missing)], 1)
    ends = torch.cat([batch.ends, batch.ends[-1:] + missing])
    experts = batch.experts
    if experts is not None:
        experts = torch.cat(
            [experts, experts.new_full((1, missing, *experts.shape[2:]), OWN[experts.dtype])], 1
        )
    shares = None if batch.token_shares is None else F.pad(batch.token_shares, (0, missing))
    return replace(batch, tokens=tokens, ends=ends, experts=experts, token_shares=shares)
