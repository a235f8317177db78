"""The modes agree with one another: generate and a loop, chunks, orders, questions, budgets, turns."""

import warnings

import pytest
import torch
from oracle import FAMILIES, KEYWORD, close, kept_sets, tiny, tokens

from cert import draw
from cert.errors import CertError
from cert.hf import certified, compress
from cert.policy import PRESETS, Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}
CONTEXT, QUESTION, OTHER = tokens(160), tokens(5, 2), tokens(5, 4)
GENERATE = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def policy(name: str = "certified", budget: float = 0.35, **changes: object) -> Policy:
    return Policy.preset(name, **{"budget": budget, **SMALL, **changes})


def logits(out: object) -> torch.Tensor:
    return torch.cat(out.logits)


@torch.no_grad()
def loop(model, ids: torch.Tensor, answer: torch.Tensor, cuts: list[int], true: bool = True) -> torch.Tensor:
    """Prefill in pieces, then feed the answer token by token, positions given: the logits of each step."""
    cache, found, start = None, [], 0
    for part in [*ids.tensor_split(cuts, dim=1), *answer.split(1, dim=1)]:
        position = torch.arange(start, start + part.shape[1])[None]
        given = {"position_ids": position} if true else {}
        out = model(input_ids=part, use_cache=True, **{KEYWORD: cache}, **given)
        cache, start = out[KEYWORD], start + part.shape[1]
        found.append(out.logits[:, -1])
    return torch.cat(found[len(cuts) :])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["certified", "snapkv", "h2o"])
def test_generate_and_a_loop_with_true_positions_agree(family: str, name: str) -> None:
    model = tiny(family)
    with certified(model, policy(name)) as session:
        out = model.generate(CONTEXT, **GENERATE)
        answer, kept = out.sequences[:, 160:-1], kept_sets(session.cache)
        for true in (True, False):
            close(loop(model, CONTEXT, answer, [], true), logits(out))
            assert kept_sets(session.cache) == kept


PROCESSED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.7, "output_scores": True}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_raw_logits(family: str) -> None:
    """Where sampling processes its scores: budget 1.0 is the plain model teacher-forced, compressed is the loop."""
    model = tiny(family)
    torch.manual_seed(3)
    with certified(model, policy(budget=1.0)) as session:
        out = model.generate(CONTEXT, **{**GENERATE, **PROCESSED})
        assert session.summary()["realised_budget"] == 1.0
    with torch.no_grad():
        forced = model(input_ids=out.sequences[:, :-1]).logits[0, 159:].log_softmax(-1)
    assert float((logits(out).log_softmax(-1) - forced).abs().max()) <= 1e-4
    assert float((torch.cat(out.scores).log_softmax(-1) - forced).abs().max()) > 1
    with certified(model, policy()) as session:
        out = model.generate(CONTEXT, **{**GENERATE, **PROCESSED})
        stepped = loop(model, CONTEXT, out.sequences[:, 160:-1], [])
        assert session.summary()["realised_budget"] < 0.5
    close(logits(out).log_softmax(-1), stepped.log_softmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "full"])
def test_chunks_keep_the_same_set(family: str, name: str) -> None:
    """Chunks of 32 of 160 tokens and of 53, whose last is a single token: the prefill ends where the prompt does."""
    model = tiny(family)
    with certified(model, policy(name)) as session:
        out = model.generate(CONTEXT, **GENERATE)
        kept = kept_sets(session.cache)
        for chunk in (32, 53):
            again = model.generate(CONTEXT, prefill_chunk_size=chunk, **GENERATE)
            assert kept_sets(session.cache) == kept
            close(logits(again), logits(out))
        loop(model, CONTEXT, out.sequences[:, 160:-1], [32, 64, 96, 128])
        assert kept_sets(session.cache) == kept
        session.reset()
        session.prefill(CONTEXT[0].tolist(), chunk=32)
        session.compress()
        prompt = {i: [[[x for x in h if x < 160] for h in r] for r in rows] for i, rows in kept.items()}
        assert kept_sets(session.cache) == prompt


