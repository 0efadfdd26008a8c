"""The same arithmetic as TorchBackend's on megatron-core: tensor, expert and data parallel ranks.

Layers are Megatron's `local` ones (megatron_layers), packed rows only; the loss and the head are
shared with TorchBackend, and tests hold the two equal. Every rank calls each method with the same
whole step (led). Its state is whole and under TorchBackend's names: a run may go on with another
layout, or with the other back end. Pipeline and context parallelism are not here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from megatron.core.tensor_parallel import (  # type: ignore[import-not-found, unused-ignore]
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import (  # type: ignore[import-not-found, unused-ignore]
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.module import (  # type: ignore[import-not-found, unused-ignore]
    MegatronModule,
)
from torch import Tensor

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.training.backend import WHOLE, BackendState, Part, learning_rate, refuse_divergence
from agentrl.training.convert import fused_experts, single_experts
from agentrl.training.grouped_experts import check_experts
from agentrl.training.head import Shard, chosen_logprobs
from agentrl.training.hf_map import Layout
from agentrl.training.hf_shape import ModelShape, read_shape
from agentrl.training.megatron_attention import Rotary
from agentrl.training.megatron_layers import make_body
from agentrl.training.megatron_state import WEIGHT, OptimizerShards
from agentrl.training.megatron_weights import MegatronWeights
from agentrl.training.packing import MicroBatch, deal
from agentrl.training.step_loss import Sums, batch_loss, mean_gaps, step_metrics

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
"""What TorchBackend's state has beside the moments: the updates taken, by parameter."""


class MegatronPolicy(MegatronModule):  # type: ignore[misc, unused-ignore]
    """Tokens in, log-probabilities and entropy out, as `policy.Policy` gives them."""

    def __init__(self, config: Any, body: Any, vocabulary: int, temperature: float) -> None:
        super().__init__(config=config)
        self.body = body
        self.temperature = temperature
        self.group = parallel_state.get_tensor_model_parallel_group()
        here = len(self._weight())
        self.start = parallel_state.get_tensor_model_parallel_rank() * here
        self.words = max(0, min(here, vocabulary - self.start))

    def forward(self, batch: MicroBatch, packing: Any) -> tuple[Tensor, Tensor]:
        device = next(self.parameters()).device
        tokens = batch.tokens.to(device)
        hidden = self.body(tokens, torch.zeros_like(tokens), None, packed_seq_params=packing)
        if self.config.sequence_parallel:
            # the head's backward gives each rank the whole gradient: each keeps its own rows
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows = hidden.reshape(-1, hidden.shape[-1])[batch.source.to(device)]
        shard = Shard(start=self.start, group=self.group)
        answer: tuple[Tensor, Tensor] = chosen_logprobs(
            rows,
            self._words(),
            batch.targets.to(device),
            temperature=self.temperature,
            shard=shard if self.group.size() > 1 else None,
        )
        return answer

    def _words(self) -> Tensor:
        """Return this rank's rows of the head, without those that only fill the vocabulary up."""
        weight = self._weight()
        return weight if self.words == len(weight) else weight[: self.words]

    def _weight(self) -> Tensor:
        weight: Tensor = (
            self.body.shared_embedding_or_output_weight()
            if self.body.share_embeddings_and_output_weights
            else self.body.output_layer.weight
        )
        return weight


class MegatronBackend:
    """One policy in training on the ranks of torch.distributed's default group."""

    def __init__(self, folder: Path, config: RunConfig, layout: Layout) -> None:
        self.config, self.layout = config.training, layout
        hf = json.loads((folder / "config.json").read_bytes())
        self.shape: ModelShape = read_shape(hf)
        layout.check(self.shape)
        if layout.pp != 1:
            raise ConfigError(
                f"pp={layout.pp}: MegatronBackend keeps the layers on one stage; pp=1"
            )
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=1,
            )
            model_parallel_cuda_manual_seed(config.seed)
        dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32
        self.dtype = dtype
        megatron_config, body = make_body(
            self.shape, hf, layout, dtype=dtype, recomputes=self.config.recompute == "layers"
        )
        check_experts(body, self.shape.layers if self.shape.experts else 0)
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

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [N] float32 at the sampling temperature, on every rank."""
        return self._forward(batch)[0].cpu()

    def train_step(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Take one optimizer step over all of `batches`; return its metrics."""
        dp = parallel_state.get_data_parallel_group()
        self.policy.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = Sums()
        for batch in deal(batches, dp.size())[dp.rank()]:
            logprobs, entropy = self._forward(batch)
            batch_loss(logprobs, entropy, batch, self.config, sums).backward()  # type: ignore[no-untyped-call]
        finalize_model_grads([self.policy])
        summed = sums.as_tensor().to(self._device)
        dist.all_reduce(summed, group=dp)
        metrics = step_metrics(summed, has_kl=False)
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

    @torch.no_grad()
    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their Hugging Face names on every rank, one place at a time."""
        for name, tensor in self.weights.named():
            yield name, tensor.to(self.dtype)

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
        gaps = sums.gap_sums(int(most)).to(self._device)
        dist.all_reduce(gaps, group=dp)
        return mean_gaps(gaps)

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

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if batch.ends is None:
            batch = replace(batch, ends=_row_ends(batch.tokens), tokens=batch.tokens.reshape(1, -1))
        batch = _filled(batch, -batch.tokens.shape[1] % self.layout.tp)
        assert batch.ends is not None
        answer: tuple[Tensor, Tensor] = self.policy(batch, self.rotary.packing(batch.ends))
        return answer


def _of_kind(state: BackendState, kind: str) -> Iterator[tuple[str, Tensor]]:
    if kind == WEIGHT:
        yield from state.model.items()
        return
    for key, tensor in state.optimizer.items():
        if key.startswith(f"{kind}/"):
            yield key.removeprefix(f"{kind}/"), tensor


def _row_ends(tokens: Tensor) -> Tensor:
    rows, width = tokens.shape
    return torch.arange(0, rows * width + 1, width, dtype=torch.int32)


def _filled(batch: MicroBatch, missing: int) -> MicroBatch:
    """Lengthen a packed row by a sequence of its own, which is in no loss."""
    assert batch.ends is not None
    if not missing:
        return batch
    tokens = torch.cat([batch.tokens, batch.tokens.new_zeros(1, missing)], 1)
    ends = torch.cat([batch.ends, batch.ends[-1:] + missing])
    return replace(batch, tokens=tokens, ends=ends)
