"""A transformers model as the loss sees it: tokens in, log-probabilities and entropy out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config import TrainingConfig
from agentrl.training import grpo
from agentrl.training.head import chosen_logprobs

PREFIX = "model."


class Policy(nn.Module):
    """Body and head of a causal language model under one module, so that FSDP gathers both."""

    def __init__(self, model: nn.Module, *, temperature: float, config: TrainingConfig) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.entropy_needs_gradient = config.entropy_coef != 0
        vocabulary = len(model.get_submodule("lm_head").get_parameter("weight"))
        self.is_tiled = 0 < config.head_tiles_from <= vocabulary

    def forward(
        self,
        tokens: Tensor,
        source: Tensor,
        targets: Tensor,
        sequences: dict[str, Any],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return (log-probability, entropy) of each target at the temperature, [N] float32, nats.

        tokens [B, T]; source [N] into the flattened [B·T]; sequences: of a packed row, its
        position_ids and ends. The head sees only the positions in the loss.
        """
        body, head = self.model.get_submodule("model"), self.model.get_submodule("lm_head")
        output = body(input_ids=tokens, use_cache=False, **sequences)
        hidden = output.last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])[source]
        if self.is_tiled:
            weight = head.get_parameter("weight").to(dtype)
            tiled: tuple[Tensor, Tensor] = chosen_logprobs(
                rows.to(dtype), weight, targets, temperature=self.temperature
            )
            return tiled
        logits = head(rows).float() / self.temperature
        log_p = torch.log_softmax(logits, dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_needs_gradient):
            entropy = grpo.entropy(logits)
        return log_p[torch.arange(len(targets), device=targets.device), targets], entropy


def plain_name(name: str) -> str:
    """Return a policy's parameter name as Hugging Face has it; compiled layers are seen through."""
    return name.removeprefix(PREFIX).replace("_orig_mod.", "")
