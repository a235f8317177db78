"""Extension 3 from planted answers: the judged difference, which models are judged, what stands beside, verdicts."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import planted
import planted_conversations
import planted_locomo
import pytest
from conftest import ROOT

from analysis import figures, text
from analysis.estimands import conversations
from analysis.gated import CERTIFICATE, SYSTEMS
from analysis.judge import judged
from analysis.verdict import Tally, decide
from runs.errors import UserError
from runs.locomo_rows import CATEGORIES
from runs.prereg import load
from runs.registry import Claim

REGISTERED = load()
RULES = replace(REGISTERED.rules, resamples=300)
CLAIM: Claim = replace(
    REGISTERED.claim("extension-3"),
    params={**REGISTERED.claim("extension-3").params, "rho": 0.5, "max_failed_share": 0.01},
)
DRAWS = (300, 1)


def world(talks=10, dialogues=100, plan=(), **how) -> pd.DataFrame:
    made = planted_locomo.plan(ROOT, talks, **dict(plan))
    models = dict(plan).get("models", ("planted",))
    answers = planted_locomo.both(made, planted_locomo.calibration(ROOT, dialogues, models), **how)
    frames = [planted_conversations.frame(one) for one in answers]
    return pd.concat([frame[frame["task"] != "assistant"] for frame in frames], ignore_index=True)


def measured(frame: pd.DataFrame):
    found = conversations.measure(frame, CLAIM, *DRAWS)
    return found.strata[0], found.beside.get("planted")


def outcome(frame: pd.DataFrame):
    return decide(CLAIM, RULES, conversations.measure(frame, CLAIM, *DRAWS).strata, Tally(len(frame), 0, 0))


def by_system(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    rows = frame[frame["task"] == "locomo"]
    return {system: own["official"].to_numpy() for system, own in rows.groupby("system")}


def recomputed(frame: pd.DataFrame, rho=0.5) -> np.ndarray:
    """By the rule in words: above the order statistic of the calibration certificates of place ceil((n + 1)(1 - rho))."""
    certificates = frame[frame["system"] == "poisson"].groupby("task")["certificate"]
    known = sorted(certificates.get_group("assistant_calibration"))
    limit = known[math.ceil((len(known) + 1) * (1 - rho)) - 1]
    return certificates.get_group("locomo").to_numpy() > limit


# ---------------------------------------------------------------- the measure


def test_planted_truths_are_recovered() -> None:
    frame = world()
    stratum, beside = measured(frame)
    scores, mask = by_system(frame), recomputed(frame)
    gated = np.where(mask, scores["full"], scores["poisson"])
    assert 0.1 < mask.mean() < 0.9 and (stratum.n, stratum.clusters) == (200, 10)
    assert stratum.measures["gated_minus_full"].value == pytest.approx((gated - scores["full"]).mean())
    assert beside["recomputed"].value == pytest.approx(mask.mean())
    assert beside["damage"].value == pytest.approx((scores["full"] - scores["poisson"]).mean())
    for system, own in {**scores, CERTIFICATE: gated}.items():
        assert beside["score"][system].value == pytest.approx(own.mean())
    kind = np.array(list(CATEGORIES.values()) * 40)
    for category in CATEGORIES.values():
        for system in ("full", "topk", "poisson"):
            expected = scores[system][kind == category].mean()
            assert beside["score_by_category"][system][category].value == pytest.approx(expected)
        assert beside["score_by_category"][CERTIFICATE][category].value == pytest.approx(gated[kind == category].mean())
    assert len(beside["categories"]) == len(SYSTEMS) * 5
    asked = kind != "adversarial"
    assert beside["score_answerable"]["full"].value == pytest.approx(scores["full"][asked].mean())
    assert beside["gated_minus_full_answerable"].value == pytest.approx((gated - scores["full"])[asked].mean())
    age = np.array([[1 + (talk + request) % 12 for request in range(20)] for talk in range(10)])
    where = np.where(np.arange(20) == 19, "unknown", np.where(age <= 8, "fed", "left out")).ravel()
    assert beside["evidence"] == {name: int((where == name).sum()) for name in ("fed", "left out", "unknown")}
    for name in beside["evidence"]:
        assert beside["score_by_evidence"][name]["poisson"].value == pytest.approx(
            scores["poisson"][where == name].mean()
        )
    assert beside["history_left_out"] == pytest.approx(4 / 12)
    assert beside["prefill_tokens"][CERTIFICATE] == pytest.approx(1020 * mask.mean())
    assert beside["cache_bytes"] == {"full": 10_000, "poisson": 1000} and beside["peak_bytes"] == 11_000
    assert beside["monitor"]["audited"] == 5 and beside["left_out"] == {"failed pairs": 0}
    lent = frame[frame["task"] != "locomo"].groupby("system")["official"].mean()
    assert beside["calibration_damage"].value == pytest.approx(lent["full"] - lent["poisson"])
    assert "wrong_labels" not in beside and beside["notes"] == []


def test_the_interval_is_that_of_ten_conversations() -> None:
    """t with 9 degrees of freedom and, up to the error of 10,000 resamples, the standard error of a mean of ten means."""
    frame = world()
    scores, mask = by_system(frame), recomputed(frame)
    means = (np.where(mask, scores["full"], scores["poisson"]) - scores["full"]).reshape(10, 20).mean(1)
    found = conversations.measure(frame, CLAIM, 10_000, 1).strata[0].measures["gated_minus_full"]
    low, high = found.at(0.95)
    half = 2.2621571628 * means.std(ddof=1) / math.sqrt(10)
    assert (high - low) / 2 == pytest.approx(half, rel=0.03) and (high + low) / 2 == pytest.approx(means.mean())


def test_the_gate_is_that_of_the_dialogues_whatever_the_conversations_say() -> None:
    def scaled(task, by):
        def change(cell, row):
            return row | (
                {"certificate": by * row["certificate"]} if row["certificate"] and cell["task"] == task else {}
            )

        return measured(world(change=change))[1]

    plain = measured(world())[1]
    assert scaled("locomo", 0.5)["threshold"] == plain["threshold"]
    assert scaled("locomo", 0.5)["recomputed"].value < plain["recomputed"].value
    assert scaled("assistant_calibration", 2.0)["threshold"] == pytest.approx(2 * plain["threshold"])


def test_one_threshold_for_all_models_stands_beside() -> None:
    def change(cell, row):
        return row | ({"certificate": [0.2, 0.4, 5.0][cell["request"] % 3]} if row["certificate"] else {})

    frame = world(change=change)
    beside = measured(frame)[1]
    scores, above = by_system(frame), np.arange(200) % 20 % 3 > (0 if CLAIM.params["absolute"] < 0.4 else 1)
    assert beside["recomputed_absolute"].value == pytest.approx(above.mean())
    gap = np.where(above, 0, scores["poisson"] - scores["full"]).mean()
    assert beside["gated_minus_full_absolute"].value == pytest.approx(gap)


def test_wrong_labels_are_left_out_beside_where_a_list_is_given() -> None:
    frame = world(plan={"wrong": lambda talk, request: request == talk})
    beside = measured(frame)[1]
    scores, mask = by_system(frame), recomputed(frame)
    right = ~np.eye(10, 20, dtype=bool).ravel()
    assert beside["wrong_labels"] == 10
    gap = (np.where(mask, scores["full"], scores["poisson"]) - scores["full"])[right]
    assert beside["gated_minus_full_right_labels"].value == pytest.approx(gap.mean())
    assert beside["score_right_labels"]["topk"].value == pytest.approx(scores["topk"][right].mean())
    assert measured(frame)[0].n == 200  # judged is the whole file


# ---------------------------------------------------------------- which models are judged


def test_a_model_without_heavy_damage_is_left_out_and_named() -> None:
    frame = world(plan={"models": ("planted", "robust")}, mild=("robust",))
    found = conversations.measure(frame, CLAIM, *DRAWS)
    assert [stratum.name for stratum in found.strata] == ["planted"] and not found.strata[0].obstacles
    (note,) = found.beside["robust"]["notes"]
    assert note == "not judged: eviction cost 0.000 in calibration, heavy damage is 0.1"
    both = conversations.measure(world(plan={"models": ("planted", "robust")}), CLAIM, *DRAWS)
    assert [stratum.name for stratum in both.strata] == ["planted", "robust"]


def test_there_is_no_verdict_where_no_model_is_damaged_heavily() -> None:
    found = outcome(world(mild=("planted",)))
    assert found.outcome == "NOT_EVALUATED"
    assert found.reasons == ("planted: not judged: eviction cost 0.000 in calibration, heavy damage is 0.1",)


@pytest.mark.parametrize(("lost", "judged_at_all"), [(9, False), (10, True), (11, True)])
def test_heavy_begins_at_the_registered_damage(lost: int, judged_at_all: bool) -> None:
    """Of 100 calibration dialogues, poisson fails `lost` that full gets right: 0.10 is heavy, 0.09 is not."""

    def change(cell, row):
        if cell["task"] == "locomo":
            return row
        gone = cell["system"] == "poisson" and int(cell["example"].split()[1]) < lost
        return row | {"official": 0.0 if gone else 1.0}

    assert (outcome(world(change=change)).outcome != "NOT_EVALUATED") == judged_at_all


def test_without_calibration_nothing_is_judged() -> None:
    for dialogues in (0, 99):
        found = outcome(world(dialogues=dialogues))
        assert found.outcome == "NOT_EVALUATED"
        assert f"{dialogues} calibration dialogues of 100; make extension-2 runs them" in found.reasons[0]


def test_a_gate_that_recomputes_nearly_all_gives_no_verdict() -> None:
    def high(cell, row):
        return row | ({"certificate": 99.0} if cell["task"] == "locomo" and row["certificate"] else {})

    found = outcome(world(change=high))
    assert found.outcome == "NOT_EVALUATED" and "100.0% recomputed, at most 95%" in found.reasons[0]
    assert "9 conversations of at least 10" in outcome(world(talks=9)).reasons[0]


def test_a_failed_answer_takes_its_question_with_it() -> None:
    def change(cell, row):
        failed = cell["example"] == "locomo 3" and cell["request"] == 0 and cell["system"] == "topk"
        return {**dict.fromkeys(row), **cell, "design": "d", "status": "failed", "message": "x"} if failed else row

    stratum, beside = measured(world(change=change))
    assert (stratum.n, stratum.clusters, beside["left_out"]) == (199, 10, {"failed pairs": 1})


# ---------------------------------------------------------------- verdicts


def test_the_loss_that_the_gate_leaves_decides() -> None:
    assert outcome(world(apart=6.0)).outcome == "SUPPORTED"  # what is lost is recomputed
    assert outcome(world(apart=0.0, lost=0.9)).outcome == "KILLED"
    assert outcome(world(apart=1.0, lost=0.3)).outcome == "INCONCLUSIVE"


def test_rate_damage_and_threshold_are_those_of_extension_2() -> None:
    """The rule of the dialogues, unchanged."""
    of, other = (REGISTERED.claim(f"extension-{n}") for n in (3, 2))
    for key in ("rho", "calibration", "calibration_task", "max_recomputed", "heavy_damage", "absolute", "delta"):
        assert of.params[key] == other.params[key], key
    assert of.calibration == other.grid and "analysis/gated.py" in of.judging


# ---------------------------------------------------------------- from the store


def filled(root: Path, made=None, lent=None, which=(0, 1), **how):
    """Both plans and their answers in a store; which: of these alone."""
    made = made or planted_locomo.plan(root)
    plans = (made, lent or planted_locomo.calibration(root))
    for one in which:
        planted.fill(root, plans[one], planted_locomo.both(*plans, **how)[one])
    return made


def verdict(root: Path):
    return judged("extension-3", request=planted_locomo.REQUEST, root=root, rules=RULES)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    root = planted.study(tmp_path_factory.mktemp("study"))
    filled(root, apart=6.0)
    return root, verdict(root)


def test_stored_rows_of_two_grids_give_verdict_text_and_figure(study, tmp_path: Path) -> None:
    _, found = study
    result = found.result
    assert (result["verdict"], result["missing"], result["planned"]) == ("SUPPORTED", 0, 800), result["reasons"]
    assert set(found.frame["task"]) == {"locomo"}  # what a figure draws, and explain names, is the claim's own
    said = text.render(result)
    assert max(map(len, said.splitlines())) <= 100 and "200 questions, 10 conversations" in " ".join(said.split())
    assert result["beside"]["planted"].keys() - REGISTERED.claim("extension-3").beside.keys() <= {"left_out", "notes"}
    paths = figures.draw("extension-3", found.frame, result, tmp_path)
    assert [path.suffix for path in paths] == [".png", ".pdf"] and all(path.stat().st_size > 5000 for path in paths)


def test_the_calibration_is_read_under_the_same_profile_and_model(study, tmp_path: Path) -> None:
    root, whole = study
    again = verdict(root).result
    assert again == whole.result
    other = planted.study(tmp_path / "other")
    filled(other, which=(0,), apart=6.0)
    lacking = verdict(other).result
    assert lacking["verdict"] == "NOT_EVALUATED" and lacking["missing"] == 0
    assert "0 calibration dialogues of 100; make extension-2 runs them" in lacking["reasons"][0]
    assert lacking["rows_digest"] != whole.result["rows_digest"]
    for header in ({"request": planted.REQUEST | {"model": "another"}}, {"profile": "desktop"}):
        filled(other, lent=planted_conversations.plan(other, 1, 100, **header), which=(1,), apart=6.0)
        assert verdict(other).result["verdict"] == "NOT_EVALUATED"
    filled(other, which=(1,), apart=6.0)
    assert verdict(other).result["verdict"] == "SUPPORTED"


def test_a_list_of_wrong_labels_that_came_after_the_answers_is_heard(study) -> None:
    """The plan knows it; the rows, which were made without it, do not change."""
    root, before = study
    store = planted.Store(root / "runs" / "store")
    store.write_plan(planted_locomo.plan(root, wrong=lambda talk, request: request < 2))
    beside = verdict(root).result["beside"]["planted"]
    assert beside["wrong_labels"] == 20 and "gated_minus_full_right_labels" in beside
    store.write_plan(planted_locomo.plan(root))
    assert verdict(root).result == before.result


def test_calibration_rows_of_another_design_are_refused(study, tmp_path: Path) -> None:
    other = planted.study(tmp_path / "other")
    filled(other, lent=planted_conversations.plan(other, 1, 100, design="e" * 64), apart=6.0)
    with pytest.raises(UserError, match="design"):
        verdict(other)
