"""A conversation under every system: streaming, equal counts, forks that leak nothing, gates that are full's, audits."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from analysis import monitor
from cert.certificate import radius
from cert.gate import Gate
from cert.hf import certified
from cert.policy import Policy
from runs import systems
from runs.arms import checksum
from runs.conversations import SYSTEMS, Conversation, Question, audited
from runs.errors import UserError
from runs.models import ByteTokenizer, load_model
from runs.schema import CONVERSATIONS
from runs.sources import resolve
from runs.systems import Serving, serve

SMALL = {"sinks": 2, "recent": 8, "window": 8}
TURNS = tuple(tuple((7 * i * i + 31 * t + 3 * i) % 251 for i in range(20 + 7 * (t % 3))) for t in range(9))
QUESTIONS = tuple(
    Question("room", ids, ("a", "b"), age=age) for ids, age in (((9, 40, 77, 3), 2), ((63,), 7), ((5, 8, 200), 9))
)
TALK = Conversation("assistant", "d" * 64, TURNS, QUESTIONS, "contains", 6, newline_stops=False)
AUDIT = ("miss_steps", "miss_steps_strict", "replayed")


@pytest.fixture(scope="module")
def model():
    return load_model(resolve("tiny"))


def serving(model, budget=0.3, seed=0) -> Serving:
    names = {"poisson": "certified", "topk": "topk", "uniform": "uniform"}
    policies = {system: Policy.preset(name, budget=budget, **SMALL) for system, name in names.items()}
    return Serving(model, ByteTokenizer(), policies, seed, 0.05, ())


def rows(model, talk=TALK, chosen=SYSTEMS, audit=False, **how):
    found = list(serve(serving(model, **how), talk, chosen, audit))
    keyed = {(row["request"], row["system"]): row for row in found}
    assert len(found) == len(keyed) == len(chosen) * len(talk.questions)
    return keyed


def same(row, *but):
    """What must not depend on order or clock."""
    return {name: value for name, value in row.items() if name not in ("wall_s", *but)}


def ends(model, talk=TALK, audit=False, **how):
    """Each system's cache at the end of the history, in a session that stays open until the next call."""
    made = serving(model, **how)
    policies = {name: {"full": Policy.preset("full"), **made.policies}[name] for name in systems.ORDER}
    with certified(
        model, Policy.preset("full"), 0.05, made.seed, talk.document, audit, arms=policies.values()
    ) as session:
        found = systems._ends(session, talk, policies, audit)
    return {name: end.cache for name, end in found.items()}


def retained(cache):
    """Positions, weights, keys and values of every layer, and which rows are padding."""
    return [
        tuple(x.clone() for x in (layer.position, layer.log_weight, layer.keys, layer.values))
        for layer in cache.compressible.values()
    ]


