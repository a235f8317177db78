"""Every policy, mode and family equals dense attention with evicted columns masked and the same offset added."""

import pytest
import torch
from oracle import FAMILIES, Oracle, close, column_bias, kept_sets, tiny, tokens

from cert import draw, scores
from cert.hf import certified
from cert.hf.cache import ids_sha256
from cert.hf.compress import token_scores
from cert.policy import PRESETS, Policy

CONTEXT = tokens(150)
QUESTION = tokens(5, seed=2)
TAIL = tokens(3, seed=3)
COMPRESSING = [name for name in PRESETS if name != "full"]
SMALL_PROTECTED = {"sinks": 2, "recent": 8, "window": 8}


def policy(name: str, **changes: object) -> Policy:
    return Policy.preset(name, **{"budget": 0.35, **SMALL_PROTECTED, **changes})


def naive_merge(v: torch.Tensor, k: torch.Tensor, score: torch.Tensor, kept: list[list[list[int]]]) -> torch.Tensor:
    """Evicted values folded into the retained token with the most similar key, by loops."""
    out = v.clone()
    for row, heads in enumerate(kept):
        for head, places in enumerate(heads):
            groups = {j: [j] for j in places}
            for i in set(range(v.shape[2])) - set(places):
                similar = [torch.cosine_similarity(k[row, head, i], k[row, head, j], dim=0).item() for j in places]
                groups[places[similar.index(max(similar))]].append(i)
            for j, members in groups.items():
                weight = score[row, head, members]
                out[row, head, j] = (weight[:, None] * v[row, head, members]).sum(0) / weight.sum()
    return out


def fed(family: str = "llama", **changes: object) -> Oracle:
    oracle = Oracle(tiny(family, **changes))
    oracle.feed(CONTEXT)
    return oracle


