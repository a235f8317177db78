"""Gates of stored answers and extension 2: always is full, never is poisson, chance is an expectation; verdicts."""

import itertools
from dataclasses import replace

import numpy as np
import planted
import planted_conversations as conversations
import pytest
from conftest import ROOT

from analysis import figures, gated, text
from analysis.estimands import assistant, strata
from analysis.gated import CERTIFICATE, CONFIDENCE, RANDOM, SYSTEMS, Gated, lowest
from analysis.judge import judged
from analysis.verdict import Tally, decide
from runs.prereg import load

RULES = replace(load().rules, resamples=300)
CLAIM = replace(
    load().claim("extension-2"), params={**load().claim("extension-2").params, "rho": 0.5, "max_failed_share": 0.01}
)
DRAWS = (300, 1)


def world(dialogues=30, calibration=100, plan=(), **how):
    return conversations.frame(
        conversations.world(conversations.plan(ROOT, dialogues, calibration, **dict(plan)), **how)
    )


def gates(frame, recomputed=None, draws=DRAWS) -> Gated:
    (cells,) = strata(gated.conversations(frame), CLAIM)
    found = gated.answers(cells, "assistant", "full", "topk", "uniform")
    limit = gated.threshold(gated.answers(cells, "assistant_calibration", "full"), 0.5)
    mask = gated.over(found, limit) if recomputed is None else np.resize(np.array(recomputed), len(found.cells))
    return Gated(found, mask, draws)


def measured(frame, claim=CLAIM):
    found = assistant.measure(frame, claim, *DRAWS)
    return found.strata[0], found.beside.get("planted")


def outcome(frame, claim=CLAIM):
    found = assistant.measure(frame, claim, *DRAWS)
    return decide(claim, RULES, found.strata, Tally(len(frame), 0, 0))


# ---------------------------------------------------------------- the gates


def test_always_is_full_and_never_is_what_was_compressed() -> None:
    frame = world(dialogues=5)
    always, never = gates(frame, [True]), gates(frame, [False])
    for system in (CERTIFICATE, RANDOM, *CONFIDENCE):
        base = CONFIDENCE.get(system, "poisson")
        assert always.interval(system).value == pytest.approx(always.interval("full").value)
        assert never.interval(system).value == pytest.approx(never.interval(base).value)
    assert always.interval(CERTIFICATE).at(0.95) == pytest.approx(always.interval("full").at(0.95))
    assert always.difference(CERTIFICATE, "full").at(0.95) == pytest.approx((0.0, 0.0))


def test_every_gate_recomputes_as_many_and_chance_is_the_mean_over_all_choices() -> None:
    frame = world(dialogues=1, plan={"ages": (1, 9, 14, 20, 30)})
    of = gates(frame, [True, False, True, False, False])
    for system in (CERTIFICATE, RANDOM, *CONFIDENCE):
        assert of.share(system).sum() == pytest.approx(2)
    full, poisson = of.score("full"), of.score("poisson")
    choices = [
        np.mean([full[i] if i in chosen else poisson[i] for i in range(5)])
        for chosen in itertools.combinations(range(5), 2)
    ]
    assert of.recall(RANDOM)(of.boot.ones)[0] == pytest.approx(np.mean(choices))


def test_confidence_gates_take_the_lowest_of_their_own_system() -> None:
    frame = world(dialogues=4)
    of = gates(frame)
    for system, base in CONFIDENCE.items():
        rows = frame[(frame["task"] == "assistant") & (frame["system"] == base)].reset_index(drop=True)
        chosen = rows["logprob"].nsmallest(of.count).index
        expected = rows["official"].copy()
        expected[chosen] = of.score("full")[chosen]
        assert 0 < of.count < len(rows)
        assert of.interval(system).value == pytest.approx(expected.mean())


def test_ties_at_the_boundary_are_shared() -> None:
    assert lowest(np.array([-3.0, -1, -1, -1, 0]), 2).tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3, 0])
    assert lowest(np.array([2.0, 1.0]), 0).tolist() == [0, 0] and lowest(np.array([2.0, 1.0]), 2).tolist() == [1, 1]


