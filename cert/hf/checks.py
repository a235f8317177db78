"""What is refused, by name, before any work: each line a combination that would go wrong silently."""

import inspect
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from cert.errors import CertError
from cert.gate import Gate
from cert.hf.arguments import check_ids, expect
from cert.hf.attention import NAME, own_implementation
from cert.hf.cache import CertifiedCache
from cert.hf.call import CACHE_NAMES
from cert.hf.families import refusal, untested
from cert.hf.state import OPEN, State
from cert.policy import Policy

MODES = {"greedy_search", "sample"}
PARTED = (
    "{name}: a forward inside generate() without the cache it began with: the model has dropped it, or a logits "
    "processor or a stopping criterion calls the model, where use_cache=False is expected"
)
RUNNING = "called inside a running generate(), whose request it would part in two: expected when that has ended"
BARE = {"custom_generate": "a custom generation loop", "assistant_model": "assisted decoding"}


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """The modules of a decoder whose attention goes through the interface, one a layer."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and "attention" in type(m).__name__.lower()]


def check_model(model: PreTrainedModel) -> None:
    """Refuse an architecture that the session could not serve; CertError says which part."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise CertError(f"{name}: an encoder-decoder; expected a decoder")
    if not model._can_set_attn_implementation():
        raise CertError(f"{name}: does not follow transformers' attention interface")
    if not set(CACHE_NAMES) & set(inspect.signature(model.forward).parameters):
        raise CertError(f"{name}: its forward takes no cache")
    if any(id(module) in state.modules for state in OPEN for module in attention_modules(model)):
        raise CertError(f"{name}: is in another certified() session")
    if why := refusal(config):
        raise CertError(f"{name}: {why}")
    kinds = [type(layer) for layer in DynamicCache(config=model.config).layers]
    if other := sorted({kind.__name__ for kind in kinds} - {"DynamicLayer", "DynamicSlidingWindowLayer"}):
        raise CertError(f"{name}: cache layers of kind {other[0]}; expected full and sliding attention")
    if DynamicLayer not in kinds:
        raise CertError(f"{name}: every layer is sliding; no layer with full attention, so nothing to compress")
    _check_modules(model, name, len(kinds))
    _check_attention(name, config)


def _check_attention(name: str, config: PreTrainedConfig) -> None:
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        raise CertError(f"{name}: sdpa leaves out attn_logit_softcapping; load it with attn_implementation='eager'")
    if why := untested(config):
        raise CertError(f"{name}: {why}")


def _check_modules(model: PreTrainedModel, name: str, layers: int) -> None:
    modules = attention_modules(model)
    if {module.layer_idx for module in modules} != set(range(layers)):
        raise CertError(f"{name}: found attention modules for {len(modules)} of {layers} layers")
    if any(hasattr(module, "sinks") for module in modules):
        raise CertError(f"{name}: learned sink logits, which the retained attention does not support")
    for module in modules:
        before = module.config._attn_implementation
        if before == NAME:
            raise CertError(f"{name}: shares its config with a model in another certified() session")
        own_implementation(module, before)
        if before not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            raise CertError(f"{name}: attention {before!r} has no mask function to delegate to")


def first_kernel(model: PreTrainedModel, state: State) -> tuple[str, str]:
    """What would serve the session's own policy, and why; CertError where a kernel asked for by name cannot."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    softcap = getattr(config, "attn_logit_softcapping", None)
    return state.serves(state.options.policy, model.device.type, model.dtype, head_dim, softcap)


def check_rotation(longrope: int | None, seen: int, total: int) -> None:
    """Refuse a text that grows past the length from which longrope rotates all keys otherwise, those cached included."""
    if longrope is not None and 0 < seen <= longrope < total:
        raise CertError(
            f"longrope: beyond {longrope} tokens all keys are rotated otherwise, and {seen} are cached already: end the "
            f"text there, or begin with more than {longrope} in one forward; recompute() is the model alone"
        )


def generation(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The settings a generate() of these arguments would run with, and the arguments that are none of them."""
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    rest = {k: v for k, v in kwargs.items() if k not in ("inputs", "generation_config")}
    prepare: Any = model._prepare_generation_config
    found: tuple[Any, dict[str, Any]] = prepare(given, **rest)
    return found


