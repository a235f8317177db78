"""Merging compensation: the values of evicted tokens folded into their retained neighbours (CaM, D2O)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from cert.attention import at_least_float32

CHUNK = 1024  # evicted tokens compared with the retained ones at once: never n x n in memory


def merged_values(
    score: Float[Tensor, "*lead kv_heads n"],
    k: Float[Tensor, "*lead kv_heads n d"],
    v: Float[Tensor, "*lead kv_heads n dv"],
    keep: Bool[Tensor, "*lead kv_heads n"],
) -> Float[Tensor, "*lead kv_heads n dv"]:
    """Values in which each retained token is the score-weighted mean of itself and the evicted ones nearest to it.

    v'_j = (s_j v_j + sum_{i -> j} s_i v_i) / (s_j + sum_{i -> j} s_i); evicted i goes to the retained j of the same
    head with the largest cosine similarity of keys. Where the scores of a group sum to 0 its plain mean is taken.

    score [.., kv_heads, n] >= 0; keys stay as they are; rows where keep is False come back unchanged, in the dtype of v.
    Source: Zhang et al., CaM (2024), Wan et al., D2O (2024); the score-weighted mean in place of their coefficients
    is ours. There are no inclusion probabilities here, so no certificate.
    """
    n = v.shape[-2]
    heads = zip(
        score.reshape(-1, n),
        k.reshape(-1, n, k.shape[-1]),
        v.reshape(-1, n, v.shape[-1]),
        keep.reshape(-1, n),
        strict=True,
    )
    return torch.stack([_merge_head(*head) for head in heads]).view(v.shape)


def _merge_head(
    score: Float[Tensor, "n"], k: Float[Tensor, "n d"], v: Float[Tensor, "n dv"], keep: Bool[Tensor, "n"]
) -> Float[Tensor, "n dv"]:
    kept, gone = keep.nonzero().squeeze(-1), (~keep).nonzero().squeeze(-1)
    if not len(gone) or not len(kept):
        return v.clone()
    unit = functional.normalize(at_least_float32(k), dim=-1)
    nearest = torch.cat([(unit[part] @ unit[kept].T).argmax(-1) for part in gone.split(CHUNK)])
    values, size = at_least_float32(v), at_least_float32(score)

    def grouped(weight: Tensor) -> tuple[Tensor, Tensor]:
        total = weight[kept].index_add(0, nearest, weight[gone])
        return (values * weight[:, None])[kept].index_add(0, nearest, values[gone] * weight[gone, None]), total

    (summed, total), (plain, count) = grouped(size), grouped(torch.ones_like(size))
    mean = torch.where(total[:, None] > 0, summed / total.clamp(min=1e-30)[:, None], plain / count[:, None])
    return v.index_copy(0, kept, mean.to(v.dtype))