def test_the_threshold_comes_from_calibration_alone_and_what_lies_on_it_stands() -> None:
    def change(cell, row):
        if cell["system"] != "poisson":
            return row
        number = int(cell["example"].split()[1])
        return row | {"certificate": float(number + 1) if cell["task"] != "assistant" else 50.0 + number}

    frame = world(dialogues=3, calibration=100, change=change)
    of = gates(frame)
    # ceil(101 x 0.5) = 51: the certificates of the dialogues are 50, 51 and 52, and 51 is not above 51
    assert of.recomputed.tolist() == [False] * 24 + [True] * 12
    flagged = world(dialogues=3, change=lambda c, r: change(c, r) | {"cert_flagged": c["example"] == "assistant 0"})
    assert gates(flagged).recomputed.tolist() == [True] * 12 + [False] * 12 + [True] * 12
    missing = {"cert_steps": 0, "certificate": None}
    without = world(dialogues=3, change=lambda c, r: change(c, r) | (missing if c["example"] == "assistant 1" else {}))
    assert gates(without).recomputed.tolist() == [False] * 12 + [True] * 24


def test_the_judged_difference_agrees_with_brute_force_in_every_resample() -> None:
    frame = world(dialogues=8)
    of = gates(frame, draws=(50, 3))
    cluster, full, poisson = of.found.cells.cluster, of.score("full"), of.score("poisson")
    brute = []
    for weights in of.boot.weights:
        w = weights[cluster]
        n, k = w.sum(), w[of.recomputed].sum()
        after = (w * np.where(of.recomputed, full, poisson)).sum() / n
        brute.append(after - ((w * poisson).sum() / n + k / n * (w * (full - poisson)).sum() / n))
    fast = of.recall(CERTIFICATE)(of.boot.weights) - of.recall(RANDOM)(of.boot.weights)
    assert fast == pytest.approx(np.array(brute))
    found = of.difference(CERTIFICATE, RANDOM)
    half = found.at(0.95)[1] - found.value
    assert half == pytest.approx(of.boot.t(0.025) * np.std(brute, ddof=1))


def test_curves_end_at_full_and_the_oracle_is_above_all() -> None:
    of = gates(world(dialogues=6))
    curve = of.curves()
    for name in ("certificate", "confidence", "random", "oracle"):
        assert curve[name][0] == pytest.approx(of.score("poisson").mean())
        assert curve[name][-1] == pytest.approx(of.score("full").mean())
        assert all(one <= best + 1e-12 for one, best in zip(curve[name], curve["oracle"], strict=True))


# ---------------------------------------------------------------- extension 2


def test_planted_truths_are_recovered() -> None:
    frame = world(known=0.8, lost=0.6, apart=2.0, change=lambda c, r: r | ({"official": 0.0} if c["age"] == 25 else {}))
    stratum, beside = measured(frame)
    rows = frame[frame["task"] == "assistant"]
    by = {system: own["official"].to_numpy() for system, own in rows.groupby("system")}
    old = rows[rows["system"] == "full"]["age"].to_numpy() >= 26
    for system, score in by.items():
        assert beside["recall"][system].value == pytest.approx(score.mean())
    mask = gates(frame).recomputed
    after = np.where(mask, by["full"], by["poisson"])
    assert stratum.measures["over_topk_old"].value == pytest.approx(after[old].mean() - by["topk"][old].mean())
    cov = np.mean(mask * (by["full"] - by["poisson"])) - mask.mean() * np.mean(by["full"] - by["poisson"])
    assert stratum.measures["over_random_gate"].value == pytest.approx(cov)
    assert beside["recomputed"].value == pytest.approx(mask.mean())
    assert (stratum.n, stratum.clusters) == (360, 30)
    assert beside["recall_by_age"]["topk"]["1-5"].value > 0.6 and beside["recall_by_age"]["topk"]["26-30"].value == 0
    assert len(beside["ages"]) == len(SYSTEMS) * 6
    damage = frame[frame["task"] != "assistant"].groupby("system")["official"].mean()
    assert beside["calibration_damage"].value == pytest.approx(damage["full"] - damage["poisson"])
    assert beside["notes"] == [
        f"damage is heavy: {damage['full'] - damage['poisson']:.3f} in calibration, heavy from 0.1 on"
    ]
    assert beside["prefill_tokens"][CERTIFICATE] == pytest.approx(1020 * mask.mean())
    assert beside["prefill_tokens"][RANDOM] == pytest.approx(1020 * mask.mean())
    assert beside["cache_bytes"] == {"full": 10_000, "poisson": 1000} and beside["peak_bytes"] == 11_000
    assert beside["dialogue_tokens"] == 1000
    assert beside["replayed"] == {"conversations": 15, "crossed": pytest.approx(0.04), "most_crossed": 0.04}
    assert len(beside["replayed_paths"]) == 15 and beside["replayed_paths"][1]["document"] == "assistant 2"
    assert beside["monitor"]["audited"] == 15 and beside["monitor"]["miss"] == pytest.approx(0.05)


