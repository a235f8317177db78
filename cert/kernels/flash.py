"""flash-attn, which takes no bias a key: the offset rides in two further dimensions of queries and keys."""

import torch
from torch import Tensor
from torch.nn import functional

EXTRA = 8  # two would do, but flash_attn wants head_dim in multiples of 8


def augmented(q: Tensor, k: Tensor, log_weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q' and k' with scale * q' . k' = scale * q . k + log_weight, in the dtype of q.

    k' = [k, high, low, 0..], q' = [q, 1, 1, 0..]; high + low = log_weight / scale as a pair of half-precision numbers,
    because one alone (bfloat16: 8 bits) would cost 1-2 % of a weight. -inf becomes the lowest finite number.

    q [.., heads, m, d], k [.., kv_heads, n, d], log_weight [.., kv_heads, n] float32; d + EXTRA dimensions come back.
    """
    lowest = torch.finfo(q.dtype).min
    wanted = (log_weight / scale).clamp(min=lowest)
    high = wanted.to(q.dtype)
    low = (wanted - high.float()).to(q.dtype)
    ones = functional.pad(q.new_ones(*q.shape[:-1], 2), (0, EXTRA - 2))
    pair = functional.pad(torch.stack([high, low], dim=-1), (0, EXTRA - 2))
    return torch.cat([q, ones], dim=-1), torch.cat([k, pair], dim=-1)


def flash(q: Tensor, k: Tensor, v: Tensor, offset: Tensor, scale: float, softcap: float | None) -> Tensor:  # noqa: ARG001
    """flash_attn_func, one query at a time (each sees other rows); no soft cap (best_kernel refuses it)."""
    from flash_attn import flash_attn_func

    values, outs = functional.pad(v, (0, EXTRA)).transpose(1, 2), []
    for step in range(q.shape[2]):
        one, keys = augmented(q[:, :, step : step + 1], k, offset[:, :, step], scale)
        out = flash_attn_func(one.transpose(1, 2), keys.transpose(1, 2), values, softmax_scale=scale)
        outs.append(out[..., : v.shape[-1]])
    return torch.cat(outs, dim=1)
