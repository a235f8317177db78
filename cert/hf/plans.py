"""What a compression decided, kept in host memory so that a larger budget retains a superset."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cert.streamed import Event


@dataclass(frozen=True)
class Plan:
    """One layer at one event, in host memory: the rows then present, and each one's probability to be there afterwards.

    prob [batch, kv_heads, rows], 0 or 1 for topk; position [batch, kv_heads, rows] logical, -1 at padding, or None
    where every token was present; expected: sum of the probabilities of staying, given what was present.
    """

    prob: Tensor
    position: Tensor | None
    expected: float


Plans = dict[int, dict[int, Plan]]  # logical length at an event -> layer -> what was decided


def least_prob(plans: Iterable[Plan], coins: Tensor, position: Tensor | None) -> Tensor:
    """The largest probability that any of these plans gave each row at `position` [batch, kv_heads, rows], or token.

    0 for a token that was gone: its coin (coins [batch, kv_heads, n]) lay above the probability p it had, so under
    max(p, q) it stays iff u <= q, and q is then the larger.
    """
    found = torch.zeros_like(coins)
    for plan in plans:
        prob = plan.prob.to(found)
        at = torch.arange(coins.shape[-1]) if plan.position is None else plan.position.long()
        at = at.to(found.device).expand(prob.shape)
        found.scatter_reduce_(-1, at.clamp(min=0), prob.masked_fill(at < 0, 0), "amax")
    return found if position is None else found.gather(-1, position.long().clamp(min=0))


def events(plans: Plans, layer: int, head: int, row: int = 0) -> list[Event]:
    """What the compressions decided for one KV head, in order, as cert.streamed.replayed_path takes it (poisson)."""
    found = []
    for length, decided in sorted(plans.items()):
        plan = decided[layer]
        position = torch.arange(length) if plan.position is None else plan.position[row, head].long()
        here = position >= 0
        found.append(Event(position[here].numpy(), plan.prob[row, head][here].numpy()))
    return found
