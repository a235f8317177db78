"""Tiny random models, and the oracle: dense attention over every row, evicted columns masked, the same offset added."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tiny_folder import SMALL
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from cert.hf import CertifiedCache

# "cache" since transformers 5.24, "past_key_values" before
KEYWORD = next(x for x in ("cache", "past_key_values") if x in inspect.signature(LlamaForCausalLM.forward).parameters)
FAMILIES = {
    "llama": {},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                    "num_hidden_layers": 3},
}  # fmt: skip


def tiny(family: str = "llama", attention: str = "sdpa", **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None  # random models stop by length alone
    return model


def tokens(n: int, seed: int = 1, rows: int = 1) -> torch.Tensor:
    return torch.randint(5, 256, (rows, n), generator=torch.Generator().manual_seed(seed))


def kept_sets(cache: CertifiedCache) -> dict[int, list[list[list[int]]]]:
    """Layer -> row -> KV head -> logical positions that are still there."""
    found = {}
    for index, layer in cache.compressible.items():
        if layer.position is None:
            everything = list(range(layer.length))
            found[index] = [[everything] * layer.keys.shape[1]] * layer.keys.shape[0]
            continue
        here = ~torch.isneginf(layer.log_weight)
        found[index] = [
            [layer.position[row, head][here[row, head]].tolist() for head in range(here.shape[1])]
            for row in range(here.shape[0])
        ]
    return found


def column_bias(cache: CertifiedCache, offset: bool = True) -> dict[int, torch.Tensor]:
    """Layer -> [rows, kv_heads, length]: -inf where a token is gone, log(1/prob) where it is still there."""
    found = {}
    for index, layer in cache.compressible.items():
        bias = torch.zeros(layer.keys.shape[0], layer.keys.shape[1], layer.length)
        if layer.position is not None:
            bias.fill_(-math.inf)
            for row in range(bias.shape[0]):
                for head in range(bias.shape[1]):
                    for place, w in zip(
                        layer.position[row, head].tolist(), layer.log_weight[row, head].tolist(), strict=True
                    ):
                        if w > -math.inf:
                            bias[row, head, place] = w if offset else 0.0
        found[index] = bias
    return found


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal to 1e-5 of the largest magnitude, or of 1 where that is larger."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max().clamp(min=1)))


class Oracle:
    """The model alone, dense, whose attention adds a bias a column; `bias` and `values` may be set between feeds."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.bias: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}  # merged ones, in place of the written
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # q, k, v of the last feed

    def attention(self, module, query, key, value, mask, scaling=None, softcap=None, **_):
        index, (batch, heads, m, _), n = module.layer_idx, query.shape, key.shape[2]
        self.rows[index] = (query, key, value)
        if index in self.values:
            old = self.values[index]
            value = torch.cat([old, value[:, :, old.shape[2] :]], dim=2)
        owner = torch.tensor([h * key.shape[1] // heads for h in range(heads)])
        logits = torch.einsum("bhqd,bhkd->bhqk", query, key[:, owner]) * scaling
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) + mask
        bias = self.bias.get(index)
        if bias is not None:
            logits[..., : bias.shape[-1]] += bias[:, owner, None, :]
        assert logits.shape == (batch, heads, m, n)
        return torch.einsum("bhqk,bhkd->bqhd", logits.double().softmax(-1).to(value.dtype), value[:, owner]), None

    @contextmanager
    def running(self) -> Iterator[None]:
        before = self.model.config._attn_implementation
        AttentionInterface.register("oracle", self.attention)
        AttentionMaskInterface.register("oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
        self.model.set_attn_implementation("oracle")
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    @torch.no_grad()
    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        with self.running():
            return self.model(input_ids=ids, use_cache=True, **{KEYWORD: self.cache}).logits
