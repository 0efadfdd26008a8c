"""A Megatron model as the loss sees it, or one pipeline stage of it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]
from megatron.core.tensor_parallel import (  # type: ignore[import-not-found, unused-ignore]
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import (  # type: ignore[import-not-found, unused-ignore]
    MegatronModule,
)
from torch import Tensor

from agentrl.training.head import Shard, chosen_logprobs
from agentrl.training.megatron_stages import Answer
from agentrl.training.packing import MicroBatch


class MegatronPolicy(MegatronModule):  # type: ignore[misc, unused-ignore]
    """Tokens in, log-probabilities and entropy out, as `policy.Policy` has it; or a stage of it."""

    def __init__(self, config: Any, body: Any, vocabulary: int, temperature: float) -> None:
        super().__init__(config=config)
        self.module = body
        """So named, Megatron's schedule finds what it asks of a model behind this one."""
        self.temperature = temperature
        self.group = parallel_state.get_tensor_model_parallel_group()
        here = len(self._weight()) if body.post_process else 0
        self.start = parallel_state.get_tensor_model_parallel_rank() * here
        self.words = max(0, min(here, vocabulary - self.start))

    def forward(self, batch: MicroBatch, packing: Any) -> Tensor | Answer:
        """Return hidden states for the next stage, or the last one's answer."""
        device = next(self.parameters()).device
        tokens = batch.tokens.to(device)
        hidden: Tensor = self.module(
            tokens, torch.zeros_like(tokens), None, packed_seq_params=packing
        )
        if not self.module.post_process:
            return hidden
        if self.config.sequence_parallel:
            # the head's backward gives each rank the whole gradient: each keeps its own rows
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows = hidden.reshape(-1, hidden.shape[-1])[batch.source.to(device)]
        shard = Shard(start=self.start, group=self.group)
        answer: Answer = chosen_logprobs(
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
            self.module.shared_embedding_or_output_weight()
            if self.module.share_embeddings_and_output_weights
            else self.module.output_layer.weight
        )
        return weight
