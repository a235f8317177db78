"""Claims 3 to 7 and extensions 1 and 5 on planted answers: truths recovered, counts, errors at the margin."""

import numpy as np
import pandas as pd
import planted_tasks as planted
import pytest
from conftest import ROOT
from scipy import stats
from sklearn.metrics import roc_auc_score
from test_requests import claim

from analysis.estimands import accuracy, attribution, damage, escalation, prediction, recompute, synthetic
from analysis.requests import signal
from analysis.verdict import Tally, decide
from runs.prereg import load

RULES = load().rules
TASKS = ("needle", "multi_key", "key_value", "tracking")


def world(change=None, arms=planted.ARMS, plan=None, **how):
    made = planted.plan(ROOT, **{"documents": 24, "requests": 4, "arms": arms, **(plan or {})})
    return planted.frame(planted.world(made, change=change, **how))


def measured(module, frame, name, resamples=300):
    found = module.measure(frame, claim(name), resamples, 1)
    return {stratum.name: stratum for stratum in found.strata}, found.beside


def outcome(module, frame, name):
    found = module.measure(frame, claim(name), 300, 1)
    return decide(claim(name), RULES, found.strata, Tally(len(frame), 0, 0))


def mean_of(frame, arm, column="official"):
    return frame[frame["arm"] == arm].groupby("task")[column].mean().mean()


# ---------------------------------------------------------------- claims 3 and 4


def test_accuracy_is_the_mean_over_tasks_of_paired_differences() -> None:
    frame = world(plan={"tasks": ("a", "b"), "documents": 6})
    frame = frame[
        ~((frame["task"] == "b") & (frame["request"] > 0))
    ]  # b has a quarter of a's requests, and half the weight
    found, beside = measured(accuracy, frame, "claim-3")
    assert list(found) == ["512 tokens, budget 25 %", "512 tokens, budget 50 %"]
    for budget, (name, stratum) in zip((0.25, 0.5), found.items(), strict=True):
        gap = {mode: mean_of(frame, f"poisson {mode} {budget}") - mean_of(frame, f"topk {mode} {budget}")
               for mode in ("aware", "agnostic")}  # fmt: skip
        assert stratum.measures["difference"].value == pytest.approx(gap["aware"])
        assert beside[name]["difference_agnostic"].value == pytest.approx(gap["agnostic"])
        assert (stratum.n, stratum.clusters) == (30, 12) and beside[name]["notes"] == []
        assert beside[name]["score"]["topk"] == pytest.approx(mean_of(frame, f"topk aware {budget}"))


@pytest.mark.parametrize(("excess", "told"), [(0.009, False), (0.011, True)])
def test_arms_that_are_not_at_equal_budget_are_told(excess, told) -> None:
    def change(cell, row):
        return row | ({"realised_budget": cell["budget"] * (1 + excess)} if cell["policy"] == "poisson" else {})

    _, beside = measured(accuracy, world(change, plan={"documents": 3}), "claim-3")
    expected = ["the arms are not at equal budget: they differ by 1.1%"] if told else []
    assert all(of["notes"] == expected for of in beside.values())


def test_damage_is_full_minus_poisson() -> None:
    frame = world(damage=0.4)
    found, beside = measured(damage, frame, "claim-4")
    stratum = found["512 tokens"]
    assert stratum.measures["difference"].value == pytest.approx(
        mean_of(frame, "full") - mean_of(frame, "poisson aware 0.25")
    )
    assert beside["512 tokens"]["difference_50"].value == pytest.approx(
        mean_of(frame, "full") - mean_of(frame, "poisson aware 0.5")
    )
    assert outcome(damage, frame, "claim-4").outcome == "SUPPORTED"
    assert outcome(damage, world(damage=0.0), "claim-4").outcome == "KILLED"


def test_at_the_margin_sampling_is_seldom_called_harmless() -> None:
    """True difference -0.02 exactly: 160 studies of 40 documents, false support at most as often as a binomial allows."""
    studies, supported = 160, 0
    frame = world(plan={"documents": 40}, arms=("topk aware 0.25", "poisson aware 0.25"))
    topk, sampled = ((frame["policy"] == policy).to_numpy() for policy in ("topk", "poisson"))
    own = claim("claim-3")
    for study in range(studies):
        rng = np.random.default_rng([1, study])
        easy = np.repeat(rng.beta(2, 2, 40), 4)
        frame.loc[topk, "official"] = (rng.random(160) < 0.5 * easy + 0.26).astype(float)
        frame.loc[sampled, "official"] = (rng.random(160) < 0.5 * easy + 0.24).astype(float)
        (stratum, _) = accuracy.measure(frame, own, 200, study).strata
        supported += stratum.measures["difference"].at(0.95)[0] > -0.02
    assert 1 <= supported <= stats.binom.ppf(0.999, studies, 0.025), supported