@torch.no_grad()
def served(model, session, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model(input_ids=part, use_cache=True, **session.cache_kwargs).logits for part in parts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", COMPRESSING)
def test_agnostic_equals_the_oracle(family: str, name: str) -> None:
    """Context, compress, a question of 5 tokens at once, then one by one."""
    model, parts, oracle = tiny(family), [QUESTION, *TAIL.split(1, dim=1)], fed(family)
    with certified(model, policy(name)) as session:
        session.prefill(CONTEXT)
        session.compress()
        kept = kept_sets(session.cache)
        oracle.bias = column_bias(session.cache)
        found = served(model, session, parts)
    assert any(len(places) < 150 for heads in kept.values() for row in heads for places in row)
    if name == "merge":
        for index in kept:
            q, k, v = oracle.rows[index]
            mass = scores.h2o(
                q, k, q.shape[-1] ** -0.5 if family != "gemma3_text" else model.config.query_pre_attn_scalar**-0.5
            )
            oracle.values[index] = naive_merge(v, k, mass, kept[index])
    expected = [oracle.feed(part) for part in parts]
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", sorted(set(COMPRESSING) - {"merge"}))  # its values are compared above
def test_aware_generation_equals_the_oracle(family: str, name: str) -> None:
    """The first answer token is the dense prefill's; every later one is served from the compressed cache."""
    model, oracle = tiny(family), Oracle(tiny(family))
    with certified(model, policy(name)) as session:
        out = model.generate(
            CONTEXT, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        bias = {i: b[..., :150] for i, b in column_bias(session.cache).items()}
    expected = [oracle.feed(CONTEXT)[:, -1]]
    oracle.bias = bias
    for token in out.sequences[:, 150:-1].split(1, dim=1):
        expected.append(oracle.feed(token)[:, -1])
    for one, other in zip(out.logits, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("allocation", ["uniform", "pyramid", "ada"])
@pytest.mark.parametrize("score", ["snapkv", "h2o", "streaming", "knorm", "constant"])
@pytest.mark.parametrize("design", ["poisson", "topk"])
def test_streaming_equals_the_oracle(score: str, allocation: str, design: str) -> None:
    """Three turns, compressed after each; ragged heads, probabilities that only fall."""
    model, oracle = tiny(), Oracle(tiny())
    turns = [tokens(90, 5), tokens(40, 6), tokens(60, 7)]
    composed = Policy(score=score, allocation=allocation, design=design, budget=0.4, **SMALL_PROTECTED,
                      compensation="hajek" if design == "poisson" else "none")  # fmt: skip
    with certified(model, composed) as session:
        for turn in turns:
            session.prefill(turn)
            session.compress()
            oracle.feed(turn)
            oracle.bias = column_bias(session.cache)
        (found,) = served(model, session, [QUESTION])
    expected = oracle.feed(QUESTION)
    close(found, expected)


def test_without_compensation_a_poisson_draw_gets_no_offset() -> None:
    model, oracle = tiny(), fed()
    with certified(model, policy("certified", compensation="none")) as session:
        session.prefill(CONTEXT)
        session.compress()
        oracle.bias = column_bias(session.cache, offset=False)
        assert max(float(b[b.isfinite()].max()) for b in column_bias(session.cache).values()) > 0
        (found,) = served(model, session, [QUESTION])
    close(found, oracle.feed(QUESTION))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_of_different_length_and_one_that_evicted_nothing(attention: str) -> None:
    """The pyramid's first layer keeps all: it goes on with the model's own attention and mask."""
    model, oracle = tiny(attention=attention, num_hidden_layers=4), fed(num_hidden_layers=4)
    with certified(model, policy("pyramid", budget=0.6)) as session:
        session.prefill(CONTEXT)
        session.compress()
        lengths = [layer.keys.shape[2] for layer in session.cache.layers]
        oracle.bias = column_bias(session.cache)
        (found,) = served(model, session, [QUESTION])
    assert lengths[0] == 150 and len(set(lengths)) > 2 and session.cache.layers[0].log_weight is None
    expected = oracle.feed(QUESTION)
    close(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draw_is_that_of_the_method(family: str) -> None:
    """Scores of the dense prefill's last queries, coins by seed, document, layer, KV head and place."""
    composed, model, oracle = policy("certified"), tiny(family), Oracle(tiny(family))
    with certified(model, composed, seed=3) as session:
        session.prefill(CONTEXT)
        session.compress()
        kept, cache = kept_sets(session.cache), session.cache
    oracle.feed(CONTEXT)
    for place, index in enumerate(kept):
        q, k, _ = oracle.rows[index]
        scale = model.config.query_pre_attn_scalar**-0.5 if family == "gemma3_text" else q.shape[-1] ** -0.5
        score = scores.snapkv(q[0, :, -composed.window :], k[0], scale)
        u = draw.uniforms(3, ids_sha256(CONTEXT[0]), index, k.shape[1], 150)
        prob, keep = composed.plan(score, u, place, len(kept))
        assert kept[index][0] == [row.nonzero().squeeze(-1).tolist() for row in keep]
        for head, places in enumerate(kept[index][0]):
            weight = cache.layers[index].log_weight[0, head, : len(places)]
            close(torch.exp(-weight), prob[head, places])


def test_heads_and_layers_draw_apart() -> None:
    """The same scores everywhere, and yet no two heads share a mask: each has its own coins."""
    with certified(tiny(num_hidden_layers=4), policy("uniform")) as session:
        session.prefill(tokens(400))
        session.compress()
        masks = [set(head) for rows in kept_sets(session.cache).values() for head in rows[0]]
    shares = [len(a & b) / len(a | b) for i, a in enumerate(masks) for b in masks[:i]]
    assert max(shares) < 0.35 and len(shares) == 28  # two independent sets of 35 %: 0.21 on average


def test_a_batch_without_padding_equals_its_rows_alone() -> None:
    model, rows = tiny(), tokens(120, seed=8, rows=2)
    with certified(model, policy("certified")) as session:
        session.prefill(rows)
        session.compress()
        both, logits = kept_sets(session.cache), served(model, session, [QUESTION.expand(2, -1)])[0]
    for row in range(2):
        with certified(model, policy("certified")) as session:
            session.prefill(rows[row])
            session.compress()
            alone = kept_sets(session.cache)
            close(served(model, session, [QUESTION])[0][0], logits[row])
        assert all(both[i][row] == alone[i][0] for i in alone)


@pytest.mark.parametrize("name", ["h2o", "certified"])
def test_scores_after_an_event_are_estimated_attention_at_logical_places(name: str) -> None:
    """h2o's sums move with their rows; attention of a later turn counts prob_i w_i, causal among its tokens."""
    model, oracle, turn = tiny(), fed(), tokens(12, 9)
    composed = Policy(score="h2o" if name == "h2o" else "snapkv", budget=0.4, sinks=2, recent=8, window=12)
    with certified(model, composed) as session:
        session.prefill(CONTEXT)
        session.compress()
        dense = {i: scores.h2o(q, k, 8**-0.5)[0] for i, (q, k, _) in oracle.rows.items()}
        oracle.bias = column_bias(session.cache)
        session.prefill(turn)
        oracle.feed(turn)
        for index, layer in session.cache.compressible.items():
            q, k, _ = (x[0] for x in oracle.rows[index])
            bias = torch.nn.functional.pad(oracle.bias[index][0], (0, 12))
            later = torch.arange(162) > torch.arange(150, 162)[:, None]
            found = token_scores(layer, composed)
            for head in range(2):
                logits = torch.stack([8**-0.5 * q[h] @ k[head].T for h in (2 * head, 2 * head + 1)]) + bias[head]
                share = logits.masked_fill(later, float("-inf")).softmax(-1).mean(0).sum(0) * torch.exp(-bias[head])
                share = torch.nan_to_num(share, nan=0.0)
                wanted = (
                    share / 12 if name == "certified" else share + torch.nn.functional.pad(dense[index][head], (0, 12))
                )
                here = layer.position[0, head] >= 0
                places = layer.position[0, head][here].long()
                close(found[0, head][here], wanted[places])
                assert not found[0, head][~here].any()
