"""Scores by arm and by task, errors by design, and where rows come from, against numbers that stand elsewhere."""

from dataclasses import replace

import planted
import planted_tasks
import pytest
import small_store
from conftest import ROOT

from analysis.computed import grids
from analysis.figures import PICTURES
from analysis.scores import by_arm, by_task
from analysis.study import study
from runs import prereg

RULES = replace(prereg.load().rules, resamples=200)


@pytest.fixture(scope="module")
def small():
    return study("smoke", store=small_store.FOLDER, rules=RULES, only=("claim-2", "claim-3", "claim-4"))


def test_the_score_of_an_arm_is_that_which_the_claims_compare(small) -> None:
    arms = by_arm(small).set_index(["policy", "mode", "budget"])
    assert len(arms) == 11 and (arms["n"] == 24 * 4 * 2).all() and (arms["clusters"] == 48).all()
    for name, beside in small.result("claim-3")["beside"].items():
        budget = float(name.split()[-2]) / 100
        for policy in ("poisson", "topk"):
            for mode, score in (("aware", "score"), ("agnostic", "score_agnostic")):
                assert arms.loc[(policy, mode, budget), "estimate"] == pytest.approx(beside[score][policy])
    (beside,) = small.result("claim-4")["beside"].values()
    assert arms.loc[("full", "full", 1.0), "estimate"] == pytest.approx(beside["score"]["full"])


def test_an_arm_keeps_its_share_of_the_bytes(small) -> None:
    arms = by_arm(small)
    assert arms["cache_bytes"].to_numpy() == pytest.approx(2 * 2**20 * arms["budget"].to_numpy(), abs=1)
    assert (arms["low"] < arms["estimate"]).all() and (arms["estimate"] < arms["high"]).all()


def test_a_second_draw_and_a_failed_answer_are_in_no_mean(tmp_path) -> None:
    """The full cache's second run is always right, and one example failed: neither moves the mean of the first run."""

    def change(cell, row):
        return row | ({"official": 1.0, "corrected": 1.0} if cell["draw"] else {"official": 0.0, "corrected": 0.5})

    made = planted_tasks.plan(ROOT, 4, 3, profile="smoke")
    planted.fill(tmp_path, made, planted_tasks.world(made, change=change), failing={"facts 1"})
    found = study("smoke", store=tmp_path / "runs" / "store", rules=RULES, only=("claim-3",))
    rows = by_task(found)
    full = rows[rows["policy"] == "full"].iloc[0]
    assert (full["n"], full["official"], full["corrected"]) == (9, 0.0, 0.5)
    assert (by_arm(found)["n"] == 9).all()


def test_the_medians_of_a_figure_are_those_beside_claim_2(small) -> None:
    points = PICTURES["error"].points(small).set_index(["budget", "design"])
    names = {"certified": "Poisson + Hájek", "topk": "top-k", "uniform": "uniform"}
    for name, beside in small.result("claim-2")["beside"].items():
        budget = float(name.split()[-2]) / 100
        for key, design in names.items():
            assert points.loc[(budget, design), "estimate"] == pytest.approx(beside["relative_error"][key])
    assert (points["n"] == 336).all() and (points["clusters"] == 28).all()


def test_hours_are_those_of_every_example_once_and_what_computed_them_is_named(tmp_path) -> None:
    """Four examples of 1 s; of another attempt, only the one that had failed is computed again."""
    made = planted.plan(ROOT, 4, profile="smoke")
    run = {"device": "a <device>", "threads": 1, "cpus": 2, "platform": "a system", "packages": {"torch": "2.0"}}
    store = planted.fill(tmp_path, made, planted.rows(made), failing={"planted 3"})
    for number, revision in enumerate(("a" * 40, "b" * 40)):
        attempt = store.attempt(next(iter(made.units)), made.design, run | {"git": {"revision": revision}}, retry=True)
        for example in attempt.missing:
            attempt.fail(example, "RuntimeError: again", 7.0 + number)
        attempt.publish()
    found = study("smoke", store=tmp_path / "runs" / "store", rules=RULES, only=("claim-1",))
    (row,) = grids(found).to_dict("records")
    assert row["hours"] == pytest.approx((3 * 1.0 + 8.0) / 3600)
    assert (row["device"], row["packages"]) == ("a <device>", "torch 2.0")
    assert row["machine"] == "a system, CPUs: 2, threads of a process: 1"
    assert (row["cells"], row["stored"], row["failed"]) == (made.cells.num_rows, made.cells.num_rows * 3 // 4, 18)
    assert row["code"].startswith("bbbbbbbbbbbb")