# ---------------------------------------------------------------- claims 5 and 7


def test_prediction_compares_both_signals_on_the_same_answers() -> None:
    frame = world(apart=2.0, known=0.9)
    own = frame["policy"].eq("poisson") & frame["mode"].eq("aware")
    frame.loc[frame.index[own][:5], ["cert_steps", "certificate"]] = [0, None]
    frame.loc[frame.index[own][5:8], "cert_flagged"] = True
    found, beside = measured(prediction, frame, "claim-5")
    stratum, of = found["512 tokens"], beside["512 tokens"]
    used = frame[own & (frame["cert_steps"] > 0)]
    wrong = used["official"] < 0.5
    parts = {}
    for name in ("certificate", "logprob"):
        score = pd.Series(signal(used, name), used.index).replace(np.inf, 1e9)
        cells = [
            (roc_auc_score(wrong[i], score[i]), wrong[i].sum() * (~wrong[i]).sum())
            for i in used.groupby("budget").groups.values()
        ]
        parts[name] = np.average([a for a, _ in cells], weights=[w for _, w in cells])
        assert of[{"certificate": "auc", "logprob": "auc_logprob"}[name]].value == pytest.approx(parts[name])
    assert stratum.measures["auc_difference"].value == pytest.approx(parts["certificate"] - parts["logprob"])
    assert (stratum.n, stratum.classes) == (len(used), {"failures": wrong.sum(), "successes": (~wrong).sum()})
    assert (of["left_out"]["no certificate"], of["flagged"]) == (5, 3)
    assert of["auc_difference_delong"].value == pytest.approx(stratum.measures["auc_difference"].value)
    assert outcome(prediction, frame, "claim-5").outcome == "SUPPORTED"
    assert outcome(prediction, world(apart=0.0, confident=2.0, known=0.9), "claim-5").outcome == "KILLED"


def test_tasks_without_a_threshold_leave_claims_5_and_7_and_stay_in_3() -> None:
    def change(cell, row):
        return row | ({"metric": "rouge-l longbench-v1/1", "official": 0.3} if cell["task"] == "summary" else {})

    frame = world(change, plan={"tasks": ("qa", "summary"), "documents": 6})
    alone = frame[frame["task"] == "qa"]
    for module, name in ((prediction, "claim-5"), (attribution, "claim-7")):
        (both, _), (one, _) = measured(module, frame, name), measured(module, alone, name)
        assert both["512 tokens"].measures.keys() == one["512 tokens"].measures.keys()
        assert both["512 tokens"].n == one["512 tokens"].n and both["512 tokens"].clusters == one["512 tokens"].clusters
    assert measured(prediction, frame, "claim-5")[1]["512 tokens"]["left_out"]["tasks without threshold"] == 48
    assert measured(accuracy, frame, "claim-3")[0]["512 tokens, budget 25 %"].n == 48


def test_attribution_recovers_a_planted_shift() -> None:
    """Induced failures raise log certificate by 1.2 standard deviations: AUC Phi(1.2 / sqrt 2) = 0.80, confidence 1/2."""
    frame = world(apart=1.2, plan={"documents": 60, "requests": 8}, known=0.6)
    found, beside = measured(attribution, frame, "claim-7")
    stratum, of = found["512 tokens"], beside["512 tokens"]
    truth = stats.norm.cdf(1.2 / np.sqrt(2))
    assert stratum.measures["auc"].value == pytest.approx(truth, abs=0.03)
    assert stratum.measures["auc_difference"].value == pytest.approx(truth - 0.5, abs=0.05)
    own = frame[frame["policy"].eq("poisson") & frame["mode"].eq("agnostic") & frame["official"].lt(0.5)]
    full = frame[frame["arm"] == "full"].set_index(["example", "request"])["official"]
    knew = np.array([full[key] for key in zip(own["example"], own["request"], strict=True)]) >= 0.5
    assert stratum.classes == {"induced": knew.sum(), "inherent": (~knew).sum()} and stratum.n == len(own)
    assert of["full_runs"] == 2 and "draw_noise" not in of and of["left_out"]["successes"] == 60 * 8 * 3 - len(own)
    pooled = roc_auc_score(knew, own["certificate"])
    assert of["auc_pooled"].value == pytest.approx(pooled)
    for name in ("auc_logprob", "auc_full_logprob", "auc_answer_tokens", "auc_ctx_tokens"):
        assert of[name].value == pytest.approx(0.5, abs=0.06)
    assert outcome(attribution, frame, "claim-7").outcome == "SUPPORTED"


