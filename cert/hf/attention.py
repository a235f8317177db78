"""The "certified" attention and mask functions: dense layers go to the model's own, evicted ones to the estimator."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cert import scores
from cert.errors import CertError
from cert.hf.cache import CertifiedCache, CertifiedLayer
from cert.hf.certify import Sums, tail
from cert.hf.compress import attention_share, pieces, retained_weights
from cert.hf.report import record
from cert.hf.state import OPEN, State
from cert.hf.together import Row, Together
from cert.kernels import MOMENTS, OUTPUT_ONLY, TRITON
from cert.kernels.moments import moments

NAME = "certified"
UNSUPPORTED = ("dropout", "s_aux", "position_bias")


def _state(key: int, what: str) -> State:
    for state in OPEN:
        if key in state.modules or key in state.before:
            return state
    raise CertError(f"attention 'certified' was called for {what} outside a certified() session")


def certified_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attention of one layer: the model's own where nothing was evicted, else over the retained rows.

    query [batch, heads, m, d], key and value [batch, kv_heads, rows, d] as the cache returned them;
    out [batch, m, heads, d] in the dtype of query.
    """
    state = _state(id(module), type(module).__name__)
    if state.batch is not None:
        return _by_row(state, state.batch, (module, query, attention_mask), kwargs)
    cache = state.running
    layer = cache.layers[module.layer_idx] if cache is not None else None
    if cache is None or not isinstance(layer, CertifiedLayer):
        return _own(state, module)(module, query, key, value, attention_mask, **kwargs)
    if layer.keys is not key or layer.values is not value:
        raise CertError(f"layer {module.layer_idx}: its keys or values do not come from the session's cache")
    scaling = kwargs.get("scaling")
    layer.scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    layer.softcap = kwargs.get("softcap")
    _observe(cache, layer, query)
    if layer.log_weight is None:
        out, weights = _own(state, module)(module, query, key, value, attention_mask, **kwargs)
        record(state, module.layer_idx, layer, query[:, :, -1], out[:, -1], None)
        return out, weights
    if more := [name for name in UNSUPPORTED if kwargs.get(name) not in (None, 0, 0.0)]:
        raise CertError(f"{more[0]}: not supported over retained rows (dropout: expected model.eval())")
    out, found = _served(state, cache, layer, query)
    record(state, module.layer_idx, layer, query[:, :, -1], out[:, -1], found)
    return out.to(query.dtype), None