def check_generate(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse generation modes and caches that a certified cache cannot serve."""
    for word, what in BARE.items():
        if kwargs.get(word) is not None:
            raise CertError(f"{word}: {what} is not supported")
    config, unused = generation(model, args, kwargs)
    mode = config.get_generation_mode(None).value
    if mode not in MODES or getattr(config, "prompt_lookup_num_tokens", None):
        raise CertError(f"generation mode {mode!r}: expected greedy search or sampling")
    if config.cache_implementation not in (None, "dynamic", "hybrid"):
        raise CertError(f"cache_implementation {config.cache_implementation!r}: expected none (a dynamic cache)")
    if config.use_cache is False:
        raise CertError("use_cache=False: there is no cache to compress")
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0):
        raise CertError("guidance_scale: its second, unconditional forward has no request of its own")
    check_inputs(unused)


def require(holds: bool, message: str) -> None:
    """Raise CertError with the message where a condition does not hold."""
    if not holds:
        raise CertError(message)


def refuse_own_cache(given: Any) -> None:
    """Outside generate() a caller's empty cache would stay empty, and each step would begin another conversation."""
    if given is not None and not isinstance(given, CertifiedCache):
        raise CertError(f"{type(given).__name__} of your own: pass none, and go on with session.cache_kwargs")


def check_inputs(kwargs: dict[str, Any]) -> None:
    """Refuse inputs whose logical positions the session cannot know."""
    if kwargs.get("inputs_embeds") is not None:
        raise CertError("inputs_embeds: expected input_ids, which name the document")
    mask = kwargs.get("attention_mask")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise CertError("attention_mask: expected a 2-D one, not a prepared (4-D) mask")
    if not bool((mask == 1).all()):
        raise CertError("attention_mask with padding: feed rows of one length, or one row at a time")


def check_cache(cache: Any, owned: Container[Any]) -> CertifiedCache | None:
    """The session's own cache, or None where an empty one of generate's kind is to be swapped; refuse all others."""
    if isinstance(cache, CertifiedCache):
        if cache not in owned:
            raise CertError("a certified cache of another session")
        return cache
    if cache is not None and (type(cache) is not DynamicCache or cache.offloading):
        raise CertError(f"{type(cache).__name__}: expected a dynamic cache, neither static, offloaded nor quantized")
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        raise CertError(f"a cache of {cache.get_seq_length()} tokens: expected an empty one, or session.cache_kwargs")
    return None


def check_like(cache: CertifiedCache, like: CertifiedCache | None) -> None:
    """Equal counts need a top-k policy, and another cache compressed now and before where this one was."""
    if like is None:
        return
    name, first = cache.policy.design, "compress(like=...)"
    require(name == "topk", f"{first} under design {name!r}: expected 'topk', whose counts can be set")
    require(cache.liked or not cache.events, f"{first}: was compressed to counts of its own before; expected never")
    events = [*cache.events, cache.length]
    same = isinstance(like, CertifiedCache) and like.events == events and like.length == cache.length
    where = ", ".join(map(str, events[-3:]))
    require(same, f"{first}: expected a certified cache compressed where this one was, and now: ... {where} tokens")
    shapes = [{i: layer.real.shape[:2] for i, layer in one.compressible.items()} for one in (cache, like)]
    require(shapes[0] == shapes[1], f"{first}: expected as many layers, rows and KV heads as this cache has")


def check_full_ids(ids: Tensor, cache: CertifiedCache) -> None:
    """Continuing needs the full ids: those the cache was fed, and at least one more."""
    if cache.ids is None:
        return
    if ids.shape[1] <= cache.length or not torch.equal(ids[:, : cache.length].cpu(), cache.ids):
        raise CertError(
            f"generate from a cache of {cache.length} tokens: expected the full ids, these and more; got {ids.shape[1]}"
        )


def check_gate(gate: Any, policy: Policy, delta: float | None, rows: int) -> None:
    """A gate needs a certificate to look at, of one request, and a budget to escalate to that is larger."""
    expect(isinstance(gate, Gate), "gate", gate, "a cert.gate.Gate, such as Gate(quantile_threshold(...))")
    require(delta is not None, "gated: certificates are switched off (delta=None); expected a level between 0 and 1")
    require(policy.no_certificate is None, f"gated: no certificate to decide by; {policy.no_certificate}")
    require(rows == 1, f"gated: a batch of {rows}; expected one row, whose certificate decides")
    larger = gate.escalate_to is None or gate.escalate_to > (policy.budget or 0.0)
    require(larger, f"gated: escalate_to {gate.escalate_to}; expected a budget above the present {policy.budget}")


def prompt_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The token ids [batch, n] generate() was called with."""
    ids = args[0] if args else kwargs.get("inputs")
    ids = kwargs.get("input_ids") if ids is None else ids
    return check_ids("generate", ids)