def test_discordant_full_runs_are_left_out_and_counted() -> None:
    def change(cell, row):
        odd = cell["arm"] == "full again" and cell["document"] in ("facts 0", "facts 1")
        return row | ({"official": 1 - row["official"]} if odd else {})

    (odd, beside), (plain, _) = (measured(attribution, frame, "claim-7") for frame in (world(change), world()))
    assert odd["512 tokens"].clusters == 22 and plain["512 tokens"].clusters == 24
    assert beside["512 tokens"]["left_out"]["discordant full runs"] == 2 * 4 * 3
    without = world()[lambda frame: ~frame["document"].isin(["facts 0", "facts 1"])]
    same = measured(attribution, without, "claim-7")[0]["512 tokens"]
    assert odd["512 tokens"].classes == same.classes
    assert odd["512 tokens"].measures["auc"].value == same.measures["auc"].value


def test_one_full_run_with_a_second_draw_reports_the_designs_noise() -> None:
    frame = world(arms=planted.SECOND)
    _, beside = measured(attribution, frame, "claim-7")
    first, second = (
        frame[frame["arm"] == arm]["official"].to_numpy() for arm in planted.ARMS[-2:-1] + planted.SECOND[1:2]
    )
    assert beside["512 tokens"]["full_runs"] == 1
    assert (
        beside["512 tokens"]["draw_noise"] == pytest.approx(np.mean(first != second)) and np.mean(first != second) > 0.1
    )


def test_the_panel_asks_top_k_for_its_own_signals() -> None:
    frame = world()
    own = frame["policy"].eq("topk") & frame["mode"].eq("agnostic")
    full = frame[frame["arm"] == "full"].set_index(["example", "request"])["official"]
    knew = np.array([full[key] for key in zip(frame["example"], frame["request"], strict=True)])
    frame.loc[own, "margin"] = np.where(knew[own] > 0, -1.0, 1.0) + 0.01 * np.arange(own.sum()) / own.sum()
    frame.loc[frame.index[own][:7], "entropy"] = np.nan
    panel = measured(attribution, frame, "claim-7")[1]["512 tokens"]["panel_topk"]
    assert panel["margin"]["induced"].value == 1 and panel["margin"]["failure"].value != 1
    used = frame[own & frame["entropy"].notna()]
    wrong = used["official"] < 0.5
    cells = [
        (roc_auc_score(wrong[i], used["entropy"][i]), wrong[i].sum() * (~wrong[i]).sum())
        for i in used.groupby("budget").groups.values()
    ]
    expected = np.average([a for a, _ in cells], weights=[w for _, w in cells])
    assert panel["entropy"]["failure"].value == pytest.approx(expected)


def test_rows_without_question_agnostic_arms_are_counted() -> None:
    frame = world(plan={"documents": 5})
    joined = frame["document"].eq("facts 1") & frame["mode"].eq("agnostic")
    left_out = measured(attribution, frame[~joined], "claim-7")[1]["512 tokens"]["left_out"]
    assert left_out["no question-agnostic arms"] == 4


@pytest.mark.parametrize(("module", "name"), [(prediction, "claim-5"), (attribution, "claim-7")])
def test_a_short_class_says_by_how_much(module, name) -> None:
    frame = world(plan={"documents": 24, "requests": 1}, known=0.3)
    verdict = outcome(module, frame, name)
    (stratum,) = module.measure(frame, claim(name), 100, 1).strata
    short = {of: n for of, n in stratum.classes.items() if n < 30}
    assert verdict.outcome == "NOT_EVALUATED" and short
    for of, n in short.items():
        assert f"512 tokens: {n} {of} of at least 30, {30 - n} short" in verdict.reasons


def test_without_any_failure_the_auc_is_undefined_and_said() -> None:
    verdict = outcome(attribution, world(damage=0.0, known=1.0), "claim-7")
    assert "512 tokens: 0 induced of at least 30, 30 short" in verdict.reasons
    assert verdict.outcome == "NOT_EVALUATED"


# ---------------------------------------------------------------- claim 6 and extension 1


