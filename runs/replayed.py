"""Replayed streaming: the error of the full run's query along a conversation's compressions, and its running radius."""

import json

import numpy as np

from cert.attention import full_attention
from cert.draw import uniforms
from cert.hf import CertifiedCache
from cert.hf.plans import events
from cert.streamed import replayed_path


def replayed(full: CertifiedCache, streamed: CertifiedCache, seed: int, delta: float) -> str | None:
    """Over all compressed layers and query heads, an entry an event of `streamed`, as JSON.

    tokens: length of the history there; err, radius: medians of ||S_t|| / ||o|| and r_t / ||o|| of cert.streamed
    (linearised error, time-uniform radius of level delta for each head by itself); crossed: share of the heads with
    ||S_s|| > r_s at this event or before, whose expectation is at most delta.

    full: the cache of the full run behind a question, which kept its last queries (terms.arms): the query of its last
    token, against keys and values that no coin has touched. streamed: the Poisson system's, whose probabilities depend
    on coins through what was retained alone. None where logits are soft-capped, which no replay knows of.
    """
    if any(layer.softcap is not None for layer in full.compressible.values()):
        return None
    found = []
    for index, layer in full.compressible.items():
        assert layer.queries is not None
        k, v = (x[0].float().cpu() for x in layer.stored)
        query, heads = layer.queries[0, :, -1].float().cpu(), len(k)
        norm = full_attention(query, k, v, layer.scale).norm(dim=-1).view(heads, -1)
        coins = uniforms(seed, streamed.documents[0], index, heads, layer.length).numpy()
        for head, group in enumerate(query.view(heads, -1, query.shape[-1])):
            path = replayed_path(
                group.numpy(), k[head].numpy(), v[head].numpy(), layer.scale, events(streamed.plans, index, head),
                coins[head], delta,
            )  # fmt: skip
            found.append((path.err, path.radius, norm[head].double().numpy()[None]))
    err, radius, norm = (np.concatenate([each[i] for each in found], axis=-1) for i in range(3))
    over = np.maximum.accumulate(err > radius, axis=0)
    said = {"err": np.median(err / norm, axis=1), "radius": np.median(radius / norm, axis=1), "crossed": over.mean(1)}
    return json.dumps({"tokens": streamed.events} | {name: values.tolist() for name, values in said.items()})
