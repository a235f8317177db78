"""CertifiedCache: rows are truly evicted, lengths stay logical, each layer knows where its rows came from."""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from cert.errors import CertError
from cert.hf.call import copied
from cert.hf.plans import Plans
from cert.policy import Policy

ROLLBACK, BATCH = "a certified cache cannot be rolled back", "a certified cache does not change its batch"


def _refused(name: str, why: str) -> Callable[..., Any]:
    """A method of transformers' caches that a certified one cannot have."""

    def method(*args: Any, **kwargs: Any) -> None:  # noqa: ARG001
        raise CertError(f"{name}: {why}")

    return method


@dataclass
class Terms:
    """What a cache and its layers agree on."""

    policy: Policy
    audit: bool = False  # keep every row ever written beside the retained ones
    often: bool = False  # compressed every few tokens: the scoring window reaches back beyond the last event
    closed: bool = False  # its session has ended: plain attention would read evicted layers wrongly
    arms: tuple[Policy, ...] = ()  # policies it may be forked to while nothing was compressed
    signals: bool = False  # note the boundary margins of a top-k set

    @property
    def window(self) -> int:
        """How many of the last queries the scores need."""
        return max((x.window for x in (self.policy, *self.arms) if x.score == "snapkv"), default=0)

    @property
    def mass(self) -> bool:
        """Whether a score needs the running sums of attention."""
        return any(x.score == "h2o" for x in (self.policy, *self.arms))


