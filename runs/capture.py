"""Queries, keys and values of a real model while it decodes, taken at its attention interface."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runs.errors import UserError

NAME = "kvcert_capture"
DENSE = "sdpa"  # what computes the attention that is captured


@dataclass
class LayerCapture:
    """One layer of one document: what the replay needs, in the model's dtype."""

    window: Tensor  # [heads, w, d] the last queries of the prefill
    keys: Tensor  # [kv_heads, n + steps, d] of all tokens written so far
    values: Tensor
    scale: float
    queries: list[Tensor] = field(default_factory=list)  # [heads, d] one a decode step


@dataclass(frozen=True)
class Decoded:
    """A document, prefilled and decoded greedily with the full cache."""

    layers: dict[int, LayerCapture]
    generated: tuple[int, ...]  # the token each step was fed


@torch.inference_mode()
def decode(model: PreTrainedModel, ids: Iterable[int], layers: tuple[int, ...], steps: int, window: int) -> Decoded:
    """Prefill ids at once, then feed `steps` greedily chosen tokens one by one, capturing the given layers.

    The query of step j = 1..steps is that of the token fed at position n + j - 1, so n + j tokens are cached then.
    Raises UserError for an architecture whose attention cannot be captured or has soft-capping or learned sinks.
    """
    captured: dict[int, LayerCapture] = {}
    cache = DynamicCache(config=model.config)
    keyword = cache_keyword(model)
    feed = torch.tensor([list(ids)], device=model.device)
    generated = []
    with _capturing(model, captured, set(layers), window):
        for _ in range(steps + 1):
            out = model(feed, use_cache=True, logits_to_keep=1, **{keyword: cache})
            feed = out.logits[:, -1:].argmax(-1)
            generated.append(int(feed))
    if missing := sorted(set(layers) - set(captured)):
        raise UserError(
            f"{type(model).__name__}: attention of layer {missing[0]} does not pass through AttentionInterface"
        )
    return Decoded(captured, tuple(generated[:steps]))


def cache_keyword(model: PreTrainedModel) -> str:
    """How this version of transformers names the cache: "cache" since 5.24, "past_key_values" before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextmanager
def _capturing(
    model: PreTrainedModel, captured: dict[int, LayerCapture], layers: set[int], window: int
) -> Iterator[None]:
    """Route this model's attention through a function that records and delegates; undone on the way out."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if module.layer_idx in layers:
            _refuse_unsupported(model, kwargs)
            _record(captured, module.layer_idx, (query, key, value), kwargs.get("scaling"), window)
        return ALL_ATTENTION_FUNCTIONS[DENSE](module, query, key, value, mask, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[DENSE])
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:  # some models only warn
            raise UserError(f"{type(model).__name__}: does not follow transformers' AttentionInterface")
        yield
    finally:
        model.set_attn_implementation(before)


def _refuse_unsupported(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    for name, what in (
        ("softcap", "soft-capped logits"),
        ("s_aux", "learned sink logits"),
        ("position_bias", "position bias"),
    ):
        if kwargs.get(name) is not None:
            raise UserError(f"{type(model).__name__}: the replay does not support {what}")


def _record(
    captured: dict[int, LayerCapture],
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    scaling: float | None,
    window: int,
) -> None:
    query, key, value = qkv
    if query.shape[0] != 1:
        raise ValueError(f"captured a batch of {query.shape[0]}: expected one document at a time")
    if layer not in captured:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        captured[layer] = LayerCapture(query[0, :, -window:].clone(), key[0], value[0], scale)
        return
    mine = captured[layer]
    mine.queries.append(query[0, :, 0].clone())
    mine.keys, mine.values = key[0], value[0]  # the last step's hold all earlier ones