def equal(one, other) -> bool:
    return all(torch.equal(x, y) for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def all_rows(model):
    return rows(model)


def test_rows_are_of_the_schema(all_rows) -> None:
    length = sum(map(len, TURNS))
    for (request, system), row in all_rows.items():
        planned = {"cell": "c", "unit": "u", "example": TALK.name, "document": TALK.document, "model": "tiny",
                   "task": TALK.task, "design": "d", "status": "ok", "message": None, "age": QUESTIONS[request].age,
                   "kind": "room", "wrong_label": None, "turns": 9, "left_out": 0, "prompt_sha256": "p",
                   "budget": 0.3, "audited": False}  # fmt: skip
        (checked,) = CONVERSATIONS.checked([planned | row])
        assert (checked["context_tokens"], checked["n_tokens"], checked["answer_tokens"]) == (length, length, 6)
        assert checked["prompt_tokens"] == length + len(QUESTIONS[request].ids)
        assert (checked["certificate"] is not None) == (system in ("poisson", "uniform"))
        assert checked["cert_steps"] == 6 * (system in ("poisson", "uniform"))
        assert checked["cache_bytes_after"] == round(checked["realised_budget"] * checked["cache_bytes_before"])
        assert checked["miss_steps"] is None and checked["wall_s"] > 0
    assert {row["cache_bytes_before"] for row in all_rows.values()} == {all_rows[0, "full"]["cache_bytes_after"]}


def test_nothing_evicted_is_fulls_answer(model) -> None:
    found = rows(model, budget=1.0)
    for (request, system), row in found.items():
        full = found[request, "full"]
        for column in ("prediction", "answer_tokens", "stop", "official", "cache_bytes_after"):
            assert row[column] == full[column], (system, column)
        assert row["logprob"] == pytest.approx(full["logprob"], rel=1e-5)  # full is fed in other pieces
        assert row["certificate"] in (None, 0.0) and row["realised_budget"] == 1.0


def test_the_cache_is_compressed_after_each_turn_and_topk_follows_the_draw(model) -> None:
    caches, events = ends(model), [sum(map(len, TURNS[: t + 1])) for t in range(len(TURNS))]
    assert caches["full"].events == events[-1:]
    for name in ("poisson", "topk", "uniform"):
        assert caches[name].events == events and caches[name].realised == pytest.approx(0.3, abs=0.06)
    counts = {name: [layer.real.sum(-1).tolist() for layer in caches[name].compressible.values()] for name in caches}
    assert counts["topk"] == counts["poisson"] != counts["uniform"]
    kept = {name: [layer.position for layer in caches[name].compressible.values()] for name in ("topk", "poisson")}
    assert not all(torch.equal(a, b) for a, b in zip(kept["topk"], kept["poisson"], strict=True))


def test_a_question_leaves_no_trace_in_the_history_and_changing_it_none_in_what_is_retained(model, all_rows) -> None:
    other = replace(TALK, questions=(Question("room", (1, 2, 3, 4, 5), ("z",)), *QUESTIONS[1:]))
    for name, cache in ends(model).items():
        if name != "full":
            assert equal(retained(cache), retained(ends(model, other)[name]))
    changed = rows(model, other)
    for (request, system), row in all_rows.items():
        assert (same(changed[request, system]) == same(row)) == (request > 0)


def test_asking_leaves_the_end_of_the_history_as_it_was(model, monkeypatch) -> None:
    seen = []
    answered = systems._answered

    def watched(session, how, talk, i, found):
        before = [checksum(end.cache) for end in found.values()]
        yield from answered(session, how, talk, i, found)
        seen.append(before == [checksum(end.cache) for end in found.values()])

    monkeypatch.setattr(systems, "_answered", watched)
    rows(model, audit=True)
    assert seen == [True] * 3


def test_rows_depend_on_question_and_system_alone(model, all_rows) -> None:
    turned = rows(model, replace(TALK, questions=QUESTIONS[::-1]), SYSTEMS[::-1])
    for (request, system), row in all_rows.items():
        assert same(turned[2 - request, system]) == same(row) | {"request": 2 - request}
    for system in ("full", "uniform", "poisson"):
        alone = rows(model, replace(TALK, questions=QUESTIONS[1:2]), (system,))
        assert same(alone[0, system]) == same(all_rows[1, system]) | {"request": 0}


def test_draws_follow_seed_and_document(model, all_rows) -> None:
    again, seeded = rows(model), rows(model, seed=1)
    elsewhere = rows(model, replace(TALK, document="e" * 64))
    for key, row in all_rows.items():
        assert same(again[key]) == same(row)
        for other in (seeded, elsewhere):
            assert (same(other[key]) == same(row)) == (key[1] == "full"), key


def test_another_order_of_turns_is_another_history(model, all_rows) -> None:
    turned = rows(model, replace(TALK, turns=TURNS[::-1]))
    assert all(same(turned[key]) != same(row) for key, row in all_rows.items())
    joined = rows(model, replace(TALK, turns=(TURNS[0] + TURNS[1], *TURNS[2:])))
    for key, row in all_rows.items():  # the same text, one compression fewer
        assert (joined[key]["prediction"] == row["prediction"]) or key[1] != "full"
    assert any(same(joined[key]) != same(row) for key, row in all_rows.items())


@pytest.mark.parametrize(("threshold", "system"), [(-1.0, "full"), (float("inf"), "poisson")])
def test_a_gate_that_always_recomputes_gives_fulls_answer_and_one_that_never_does_the_compressed_one(
    model, all_rows, threshold, system
) -> None:
    """What judging composes from rows is what session.gated() gives on a fork of the end."""
    made, tokenizer = serving(model), ByteTokenizer()
    with certified(model, made.policies["poisson"], 0.05, 0, TALK.document) as session:
        for turn in TURNS:
            session.prefill(list(turn))
            session.compress()
        end = session.cache
        for request, question in enumerate(QUESTIONS):
            kwargs = session.fork(of=end)
            whole = torch.tensor([[*TALK.history, *question.ids]])
            out, found = session.gated(
                Gate(threshold), whole, max_new_tokens=6, do_sample=False, eos_token_id=999, **kwargs
            )
            row, text = all_rows[request, system], tokenizer.decode(out[0, whole.shape[1] :], skip_special_tokens=True)
            assert text == row["prediction"] and found.decision == ("recompute" if system == "full" else "answer")
            assert found.certificate == pytest.approx(all_rows[request, "poisson"]["certificate"], rel=1e-4)


# ---------------------------------------------------------------- audits


def test_an_audit_changes_nothing_but_its_own_columns(model, all_rows) -> None:
    seen = rows(model, audit=True)
    for key, row in all_rows.items():
        assert same(seen[key], *AUDIT) == same(row, *AUDIT)
        assert (seen[key]["miss_steps"] is not None) == (key[1] == "poisson")
        assert (seen[key]["replayed"] is not None) == (key == (2, "poisson"))


def test_misses_are_shares_of_heads_whose_served_error_exceeds_the_radius(model) -> None:
    """Against the session's own table, step by step, in a run of the Poisson system alone."""
    found, strict = rows(model, audit=True), []
    made = serving(model)
    with certified(model, made.policies["poisson"], 0.05, 0, TALK.document, audit=True) as session:
        for turn in TURNS:
            session.prefill(list(turn))
            session.compress()
        end = session.cache
        for request, question in enumerate(QUESTIONS):
            whole = torch.tensor([[*TALK.history, *question.ids]])
            kwargs = session.fork(of=end)
            model.generate(whole, max_new_tokens=6, do_sample=False, eos_token_id=999, **kwargs)
            table = pd.DataFrame(session.certificates)
            table = table[table["request"] == session.request].astype({"err": float, "radius": float})
            missed = table["err"] > table["radius"] + 1e-6 * table["out_norm"]
            share = missed.groupby(table["step"]).mean().tolist()
            assert json.loads(found[request, "poisson"]["miss_steps"]) == pytest.approx(share, abs=1e-9)
            wide = radius(*(torch.tensor(table[name].to_numpy(float)) for name in ("var_hat", "max_term")), 0.005)
            far = table["err"].to_numpy() > wide.numpy() + 1e-6 * table["out_norm"].to_numpy()
            strict += pd.Series(far, table.index).groupby(table["step"]).mean().tolist()
            assert len(share) == 6
    assert systems.STRICT == monitor.STRICT == 10
    told = [x for request in range(3) for x in json.loads(found[request, "poisson"]["miss_steps_strict"])]
    plain = [x for request in range(3) for x in json.loads(found[request, "poisson"]["miss_steps"])]
    assert told == pytest.approx(strict, abs=1e-9)
    assert all(few <= many for few, many in zip(told, plain, strict=True)) and sum(told) < sum(plain)


def test_the_replayed_path_is_that_of_the_full_runs_query_by_its_definition(model) -> None:
    """S_t from the weights that the streamed cache had after each event, and q, k, v of a plain forward."""
    said = json.loads(rows(model, audit=True)[2, "poisson"]["replayed"])
    whole = torch.tensor([[*TALK.history, *QUESTIONS[2].ids]])
    queries, made = {}, serving(model)

    def keep(module, query, key, value, *args, **kwargs):
        queries[module.layer_idx] = query[0, :, -1], key[0], value[0]
        return eager(module, query, key, value, *args, **kwargs)

    eager = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("kept", keep)
    AttentionMaskInterface.register("kept", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation("kept")
    with torch.no_grad():
        model(whole)
    model.set_attn_implementation(before)
    errs, norms = [], []
    with certified(model, made.policies["poisson"], 0.05, 0, TALK.document) as session:
        for turn in TURNS:
            session.prefill(list(turn))
            session.compress()
            cache, now, size = session.cache, [], []
            for index, (q, k, v) in queries.items():
                layer = cache.compressible[index]
                for head in range(q.shape[0]):
                    kv = head * k.shape[0] // q.shape[0]
                    p = (layer.scale * k[kv] @ q[head]).softmax(0)
                    out = p @ v[kv]
                    y = p[:, None] * (v[kv] - out)
                    weight = torch.zeros(len(p))
                    here = layer.real[0, kv]
                    at = (
                        torch.arange(layer.length)[here]
                        if layer.position is None
                        else layer.position[0, kv][here].long()
                    )
                    weight[at] = 1 / layer.prob[0, kv][here]
                    weight[layer.length :] = 1
                    now.append(((weight - 1) @ y).norm().item())
                    size.append(out.norm().item())
            errs.append(now)
            norms = size
    medians = pd.DataFrame(errs).div(norms, axis=1).median(axis=1).tolist()
    assert said["tokens"] == [sum(map(len, TURNS[: t + 1])) for t in range(9)]
    assert said["err"] == pytest.approx(medians, rel=1e-3, abs=1e-6) and said["err"][-1] > 0
    assert all(a <= b for a, b in zip(said["crossed"], said["crossed"][1:], strict=False))
    assert all(small <= wide for small, wide in zip(said["err"][2:], said["radius"][2:], strict=True))


def test_the_coin_is_addressed_and_has_its_probability() -> None:
    coins = [audited(1, f"document {i}", 0.5) for i in range(4000)]
    assert coins == [audited(1, f"document {i}", 0.5) for i in range(4000)]
    assert abs(sum(coins) - 2000) < 4 * 31.7  # four standard deviations of a binomial
    assert abs(sum(audited(1, f"document {i}", 0.1) for i in range(4000)) - 400) < 4 * 19
    assert all(audited(1, f"document {i}", 1.0) for i in range(100))
    agree = sum(a == audited(2, f"document {i}", 0.5) for i, a in enumerate(coins))
    assert abs(agree - 2000) < 4 * 31.7
    rare = [i for i in range(4000) if audited(1, f"document {i}", 0.1)]
    assert all(coins[i] for i in rare)  # one coin, whatever is asked of it


def test_conversations_that_cannot_be_served_are_refused(model) -> None:
    for broken in (replace(TALK, questions=()), replace(TALK, turns=()), replace(TALK, turns=((1, 2), (), (3,)))):
        with pytest.raises(UserError, match="expected turns with tokens, and a question"):
            rows(model, broken)
