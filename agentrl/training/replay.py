"""Routing replay: each token goes to the experts that it had in the engine.

Near ties, an engine's router and the trainer's choose differently, and a token that goes elsewhere
has another probability. So the choice is the engine's, and the chances are computed anew, from the
trainer's own logits: gradients reach the router. Source: R3, arXiv:2510.11370.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.training.packing import OWN

ROUTER = "Qwen3MoeTopKRouter"
"""As transformers 5 names it: it returns logits, chances and numbers of the experts it chose."""


def picked(told: Tensor, own: Tensor) -> Tensor:
    """Return the experts to take: `told` but for fillings, which go where the router sends them.

    told: [n, k] uint8 or int16, OWN for a filling token's; own: [n, k] int64, the router's choice.
    """
    return torch.where(told == OWN[told.dtype], own, told.long())


def chances_of(logits: Tensor, chosen: Tensor, *, is_normalized: bool) -> Tensor:
    """Return [n, k] float32, the chances of the chosen experts [n, k] by the logits [n, experts].

    is_normalized: they add up to 1 over the chosen; else over all experts.
    """
    if is_normalized:
        return torch.softmax(logits.gather(1, chosen), -1, dtype=torch.float32)
    return torch.softmax(logits, -1, dtype=torch.float32).gather(1, chosen)


def count_changes(told: Tensor, own: Tensor) -> Tensor:
    """Return [2] int64: choices where the router would have gone elsewhere, and choices in all."""
    is_real = told != OWN[told.dtype]
    is_other = (told[:, :, None] != own[:, None, :]).all(2)
    return torch.stack([(is_other & is_real).sum(), is_real.sum()])


def share_of(changes: Tensor) -> dict[str, float]:
    """Return a step's metric from counts summed over all ranks and layers; {} where none came."""
    other, whole = changes.tolist()
    return {"rerouted": other / whole} if whole else {}


def routers_of(model: nn.Module, asked: str) -> list[Any]:
    """Return a transformers model's routers, by layer; `asked`: the key that needs them.

    Raises ConfigError where there are none, and for those that tell chances in place of logits, as
    transformers 5.0's did.
    """
    routers: list[Any] = [one for one in model.modules() if type(one).__name__ == ROUTER]
    if not routers:
        raise ConfigError(
            f"{asked}: {type(model).__name__} of this transformers has no {ROUTER}, whose choice "
            "we know; install transformers 5, take training.backend=megatron, or switch it off"
        )
    fresh = type(routers[0])(model.config)  # its weight is 0, and so are its logits
    if fresh(torch.zeros(1, fresh.hidden_dim))[0].any():
        raise ConfigError(
            f"{asked}: {ROUTER} of this transformers tells chances where it should tell logits; "
            "pip install -U transformers, take training.backend=megatron, or switch it off"
        )
    return routers


class Replay:
    """Overrules the routers of a transformers model, one micro-batch at a time.

    What was told last holds through the backward pass, where layers may be computed again.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        routers = routers_of(model, "engine.sglang.routed_experts=true")
        self.told: Tensor | None = None
        self.changes = torch.zeros(2, dtype=torch.int64, device=device)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._overrule, layer))

    def tell(self, experts: Tensor | None) -> None:
        """Take a micro-batch's [B, T, layers, k]; None leaves the choice to the routers."""
        if experts is None:
            self.told = None
            return
        there = experts.to(self.changes.device, non_blocking=True)
        self.told = there.flatten(0, 1).transpose(0, 1).contiguous()

    def taken_changes(self) -> Tensor:
        """Return `count_changes` of all since this was last asked, on the CPU."""
        found = self.changes.cpu()
        self.changes = torch.zeros_like(self.changes)
        return found

    def _overrule(self, layer: int, router: Any, _: Any, output: tuple[Tensor, ...]) -> Any:
        if self.told is None:
            return output
        logits, chances, own = output
        told = self.told[layer]
        if torch.is_grad_enabled():  # of log-probabilities alone nobody asks
            self.changes += count_changes(told, own)
        chosen = picked(told, own)
        found = chances_of(logits, chosen, is_normalized=router.norm_topk_prob)
        return logits, found.to(chances.dtype), chosen