def test_escalation_gains_where_the_certificate_knows() -> None:
    frame = world(apart=3.0, known=0.9, damage=0.4, plan={"documents": 40})
    frame.loc[frame["arm"].isin(["poisson aware 0.5", "poisson agnostic 0.5"]), "official"] = np.tile(
        frame[frame["arm"] == "full"]["official"], 1
    ).repeat(2)
    found, beside = measured(escalation, frame, "claim-6")
    of = beside["512 tokens"]
    before, after = (frame[frame["arm"] == f"poisson aware {b}"].reset_index() for b in (0.25, 0.5))
    change = after["official"] - before["official"]
    chosen = before["certificate"].astype(float).sort_values(ascending=False).index[: len(before) // 4]
    expected = change[chosen].sum() / len(before) - 0.25 * change.mean()
    assert found["512 tokens"].measures["gain_difference"].value == pytest.approx(expected)
    assert of["oracle_difference"].value >= found["512 tokens"].measures["gain_difference"].value > 0.05
    assert of["notes"] == [] and found["512 tokens"].n == 160
    assert outcome(escalation, frame, "claim-6").outcome == "SUPPORTED"


def test_no_room_is_said_where_nobody_could_gain() -> None:
    frame = world(damage=0.0)
    _, beside = measured(escalation, frame, "claim-6")
    assert beside["512 tokens"]["notes"] == ["no room: the best choice of all gains at most 0.0000 more than chance"]
    assert outcome(escalation, frame, "claim-6").outcome == "KILLED"


def test_recompute_is_judged_over_chance_and_over_confidence() -> None:
    frame = world(apart=3.0, known=0.7, plan={"documents": 40})
    found, beside = measured(recompute, frame, "extension-1")
    stratum, of = found["512 tokens"], beside["512 tokens"]
    assert stratum.n == 40 * 4 * 3
    gains = {name: [] for name in ("certificate", "logprob")}
    for budget in (0.1, 0.25, 0.5):
        own = frame[frame["arm"] == f"poisson agnostic {budget}"].reset_index()
        change = frame[frame["arm"] == "full"]["official"].to_numpy() - own["official"].to_numpy()
        for name, all_of in gains.items():
            top = np.argsort(-signal(own, name))[: len(own) // 4]
            all_of.append((change[top].sum() / len(own), 0.25 * change.mean()))
    (certificate, chance), (confidence, _) = (np.mean(gains[name], axis=0) for name in gains)
    assert stratum.measures["over_random"].value == pytest.approx(certificate - chance)
    assert stratum.measures["over_confidence"].value == pytest.approx(certificate - confidence)
    assert of["ratio_to_random"] == pytest.approx(certificate / chance)
    assert of["ratio_to_random_confidence"] == pytest.approx(confidence / chance)
    assert {"over_random_10", "over_random_50", "over_confidence_10", "over_confidence_50"} <= of.keys()
    assert outcome(recompute, frame, "extension-1").outcome == "SUPPORTED"


def test_no_ratio_where_chance_may_gain_nothing() -> None:
    _, beside = measured(recompute, world(damage=0.0), "extension-1")
    assert beside["512 tokens"]["ratio_to_random"] is None and beside["512 tokens"]["gain"]["random"].value == 0


def test_a_certificate_that_is_noise_does_not_beat_chance() -> None:
    """80 studies at the null of extension 1: false support at most as often as a binomial allows."""
    frame = world(arms=planted.SYNTHETIC, plan={"documents": 20, "requests": 3})
    sampled, wrong = frame["policy"].eq("poisson").to_numpy(), np.zeros(2, int)
    for study in range(80):
        rng = np.random.default_rng([2, study])
        frame.loc[~sampled, "official"] = (rng.random((~sampled).sum()) < 0.7).astype(float)
        frame.loc[sampled, "official"] = (rng.random(sampled.sum()) < 0.4).astype(float)
        frame.loc[sampled, "certificate"] = rng.random(sampled.sum())
        (stratum,) = recompute.measure(frame, claim("extension-1"), 200, study).strata
        low, high = stratum.measures["over_random"].at(0.95)
        wrong += low > 0, high < 0
    assert wrong.max() <= stats.binom.ppf(0.999, 80, 0.025) and wrong.sum() >= 1, wrong


# ---------------------------------------------------------------- extension 5


def suite(apart=2.0, documents=40, tasks=TASKS, change=None, **over):
    plan = {"tasks": tasks, "documents": documents, "requests": 1, "grid": "synthetic", **over}
    return world(change, planted.SYNTHETIC, plan, apart=apart, known=0.9)


def test_every_point_is_an_auc_and_the_mean_weighs_them_equally() -> None:
    frame = suite(models=("one", "two"))
    found, beside = measured(synthetic, frame, "extension-5")
    points = beside["all"]["auc_point"]
    assert len(points) == 8 and next(iter(points)) == "one, needle"
    own = frame[frame["policy"].eq("poisson") & frame["model"].eq("two") & frame["task"].eq("key_value")]
    wrong = own["official"] < 0.5
    cells = [
        (roc_auc_score(wrong[i], own["certificate"][i]), wrong[i].sum() * (~wrong[i]).sum())
        for i in own.groupby("budget").groups.values()
    ]
    expected = np.average([a for a, _ in cells], weights=[w for _, w in cells])
    assert points["two, key_value"].value == pytest.approx(expected)
    measures, values = found["all"].measures, [point.value for point in points.values()]
    assert measures["mean_auc"].value == pytest.approx(np.mean(values)) and measures["min_auc"].value == min(values)
    low, high = measures["min_auc"].at(0.95)
    assert (
        low == pytest.approx(min(point.at(1 - 0.05 / 8)[0] for point in points.values())) and low < min(values) < high
    )
    assert found["all"].clusters == 160  # the models share their documents
    assert found["all"].classes["failures of two, key_value"] == wrong.sum() and len(found["all"].classes) == 16
    assert outcome(synthetic, frame, "extension-5").outcome == "SUPPORTED"
    assert outcome(synthetic, suite(apart=-2.0), "extension-5").outcome == "KILLED"


def test_a_missing_point_and_a_point_of_one_class_forbid_a_verdict() -> None:
    assert (
        "all: planted: 3 of its 4 registered points"
        in outcome(synthetic, suite(tasks=TASKS[:3]), "extension-5").reasons
    )

    def change(cell, row):
        return row | ({"official": 1.0} if cell["task"] == "multi_key" else {})

    verdict = outcome(synthetic, suite(change=change), "extension-5")
    assert verdict.outcome == "NOT_EVALUATED"
    assert "all: 0 failures of planted, multi_key of at least 30, 30 short" in verdict.reasons
    assert "all: min_auc is undefined: 1 of 4 points have no cell with both classes" in verdict.reasons
    assert "all: mean_auc is undefined: 1 of 4 points have no cell with both classes" in verdict.reasons


# ---------------------------------------------------------------- all of them


MODULES = {"claim-3": accuracy, "claim-4": damage, "claim-5": prediction, "claim-6": escalation, "claim-7": attribution,
           "extension-1": recompute}  # fmt: skip


@pytest.mark.parametrize("name", [*MODULES, "extension-5"])
def test_failed_pairs_above_one_per_cent_forbid_a_verdict_and_are_no_zeros(name) -> None:
    module = MODULES.get(name, synthetic)
    frame = suite() if module is synthetic else world(plan={"documents": 40})
    rows = frame.index[frame["policy"].eq("poisson") & frame["budget"].isin([0.25, 0.5])]
    lost = rows[:: len(rows) // 24]
    failing = frame.copy()
    failing.loc[lost, "status"] = "failed"
    numbers = failing.select_dtypes("float").columns.difference(["budget"])
    failing.loc[lost, numbers] = np.nan
    found = module.measure(failing, claim(name), 100, 1)
    assert any("have a failed member (" in reason for stratum in found.strata for reason in stratum.obstacles)
    gone = module.measure(frame.drop(lost), claim(name), 100, 1)
    for stratum, other in zip(found.strata, gone.strata, strict=True):
        assert {k: m.value for k, m in stratum.measures.items()} == {k: m.value for k, m in other.measures.items()}
        assert stratum.n == other.n and not other.obstacles


@pytest.mark.parametrize("name", [*MODULES, "extension-5"])
def test_rows_of_one_document_or_all_failed_break_nothing(name) -> None:
    module = MODULES.get(name, synthetic)
    frame = suite(documents=1) if module is synthetic else world(plan={"documents": 1})
    assert outcome(module, frame, name).outcome == "NOT_EVALUATED"
    failed = frame.assign(status="failed", official=np.nan, metric=None)
    verdict = outcome(module, failed, name)
    assert verdict.outcome == "NOT_EVALUATED" and any("no rows" in reason for reason in verdict.reasons)


def test_every_context_length_is_a_stratum() -> None:
    frame = pd.concat([world(plan={"documents": 3, "ctx_tokens": n}) for n in (512, 6000)])
    assert list(measured(damage, frame, "claim-4")[0]) == ["512 tokens", "6,000 tokens"]
    assert len(measured(accuracy, frame, "claim-3")[0]) == 4