def test_order_does_not_matter_and_nothing_leaks() -> None:
    """[A, B], [B, A] and fresh models: the same text, sets and certificates; three samples, each to its budget."""
    documents = {"a": tokens(160, 11), "b": tokens(200, 12), "c": tokens(90, 13)}

    def run(order: str, model: object) -> dict[str, object]:
        found = {}
        with certified(model, policy()) as session:
            for number, name in enumerate(order):
                out = model.generate(documents[name], **GENERATE)
                table = session.certificates
                rows = [i for i, request in enumerate(table["request"]) if request == number]
                found[name] = (
                    out.sequences.tolist(), kept_sets(session.cache), [table["radius"][i] for i in rows],
                    [table["step"][i] for i in rows], session.summary()["realised_budget"], len(session.cache.layers),
                )  # fmt: skip
        return found

    model = tiny()
    first = run("abc", model)
    assert first == run("cba", model) == {name: run(name, tiny())[name] for name in "abc"}
    assert all(abs(found[4] - 0.35) < 0.06 for found in first.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_question_at_once_equals_one_by_one(family: str) -> None:
    model = tiny(family)
    with certified(model, policy()) as session, torch.no_grad():
        found = []
        for parts in ([QUESTION], QUESTION.split(1, dim=1)):
            session.reset()
            session.prefill(CONTEXT)
            session.compress()
            found.append(torch.cat([model(input_ids=p, **session.cache_kwargs).logits for p in parts], dim=1))
    close(*found)


def test_a_question_in_pieces_of_one_token_stays_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long questions over retained rows go in pieces: even one of a single token does not see those behind it."""
    found = []
    for at_once in (compress.LOGITS_AT_ONCE, 1):
        monkeypatch.setattr(compress, "LOGITS_AT_ONCE", at_once)
        model = tiny()
        with certified(model, policy(), delta=None) as session, torch.no_grad():
            session.prefill(CONTEXT)
            session.compress()
            found.append(model(input_ids=tokens(12, 5), **session.cache_kwargs).logits)
    close(found[0], found[1])


def test_agnostic_sets_do_not_see_the_question_and_aware_ones_do() -> None:
    model = tiny()
    agnostic, aware = [], []
    with certified(model, policy(), document="d") as session:
        for question in (QUESTION, OTHER):
            full = torch.cat([CONTEXT, question], dim=1)
            session.reset()
            session.prefill(CONTEXT)
            session.compress()
            model.generate(full, **session.cache_kwargs, **GENERATE)
            layers = session.cache.compressible.values()
            agnostic.append(
                [(x.keys[..., :40, :].clone(), x.log_weight[..., :40], x.position[..., :40]) for x in layers]
            )
            model.generate(full, **GENERATE)
            aware.append(
                {i: [[x for x in h if x < 140] for h in rows[0]] for i, rows in kept_sets(session.cache).items()}
            )
    assert all(torch.equal(a, b) for one, other in zip(*agnostic, strict=True) for a, b in zip(one, other, strict=True))
    assert aware[0] != aware[1]


@pytest.mark.parametrize("agnostic", [False, True])
def test_escalation_keeps_a_superset_with_the_same_coins(agnostic: bool) -> None:
    model, full = tiny(), torch.cat([tokens(300), QUESTION], dim=1)
    with certified(model, policy(budget=0.25)) as session:
        if agnostic:
            session.prefill(full[:, :300])
            session.compress()
        out = model.generate(full, **(session.cache_kwargs if agnostic else {}), **GENERATE)
        small = kept_sets(session.cache)
        spent = session.summary()["prefill_tokens"]
        more = session.escalate(budget=0.5)
        large, summary = kept_sets(session.cache), session.summary()
        assert summary["nominal_budget"] == 0.5 and abs(summary["realised_budget"] - 0.5) < 0.05
        assert summary["prefill_tokens"] - spent == summary["rerun_prefill_tokens"] == (300 if agnostic else 305)
        same = session.escalate(budget=0.25)
        assert torch.equal(same.sequences, out.sequences) and kept_sets(session.cache) == small
        with pytest.raises(CertError, match="at least"):
            session.escalate(budget=0.1)
        assert sorted(set(session.certificates["request"])) == [0, 1, 2]
    assert more.sequences.shape == out.sequences.shape
    n = 300 if agnostic else 305
    for index, rows in small.items():
        for few, many in zip(rows[0], large[index][0], strict=True):
            assert {x for x in few if x < n} < {x for x in many if x < n}


def test_streaming_keeps_stored_probabilities_true() -> None:
    """Eight turns, permanent coins: a token's weights 1/prob sum to the number of trials, within 4.5 errors.

    240 trials at once: 60 rows of a batch, each its own document, 2 layers, 2 KV heads.
    """
    model, turns = tiny(), tokens(192, 21, rows=60).split(24, dim=1)
    composed = Policy(score="constant", design="poisson", budget=0.35, certain_share=0.0, **SMALL)
    with certified(model, composed, delta=None) as session:
        for turn in turns:
            session.prefill(turn)
            session.compress()
        layers = list(session.cache.compressible.values())
    left, sums = torch.zeros(192), torch.zeros(192)
    for layer in layers:
        here = ~layer.log_weight.isinf()
        left.index_add_(0, layer.position[here].long(), torch.ones(int(here.sum())))
        sums.index_add_(0, layer.position[here].long(), layer.log_weight[here].exp())
    assert (left[2:184] < 150).all() and (left[184:] == 240).all() and (left[:2] == 240).all()
    p = left / sums
    error = ((1 - p) / p / 240).sqrt()
    assert ((sums / 240 - 1).abs() <= 4.5 * error).all()
    assert abs(float(sums[2:184].mean()) / 240 - 1) < 4.5 * float(error[2:184].mean()) / 182**0.5


def test_streaming_probabilities_only_fall_and_coins_stay() -> None:
    model = tiny()
    with certified(model, policy(), seed=9, document="talk") as session:
        before: dict[tuple[int, int, int], float] = {}
        for turn in (tokens(120, 5), tokens(60, 6), tokens(60, 7)):
            session.prefill(turn)
            session.compress()
            now = {}
            for index, layer in session.cache.compressible.items():
                u = draw.uniforms(9, "talk", index, 2, layer.length)
                for head in range(2):
                    for place, prob in zip(layer.position[0, head].tolist(), layer.prob[0, head].tolist(), strict=True):
                        if place >= 0:
                            now[index, head, place] = prob
                            assert u[head, place] <= prob + 1e-6
                            assert prob <= before.get((index, head, place), 1.0) + 1e-6
            assert {key for key in now if key in before or key[2] >= layer.length - turn.shape[1]} == set(now)
            before = now
        kept = [len(h) for rows in kept_sets(session.cache).values() for h in rows[0]]
        assert abs(sum(kept) / len(kept) / 240 - 0.35) < 0.06
        session.compress()
        assert [len(h) for rows in kept_sets(session.cache).values() for h in rows[0]] == kept


@pytest.mark.parametrize("name", ["certified", "h2o", "snapkv", "streaming_llm", "merge"])
def test_a_cache_that_outgrows_its_budget_while_generating(name: str) -> None:
    model, budget = tiny(), {"budget": None, "budget_tokens": 60}
    with certified(model, policy(name, **budget), compress_every=10) as session:
        model.generate(tokens(20), **{**GENERATE, "max_new_tokens": 150})
        summary, kept = session.summary(), kept_sets(session.cache)
        assert summary["compressions"] == 15 and session.cache.length == 169
        assert max(len(h) for rows in kept.values() for h in rows[0]) <= 60 + 10 + 25
        steps = [s for s, r in zip(session.certificates["step"], session.certificates["radius"], strict=True) if r]
        assert bool(steps) == (name == "certified")


def test_a_cache_of_another_conversation_is_refused() -> None:
    model = tiny()
    with certified(model, policy()) as session:
        session.prefill(CONTEXT)
        session.compress()
        for ids in (CONTEXT, CONTEXT[:, :50], tokens(170, 9)):
            with pytest.raises(CertError, match="the full ids"):
                model.generate(ids, **session.cache_kwargs)
        kept = session.cache_kwargs
    with certified(model, policy()) as session, pytest.raises(CertError, match="another session"), torch.no_grad():
        model(input_ids=QUESTION, **kept)


def test_both_names_of_the_cache_are_understood() -> None:
    """`past_key_values`, as it was called before transformers 5.24, warns and is served: forward and generate alike."""
    model, full, outs = tiny(), torch.cat([CONTEXT, QUESTION], dim=1), []
    names = ("cache", "past_key_values") if KEYWORD == "cache" else ("past_key_values",)
    with certified(model, policy()) as session, torch.no_grad():
        session.prefill(CONTEXT)
        session.compress()
        context = session.cache
        for name in names:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                (given,) = session.fork(of=context).values()
                one = model(input_ids=QUESTION, **{name: given}).logits
                assert session.cache is given and given.length == 165
                (given,) = session.fork(of=context).values()
                out = model.generate(full, **{name: given}, **GENERATE)
                assert session.cache is given and given.length == 170 and context.length == 160
            assert [w.category for w in caught] == ([FutureWarning] if name != KEYWORD else [])
            assert all("Use `cache`" in str(w.message) for w in caught)
            outs.append((one, logits(out)))
        recomputed = session.recompute()
    assert all(map(torch.equal, outs[0], outs[-1])) and len(outs) == len(names)
    assert torch.equal(logits(recomputed), logits(model.generate(full, **GENERATE)))


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "full"])
def test_sinks_and_recent_tokens_stay_whatever_the_scores(name: str) -> None:
    model = tiny()
    with certified(model, policy(name, budget=0.25)) as session:
        for turn in (tokens(160), tokens(40, 2)):
            session.prefill(turn)
            session.compress()
            n = session.cache.length
            for rows in kept_sets(session.cache).values():
                assert all({0, 1, *range(n - 8, n)} <= set(head) for head in rows[0])


def test_the_anticipated_variance_of_a_later_event_is_added() -> None:
    """V_ant of event 2, from the rows then present: weights s_i/pi_1, conditional probability pi_2/pi_1."""
    model, composed = tiny(), policy("uniform")
    with certified(model, composed) as session:
        session.prefill(CONTEXT)
        session.compress()
        session.prefill(tokens(60, 6))
        layer = session.cache.layers[1]
        before, v, prob = layer.anticipated.clone(), layer.values.clone(), layer.prob.clone()
        position = layer.position.clone()
        session.compress()
        after = {
            (h, p): x
            for h in range(2)
            for p, x in zip(layer.position[0, h].tolist(), layer.prob[0, h].tolist(), strict=True)
        }
    for head in range(2):
        here = position[0, head] >= 0
        first, rows, places = prob[0, head][here].double(), v[0, head][here].double(), position[0, head][here].tolist()
        inner = [p for p in places if 2 <= p < 212]
        now = max(x for (h, p), x in after.items() if h == head and p in inner and x < 1)  # constant scores: tau s
        again = torch.tensor(
            [min(1.0, now / f) if 2 <= p < 212 else 1.0 for p, f in zip(places, first.tolist(), strict=True)]
        )
        share = (1 / first) / (1 / first).sum()
        spread = (rows - share @ rows).square().sum(1)
        wanted = ((1 - again) / again * share.square() * spread).sum()
        assert float(layer.anticipated[0, head] - before[0, head]) == pytest.approx(float(wanted), rel=1e-3)


def test_events_closer_than_the_window_still_score_with_the_whole_window() -> None:
    model = tiny()
    with certified(model, policy("snapkv", budget=0.5), compress_every=2) as session:
        model.generate(tokens(60), max_new_tokens=20, do_sample=False)
        assert session.summary()["compressions"] == 10 and session.cache.layers[0].queries.shape[2] == 8
        kept = kept_sets(session.cache)
    assert all(len(h) <= 0.5 * 78 + 3 + 0.5 for rows in kept.values() for h in rows[0])


def test_prefill_goes_on_with_a_conversation_and_begins_anew_after_a_plain_generate() -> None:
    model = tiny()
    with certified(model, policy()) as session:
        model.generate(CONTEXT, max_new_tokens=3)
        session.prefill(CONTEXT)
        assert session.cache.length == 160
        session.prefill(tokens(20, 3))
        assert session.cache.length == 180
        out = model.generate(CONTEXT, max_new_tokens=3)
        session.compress()
        session.prefill(out[:, -1:])
        assert session.cache.length == 163
        session.reset()
        session.prefill(CONTEXT)
        assert session.cache.length == 160


@pytest.mark.parametrize("allocation", ["uniform", "pyramid", "ada"])
@pytest.mark.parametrize("design", ["poisson", "topk"])
def test_escalation_nests_for_every_allocation(design: str, allocation: str) -> None:
    model, compensation = tiny(num_hidden_layers=3), "hajek" if design == "poisson" else "none"
    composed = Policy(design=design, compensation=compensation, allocation=allocation, budget=0.25, **SMALL)
    with certified(model, composed, delta=None) as session:
        model.generate(tokens(300), max_new_tokens=2, do_sample=False)
        small = kept_sets(session.cache)
        for budget in (0.5, 0.8):
            session.escalate(budget=budget)
            large = kept_sets(session.cache)
            assert all(set(a) <= set(b) for i in small for a, b in zip(small[i][0], large[i][0], strict=True))
