"""tests/store_small is what its script makes, says that it is made up, and gives back the truths it was made of."""

from dataclasses import replace
from functools import cache

import pytest
import small_store as truth

from analysis.study import Study, numbers, study
from runs import prereg
from runs.store import Store

RULES = replace(prereg.load().rules, resamples=500)


@cache
def studied() -> Study:
    return study("smoke", store=truth.FOLDER, rules=RULES)


def plans(store: Store):
    return {header["grid"]: store.read_plan(header["grid"], "smoke", header["request"]) for header in store.plans()}


def test_the_committed_store_is_the_one_the_script_makes(tmp_path) -> None:
    fresh, committed = truth.write(tmp_path), Store(truth.FOLDER)
    anew = "python -m tests.small_store writes it anew, where a grid was registered otherwise"
    assert [file.path.name for file in fresh.unit_files()] == [file.path.name for file in committed.unit_files()], anew
    assert [path.name for path in fresh.plan_files()] == [path.name for path in committed.plan_files()]
    old = plans(committed)
    for grid, made in plans(fresh).items():
        assert made.header == old[grid].header and made.cells.equals(old[grid].cells)
        assert fresh.rows(made, {made.design}).equals(committed.rows(old[grid], {made.design})), grid
    for file in committed.unit_files():
        assert committed.meta(file.path) == fresh.meta(tmp_path / "units" / file.path.name)
    assert sum(path.stat().st_size for path in truth.FOLDER.rglob("*.parquet")) < 700_000


def test_every_file_says_that_no_model_ran() -> None:
    store = Store(truth.FOLDER)
    for file in store.unit_files():
        meta = store.meta(file.path)
        assert meta["plan"]["synthetic"] is True and "synthetic rows" in meta["plan"]["population"]
        assert all("no model ran" in run["synthetic"] for run in meta["runs"])


def test_no_claim_gets_a_verdict_from_it() -> None:
    for claim_id in prereg.IDS:
        result = studied().result(claim_id)
        assert result["verdict"] == "NOT_EVALUATED"
        if result["rows"]:
            assert "synthetic rows are never evidence" in result["reasons"] and result["synthetic"]
            assert result["missing"] == result["failed"] == 0 and result["population"].startswith("synthetic rows")


def recovered(claim_id: str, name: str, expected: dict[str, float]) -> None:
    """Each estimate within two half widths (about four standard errors) of its truth, and by no means within none."""
    found = numbers(studied().result(claim_id))
    found = found[(found["name"] == name) & (found["of"] == "")].set_index("stratum")
    assert set(found.index) == set(expected)
    for stratum, value in expected.items():
        one = found.loc[stratum]
        assert abs(one["estimate"] - value) <= one["high"] - one["low"] < 0.3, (claim_id, name, stratum)


BUDGETS = {f"budget {100 * budget:g} %": budget for budget in truth.COVERAGE}


@pytest.mark.parametrize("rule", ["coverage", *(f"coverage_{rule}" for rule in truth.RADII)])
def test_coverage_is_recovered(rule) -> None:
    times = truth.RADII.get(rule.removeprefix("coverage_"), 1.0)
    recovered("claim-1", rule, {name: truth.coverage(budget, times) for name, budget in BUDGETS.items()})


def test_fidelity_is_recovered() -> None:
    recovered("claim-2", "spearman", {f"planted, {name}": truth.spearman() for name in BUDGETS})


def test_damage_is_recovered_and_sampling_costs_nothing_against_top_k() -> None:
    lost = {budget: truth.LOST["aware", budget] for budget in (0.25, 0.5)}
    recovered("claim-4", "difference", {"512 tokens": truth.KNOWN * lost[0.25]})
    recovered("claim-4", "difference_50", {"512 tokens": truth.KNOWN * lost[0.5]})
    recovered("claim-3", "difference", {f"512 tokens, budget {100 * budget:g} %": 0.0 for budget in lost})


def test_what_signals_tell_apart_is_recovered() -> None:
    certificate = sum(truth.prediction_auc("aware", budget) for budget in (0.25, 0.5)) / 2
    recovered("claim-5", "auc", {"512 tokens": certificate})
    recovered("claim-5", "auc_logprob", {"512 tokens": truth.auc(truth.FAILED)})
    recovered("claim-7", "auc", {"512 tokens": truth.auc(truth.INDUCED)})
    recovered("claim-7", "auc_logprob", {"512 tokens": 0.5})


def test_gains_are_recovered() -> None:
    for choice in ("certificate", "random", "oracle"):
        again = [truth.gain("agnostic", budget, 0.25, choice) for budget in (0.1, 0.25, 0.5)]
        recovered("extension-1", f"gain {choice}", {"512 tokens": sum(again) / 3})
    more = {
        choice: truth.gain("aware", 0.25, 0.25, choice, truth.LOST["aware", 0.5])
        for choice in ("certificate", "random")
    }
    recovered("claim-6", "gain_difference", {"512 tokens": more["certificate"] - more["random"]})


def test_recall_is_recovered() -> None:
    """Top-k forgets every fact older than five turns: all but the first age."""
    recall = {"full": truth.RECALLED, "poisson": truth.RECALLED * (1 - truth.FORGOTTEN), "topk": truth.RECALLED / 6}
    for system, value in recall.items():
        recovered("extension-2", f"recall {system}", {"planted": value})
    recovered("extension-3", "score full", {"planted": truth.RECALLED})
    recovered("extension-3", "damage", {"planted": truth.RECALLED * truth.FORGOTTEN})


def test_the_truths_are_not_those_of_another_signal() -> None:
    """The bounds of this file are narrow enough to tell the planted signals apart."""
    assert truth.auc(truth.INDUCED) - truth.auc(truth.FAILED) > 0.08
    with pytest.raises(AssertionError):
        recovered("claim-7", "auc_logprob", {"512 tokens": truth.auc(truth.INDUCED)})