def _by_row(
    state: State, together: Together, given: tuple[Any, Tensor, Any], kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Each row as if it came alone, recorded under its own request."""
    module, query, mask = given

    def attend(row: Row, b: int, key: Tensor, value: Tensor) -> Tensor:
        state.batch, state.running, state.request, state.step = None, row.cache, row.request, row.step
        own = mask[b : b + 1] if isinstance(mask, Tensor) and len(mask) > 1 else mask
        out: Tensor = certified_attention(module, query[b : b + 1], key, value, own, **kwargs)[0]
        row.step = state.step
        return out

    now = state.request, state.step
    try:
        return together.attend(module.layer_idx, attend), None
    finally:
        state.batch, state.running, (state.request, state.step) = together, None, now


def _served(
    state: State, cache: CertifiedCache, layer: CertifiedLayer, query: Tensor
) -> tuple[Tensor, Tensor | Sums | None]:
    """out [batch, m, heads, d], and of the last of the m tokens what its certificate is made of (certify), if needed.

    A kernel that sums up serves one token; several at once are served by the reference in its place.
    """
    state.kernel = state.serves(cache.policy, query.device.type, query.dtype, query.shape[-1], layer.softcap)
    first, outs, weight = layer.length - query.shape[2], [], None
    if state.kernel[0] in (MOMENTS, TRITON) and query.shape[2] == 1:
        return _summed_up(state, cache, layer, query[:, :, 0])
    serve = OUTPUT_ONLY.get(state.kernel[0])
    for start, piece in pieces(layer, query):
        if serve is not None:
            offset = layer.offset(piece.shape[2], first + start).transpose(1, 2)
            outs.append(serve(piece, *layer.stored, offset, layer.scale, layer.softcap))
            continue
        out, all_weights = retained_weights(layer, piece, layer.scale, first + start)
        if cache.policy.score == "h2o":
            with torch.no_grad():
                layer.mass = _grown(layer) + attention_share(layer, all_weights)
        outs.append(out)
        weight = all_weights[:, -1]
    return torch.cat(outs, dim=1), weight


def _summed_up(state: State, cache: CertifiedCache, layer: CertifiedLayer, query: Tensor) -> tuple[Tensor, Sums | None]:
    """The same for one token, query [batch, heads, d], by a kernel that returns sums in place of weights."""
    rows, certificate = (*layer.stored, layer.offset(1, layer.length - 1)[:, 0]), state.certifies(cache.policy)
    if state.kernel[0] == MOMENTS:
        out, sums = moments(query, *rows, tail(layer), layer.scale, layer.softcap)
        return out[:, None], sums if certificate else None
    from cert.kernels.triton_decode import decode_padded  # only where Triton is: a GPU

    out, found = decode_padded(query, *rows, layer.scale, layer.softcap, certificate)
    return out[:, None], found


@torch.no_grad()
def _observe(cache: CertifiedCache, layer: CertifiedLayer, query: Tensor) -> None:
    """Keep what the scores will need: the last queries, or running sums (in chunks, never n x n)."""
    window, seen = cache.terms.window, query.shape[2]
    if window:
        recent = query[:, :, -window:]
        if layer.queries is not None and recent.shape[2] < window:
            recent = torch.cat([layer.queries, recent], dim=2)[:, :, -window:]
        layer.queries = recent.clone()
    if cache.terms.mass and layer.log_weight is None:
        layer.mass, first = _grown(layer), layer.length - seen
        for start in range(0, seen, 256):
            piece = query[:, :, start : start + 256]
            mass = scores.attention_mass(piece, layer.stored[0], layer.scale, first + start, layer.softcap)
            layer.mass = layer.mass + mass


def _grown(layer: CertifiedLayer) -> Tensor:
    """The running sums, with zeros for rows that are new."""
    rows = torch.zeros(layer.stored[0].shape[:-1], device=layer.stored[0].device)
    if layer.mass is not None:
        rows[..., : layer.mass.shape[-1]] = layer.mass
    return rows


def own_implementation(module: Any, name: str) -> Callable[..., Any]:
    """The attention function a module used under `name`; "eager" is a function of the model's own file."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name, eager if name == "eager" else None)
    if function is None:
        raise CertError(f"{type(module).__name__}: no attention function {name!r} to delegate to")
    return function


def _own(state: State, module: Any) -> Callable[..., Any]:
    return own_implementation(module, state.before[id(module.config)][1])


def certified_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask of the implementation the model had before; layers that have evicted do not look at it."""
    config = kwargs["config"]
    before = _state(id(config), type(config).__name__).before[id(config)][1]
    return ALL_MASK_ATTENTION_FUNCTIONS[before](*args, **kwargs)


def take_over(model: PreTrainedModel, state: State) -> None:
    """Route the model's attention and masks here; CertError where it only pretends to follow."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            state.before.setdefault(id(config), (config, config._attn_implementation))
    AttentionInterface.register(NAME, certified_attention)
    AttentionMaskInterface.register(NAME, certified_mask)
    model.set_attn_implementation(NAME)
    if any(module.config._attn_implementation != NAME for module in state.modules.values()):
        raise CertError(f"{type(model).__name__}: did not take the attention implementation {NAME!r}")


def give_back(state: State) -> None:
    """Every config names what it named before."""
    for config, implementation in state.before.values():
        config._attn_implementation_internal = implementation