class CertifiedLayer(DynamicLayer):
    """Keys and values of one full-attention layer: all rows, then the retained ones, padded to the fullest head.

    keys, values [batch, kv_heads, rows, d]; log_weight [batch, kv_heads, rows] = log(1/prob), -inf at padding, and
    position, the rows' logical places, exist once something was evicted: until then the layer is an ordinary one.
    """

    is_croppable = False

    def __init__(self, terms: Terms) -> None:
        super().__init__()
        self.terms = terms
        self.length = 0  # logical: tokens ever written
        self.log_weight: Tensor | None = None
        self.position: Tensor | None = None
        self.evicted: Tensor | None = None  # [batch, kv_heads] tokens gone
        self.anticipated: Tensor | None = None  # [batch, kv_heads]
        self.standing: Any = None  # cert.hf.certify: what stays the same until the next compression,
        self.tail: Tensor | None = None  # and what kernels that sum up need of the rows
        self.margins: tuple[float, ...] = ()  # of each row and KV head at the first event, with signals
        self.queries: Tensor | None = None  # [batch, heads, w, d] the last ones since the last compression
        self.mass: Tensor | None = None  # [batch, kv_heads, rows] h2o's running sums
        self.audit: tuple[Tensor, Tensor] | None = None  # every row ever written, as it was written
        self.scale = 1.0
        self.softcap: float | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new rows; returns what is stored, which is what attention is to see."""
        if self.log_weight is not None:
            self._append_scalars(key_states)
        if self.audit is not None:
            k, v = self.audit
            self.audit = torch.cat([k, key_states], dim=-2), torch.cat([v, value_states], dim=-2)
        self.length += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def _append_scalars(self, key_states: Tensor) -> None:
        assert self.log_weight is not None and self.position is not None
        if self.terms.closed:
            raise CertError("this cache has evicted tokens, and its session has ended: no plain attention on it")
        new = torch.arange(self.length, self.length + key_states.shape[-2], device=key_states.device, dtype=torch.int32)
        new = new.expand(*key_states.shape[:2], -1)
        self.log_weight = torch.cat([self.log_weight, torch.zeros_like(new, dtype=torch.float32)], dim=-1)
        self.position = torch.cat([self.position, new], dim=-1)

    def get_seq_length(self) -> int:
        """The logical length: position ids follow it, and the model's own mask, which evicted layers do not use."""
        return self.length

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they are stored."""
        if self.keys is None or self.values is None:
            raise CertError("an empty layer: nothing was fed yet")
        return self.keys, self.values

    @property
    def prob(self) -> Tensor:
        """Inclusion probabilities [batch, kv_heads, rows] of the stored rows, 1 at padding."""
        if self.log_weight is None:
            return torch.ones(self.stored[0].shape[:-1], device=self.stored[0].device)
        return torch.where(self.log_weight.isinf(), 1.0, torch.exp(-self.log_weight))

    @property
    def real(self) -> Tensor:
        """Which stored rows [batch, kv_heads, rows] are tokens and not padding."""
        if self.log_weight is None:
            return torch.ones(self.stored[0].shape[:-1], dtype=torch.bool, device=self.stored[0].device)
        return ~self.log_weight.isinf()

    def offset(self, m: int, first: int) -> Tensor:
        """What m new tokens from position `first` on add to their logits [batch, m, kv_heads, rows]: log(1/prob) where the
        policy compensates with it, -inf at rows of later logical places, so that it is causal whatever was evicted.
        """
        assert self.log_weight is not None and self.position is not None
        hajek = self.terms.policy.compensation == "hajek"
        offset = (self.log_weight if hajek else self.log_weight.clamp(max=0))[:, None]
        if first + 1 == self.length:  # the last token, which sees all there is
            return offset
        at = torch.arange(first, first + m, device=offset.device)[:, None, None]
        return offset.masked_fill(self.position[:, None] > at, -torch.inf)

    crop = _refused("crop", ROLLBACK)
    reset = _refused("reset", "begin another cache instead")
    reorder_cache = _refused("reorder_cache", "beams would share coins")
    batch_repeat_interleave = _refused("batch_repeat_interleave", BATCH)
    batch_select_indices = _refused("batch_select_indices", BATCH)


class CertifiedCache(Cache):
    """A transformers cache whose full-attention layers can be compressed; sliding layers are the ordinary ones.

    It carries what one conversation needs: the policy, the token ids fed so far, and where it was compressed.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        audit: bool = False,
        often: bool = False,
        arms: tuple[Policy, ...] = (),
    ) -> None:
        self.terms = Terms(policy, audit, often, arms=arms)
        super().__init__(
            layers=[
                CertifiedLayer(self.terms) if type(layer) is DynamicLayer else layer
                for layer in DynamicCache(config=config).layers
            ]
        )
        self.last = max(self.compressible)  # number of the last layer that can be compressed
        self.ids: Tensor | None = None  # [batch, length] on the CPU
        self.events: list[int] = []  # logical lengths at which it was compressed
        self.plans: Plans = {}  # what each event decided
        self.documents: tuple[int | str, ...] = ()  # one a row, known from the first compression on
        self.expected: float | None = None  # sum of prob / logical rows at the last event
        self.realised: float | None = None
        self.prefix_bytes: tuple[int, int] = (0, 0)  # keys and values before and after the last event
        self.liked = False  # compressed to the counts of another one
        self.compressing = False  # also afterwards, where a compression did not finish

    @property
    def compressible(self) -> dict[int, CertifiedLayer]:
        """Layer number -> layer, of those with full attention."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, CertifiedLayer)}

    @property
    def policy(self) -> Policy:
        """How it is compressed."""
        return self.terms.policy

    @property
    def length(self) -> int:
        """Logical length: tokens fed so far."""
        return 0 if self.ids is None else self.ids.shape[1]

    def check_whole(self) -> None:
        """Raise CertError where a forward or a compression stopped half way: layers would answer for different texts."""
        if self.compressing or any(self.get_seq_length(i) != self.length for i in range(len(self.layers))):
            raise CertError(
                "a forward or a compression of this cache did not finish: reset(), or fork() one from before it"
            )

    def feed(self, ids: Tensor) -> None:
        """Note the tokens [batch, m] of a forward that is about to run."""
        self.check_whole()
        new = ids.detach().to("cpu", torch.int64)
        if self.ids is not None and self.ids.shape[0] != new.shape[0]:
            raise CertError(f"a batch of {new.shape[0]}: expected {self.ids.shape[0]} rows, as this cache began with")
        self.ids = new if self.ids is None else torch.cat([self.ids, new], dim=1)

    def fork(self, policy: Policy | None = None) -> "CertifiedCache":
        """An independent copy, under `policy` if given; nothing that is done to one is seen by the other.

        Raises CertError for another policy once it was compressed, or one whose score the prefill kept nothing for.
        """
        policy = self.policy if policy is None else policy
        if policy != self.policy and self.events:
            raise CertError(f"fork: compressed at {self.events[0]} tokens by another policy; fork before compress()")
        if (policy.score == "snapkv" and policy.window > self.terms.window) or (
            policy.score == "h2o" and not self.terms.mass
        ):
            raise CertError(f"fork to score {policy.score!r}: the prefill kept nothing for it; name it in arms=")
        other = copy.copy(self)
        other.terms = replace(self.terms, policy=policy)
        other.ids, other.events, other.plans, other.layers = copied(self.ids), list(self.events), dict(self.plans), []
        for layer in self.layers:
            twin = copy.copy(layer)
            twin.__dict__.update({name: copied(value) for name, value in vars(layer).items()})
            if isinstance(twin, CertifiedLayer):
                twin.terms = other.terms
            other.layers.append(twin)
        if policy != self.policy:
            other.settle()
        return other

    def settle(self) -> None:
        """It will be compressed by its own policy: drop what was kept for the scores of others."""
        self.terms.arms = ()
        for layer in self.compressible.values():
            if layer.queries is not None:
                layer.queries = layer.queries[:, :, -self.terms.window :].clone() if self.terms.window else None
            layer.mass = layer.mass if self.terms.mass else None

    crop = _refused("crop", ROLLBACK)
    activate_past_recording = _refused("activate_past_recording", ROLLBACK)
    is_croppable = False
    is_compileable = False


def ids_sha256(ids: Tensor) -> str:
    """SHA-256 of token ids [n] as little-endian int64: the document's name where none was given."""
    return hashlib.sha256(ids.numpy().astype(np.dtype("<i8")).tobytes()).hexdigest()