def test_by_age_the_random_gate_recomputes_the_share_of_all() -> None:
    of = gates(world())
    old = of.found.cells["age"] >= 26
    full, poisson = of.score("full")[old].mean(), of.score("poisson")[old].mean()
    assert of.interval(RANDOM, old).value == pytest.approx(poisson + of.count / 360 * (full - poisson))
    assert of.recomputed[old].mean() != pytest.approx(of.count / 360)
    after = np.where(of.recomputed, of.score("full"), of.score("poisson"))
    assert of.interval(CERTIFICATE, old).value == pytest.approx(after[old].mean())


def test_the_certificate_decides_the_verdict() -> None:
    assert outcome(world(apart=2.0)).outcome == "SUPPORTED"
    assert outcome(world(apart=0.0)).outcome == "INCONCLUSIVE"
    assert outcome(world(apart=-2.0)).outcome == "KILLED"


def test_no_verdict_where_nearly_all_is_recomputed_or_calibration_is_short() -> None:
    def high(cell, row):
        return row | ({"certificate": 99.0} if cell["task"] == "assistant" and row["certificate"] else {})

    everything = outcome(world(change=high))
    assert everything.outcome == "NOT_EVALUATED" and "100.0% recomputed, at most 95%" in everything.reasons[0]
    short = outcome(world(calibration=99))
    assert short.outcome == "NOT_EVALUATED" and "99 calibration dialogues of 100" in short.reasons[0]
    assert outcome(world(calibration=0)).outcome == "NOT_EVALUATED"
    assert "10 conversations of at least 20" in outcome(world(dialogues=10)).reasons[0]


def test_a_failed_answer_takes_its_question_with_it_and_is_counted() -> None:
    def change(cell, row):
        failed = cell["example"] == "assistant 3"
        return {**dict.fromkeys(row), **cell, "design": "d", "status": "failed", "message": "x"} if failed else row

    stratum, beside = measured(world(change=change))
    assert (stratum.n, stratum.clusters, beside["left_out"]) == (348, 29, {"failed pairs": 12})
    assert outcome(world(change=change)).reasons[0].startswith("planted: 12 of 360 pairs have a failed member")


def test_each_model_has_its_own_threshold() -> None:
    def change(cell, row):
        big = cell["model"] == "big" and row["certificate"] is not None
        return row | ({"certificate": 1000 * row["certificate"]} if big else {})

    frame = world(plan={"models": ("planted", "big")}, change=change)
    found = assistant.measure(frame, CLAIM, *DRAWS)
    assert [stratum.name for stratum in found.strata] == ["planted", "big"]
    assert found.beside["big"]["threshold"] > 100 * found.beside["planted"]["threshold"]
    assert 0.3 < found.beside["big"]["recomputed"].value < 0.7


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    root = planted.study(tmp_path_factory.mktemp("study"))
    made = conversations.plan(root)
    planted.fill(root, made, conversations.world(made))
    return root, judged("extension-2", root=root, rules=RULES)


def test_stored_rows_to_verdict_text_and_figure(study, tmp_path) -> None:
    _, found = study
    result = found.result
    assert (result["verdict"], result["missing"], result["planned"]) == ("SUPPORTED", 0, 1640), result["reasons"]
    said = text.render(result)
    assert max(map(len, said.splitlines())) <= 100 and "360 questions, 30 conversations" in " ".join(said.split())
    assert result["beside"]["planted"].keys() - load().claim("extension-2").beside.keys() <= {"left_out", "notes"}
    paths = figures.draw("extension-2", found.frame, result, tmp_path)
    assert [path.suffix for path in paths] == [".png", ".pdf"] and all(path.stat().st_size > 5000 for path in paths)


def test_a_failed_conversation_reaches_the_estimand_from_the_store(tmp_path) -> None:
    root = planted.study(tmp_path)
    made = conversations.plan(root)
    planted.fill(root, made, conversations.world(made), failing=("assistant 3",))
    result = judged("extension-2", root=root, rules=RULES).result
    assert result["failed"] == 48 and result["beside"]["planted"]["left_out"] == {"failed pairs": 12}
    assert (result["verdict"], result["strata"][0]["n"]) == ("NOT_EVALUATED", 348)
    assert "12 of 360 pairs have a failed member" in " ".join(result["reasons"])
