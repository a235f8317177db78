"""What a session decided, replayed: the same retained sets, the same weights, for every layer and KV head."""

import numpy as np
import pytest
from oracle import tiny, tokens

from cert.draw import uniforms
from cert.hf import certified
from cert.hf.plans import events
from cert.policy import Policy
from cert.streamed import replayed_path

POLICY = Policy.preset("certified", budget=0.25, sinks=2, recent=8, window=8)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_sessions_events_replay(family: str) -> None:
    model, turns = tiny(family), [tokens(80, 1), tokens(5, 2), tokens(60, 3), tokens(40, 4)]
    with certified(model, POLICY, seed=7, document="d") as session:
        for turn in turns:
            session.prefill(turn)
            session.compress()
        cache, n = session.cache, 185
    rng, moved = np.random.default_rng(0), 0
    for index, layer in cache.compressible.items():
        heads, d = layer.keys.shape[1], layer.keys.shape[-1]
        coins = uniforms(7, "d", index, heads, n).numpy()
        for h in range(heads):
            # equal weights p = 1/n: the error is the plain sum over tokens, from the cache's own places and weights
            v = rng.standard_normal((n, d))
            path = replayed_path(
                np.zeros((1, d)), rng.standard_normal((n, d)), v, 1.0, events(cache.plans, index, h), coins[h]
            )
            here = layer.real[0, h]
            at, weight = layer.position[0, h][here].numpy(), layer.log_weight[0, h][here].exp().numpy()
            y = (v - v.mean(0)) / n
            want = np.linalg.norm((weight[:, None] * y[at]).sum(0) - y.sum(0))
            assert path.err.shape == (4, 1) and path.err[-1, 0] == pytest.approx(want, rel=1e-5)
            moved += int((path.variance[:, 0] > 0).sum())
    assert moved > 2 * len(cache.compressible)
