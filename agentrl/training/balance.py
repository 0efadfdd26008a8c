"""Load balancing of experts: a loss on their routers, the same in both back ends.

Of one layer and one sequence of T tokens, each of which goes to K of E experts:

    L = Σ_i f_i · P_i,  f_i = E / (K · T) · tokens that went to i,  P_i = mean chance of i

1 where experts are taken evenly. Chances are the softmax of all E logits, and alone have a
gradient; f counts the experts that were taken, by routing replay as well. A step's loss has
coefficient · Σ_layers Σ_sequences (T / the step's tokens) · L more. It is of sequences, so that
packing, micro-batches and ranks change nothing: Megatron's own (moe_aux_loss_coeff) is of whatever
a micro-batch holds, so it is not used. Layers are added up, as the sources do, so that their
coefficients mean the same here, and depth takes nothing from a router's share.
Sources: DeepSeek-V3, arXiv:2412.19437 eq. 17-20 (1e-4, sigmoid chances); Switch, arXiv:2101.03961.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.training.packing import MicroBatch
from agentrl.training.replay import routers_of

KEY = "training.router_balance_coef"


def count_experts(
    chosen: Tensor, owners: Tensor, is_real: Tensor, *, sequences: int, experts: int
) -> Tensor:
    """Return [sequences, experts] float32, how many of a sequence's real tokens went to each.

    chosen: [n, k] int64; owners: [n] int64, the sequence that each token is of; is_real: [n] bool.
    """
    cells = owners[:, None] * experts + chosen
    times = is_real.to(torch.int32)[:, None].expand_as(cells)
    found = torch.zeros(sequences * experts, dtype=torch.int32, device=chosen.device)
    found.scatter_add_(0, cells.flatten(), times.flatten())
    return found.view(sequences, experts).float()


def loss_and_gradient(logits: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ rates · softmax(logits), a number, and its gradient. Both [n, experts]."""
    chances = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    mean = (chances * rates).sum(-1, keepdim=True)
    return mean.sum(), chances * (rates - mean)


class Tally:
    """What a step's backward passes found, layer by layer, on the device until it is asked for."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.sums = torch.zeros(layers, 1 + experts, dtype=torch.float64, device=device)

    def add(self, layer: int, loss: Tensor, counts: Tensor) -> None:
        self.sums[layer, 0] += loss
        self.sums[layer, 1:] += counts.sum(0)

    def taken(self) -> Tensor:
        """Return [layers, 1 + experts] since this was last asked: loss, counts. They add up."""
        found, self.sums = self.sums, torch.zeros_like(self.sums)
        return found


def metrics_of(summed: Tensor) -> dict[str, float]:
    """Return a step's metrics from all ranks' `Tally.taken`; {} where nothing was counted.

    router_balance: the mean of L over layers and tokens; busiest_expert: of a layer, over the mean
    expert, the mean of layers. 1 is even.
    """
    losses, counts = summed[:, 0], summed[:, 1:]
    if not counts.any():
        return {}
    busiest = counts.amax(1) / counts.mean(1)
    return {"router_balance": float(losses.mean()), "busiest_expert": float(busiest.mean())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """What the layers of one micro-batch are told: their n tokens' part in the loss."""

    owners: Tensor
    """[n] int64, the sequence that each token is of."""
    scale: Tensor
    """[n] float32, 1 / (its sequence's tokens · the step's); 0 for one that only fills up."""
    sequences: int
    coefficient: float
    """Of the gradient; what the back end divides gradients by is in it."""
    tally: Tally
    group: dist.ProcessGroup | None = None
    """Ranks that have the sequences' other tokens."""

    def part(self, rank: int, group: dist.ProcessGroup) -> Balance:
        """Return it for the rank-th of as many equal parts of the tokens as the group has ranks."""
        size = group.size()
        if size == 1:
            return self
        owners, scale = self.owners.chunk(size)[rank], self.scale.chunk(size)[rank]
        return replace(self, owners=owners, scale=scale, group=group)

    def joined(self, chances: Tensor, logits: Tensor, chosen: Tensor, *, layer: int) -> Tensor:
        """Return `chances` as they are, such that their backward pass adds the loss's to `logits`.

        logits: [n, experts]; chosen: [n, k], the experts taken. Where layers are computed again
        the loss is still counted once: when there is a backward pass.
        """
        if not torch.is_grad_enabled():
            return chances
        sizes = {"sequences": self.sequences, "experts": logits.shape[1]}
        counts = count_experts(chosen, self.owners, self.scale > 0, **sizes)
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        scale = self.scale * (logits.shape[1] / chosen.shape[1])
        told = (counts, self.owners, scale, self, layer)
        return cast(Tensor, _Joined.apply(chances, logits, *told))  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chances: Tensor,
        logits: Tensor,
        counts: Tensor,
        owners: Tensor,
        scale: Tensor,
        balance: Balance,
        layer: int,
    ) -> Tensor:
        ctx.save_for_backward(logits, counts, owners, scale)
        ctx.balance, ctx.layer = balance, layer
        return chances.view_as(chances)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, counts, owners, scale = ctx.saved_tensors
        loss, gradient = loss_and_gradient(logits, counts[owners] * scale[:, None])
        ctx.balance.tally.add(ctx.layer, loss, counts)
        gradient = (ctx.balance.coefficient * gradient).to(logits.dtype)
        return grads[0], gradient, None, None, None, None, None


def balance_of(batch: MicroBatch, coefficient: float, tally: Tally) -> Balance | None:
    """Return what a micro-batch's layers are told, on the tally's device; None: nothing."""
    if batch.token_shares is None:
        return None
    shares = batch.token_shares.flatten()
    rows, width = batch.tokens.shape
    lengths = torch.full((rows,), width) if batch.ends is None else batch.ends.diff().long()
    owners = torch.arange(len(lengths)).repeat_interleave(lengths)
    real = torch.zeros(len(lengths)).index_add_(0, owners, (shares > 0).float())
    device = tally.sums.device
    return Balance(
        owners=owners.to(device, non_blocking=True),
        scale=(shares / real.clamp(min=1)[owners]).to(device, non_blocking=True),
        sequences=len(lengths),
        coefficient=coefficient,
        tally=tally,
    )


class RouterBalance:
    """Balances the routers of a transformers model, one micro-batch at a time.

    What was told last holds through the backward pass, where layers may be computed again. Routers
    that are overruled (replay.Replay) must be so before.
    """

    def __init__(self, model: nn.Module, coefficient: float, device: torch.device) -> None:
        routers = routers_of(model, f"{KEY} over 0")
        self.coefficient, self.now = coefficient, cast(Balance | None, None)
        self.tally = Tally(len(routers), routers[0].num_experts, device)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._join, layer))

    def tell(self, batch: MicroBatch) -> None:
        self.now = balance_of(batch, self.coefficient, self.tally)

    def _join(self, layer: int, _: Any, __: Any, output: tuple[Tensor, ...]) -> Any:
        if self.now is None:
            return output
        logits, chances, chosen = output
        return logits, self.now.joined(chances, logits, chosen, layer=layer), chosen
