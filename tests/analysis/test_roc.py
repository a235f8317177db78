"""The drawn curves: their area is the AUC that is judged, and a mean of cells is the mean of their curves."""

from dataclasses import asdict, replace
from importlib import import_module

import numpy as np
import planted_tasks
import pytest
from conftest import ROOT
from sklearn.metrics import roc_auc_score

from analysis.estimands import Cells
from analysis.roc import averaged, curves
from runs import prereg

DRAWS = (200, 1)


def area(false, true) -> float:
    return float(np.trapezoid(true, false))


@pytest.mark.parametrize("ties", [1, 5, 1000])
def test_the_area_of_one_cell_is_its_auc(ties) -> None:
    rng = np.random.default_rng(ties)
    score, positive = rng.integers(0, ties + 1, 80).astype(float), rng.random(80) < 0.4
    score[positive] += rng.integers(0, 2, positive.sum())
    false, true = averaged(score, positive, np.zeros(80, dtype=np.int64))
    assert area(false, true) == pytest.approx(roc_auc_score(positive, score), abs=1e-12)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert (np.diff(false) >= 0).all() and (np.diff(true) >= -1e-15).all()


def test_the_mean_of_two_cells_is_weighted_by_their_pairs() -> None:
    """A perfect cell of 1 x 3 pairs and a reversed one of 2 x 1: the curve stands at 3/5, then 2/5 x 0 more until 1."""
    score = np.array([9.0, 1, 2, 3, 1, 2, 8])
    positive = np.array([True, False, False, False, True, True, False])
    false, true = averaged(score, positive, np.array([0, 0, 0, 0, 1, 1, 1]))
    assert area(false, true) == pytest.approx(3 / 5)
    assert true[np.searchsorted(false, 1 / 3)] == pytest.approx(3 / 5)


def test_a_flagged_answer_ranks_first() -> None:
    false, true = averaged(np.array([np.inf, 1.0, 2.0]), np.array([True, False, False]), np.zeros(3, dtype=np.int64))
    assert area(false, true) == 1


@pytest.mark.parametrize("claim_id", ["claim-5", "claim-7"])
def test_the_area_is_the_auc_that_is_judged(claim_id) -> None:
    made = planted_tasks.plan(ROOT, 10, 4, tasks=("one", "two"), models=("a", "b"))
    rows = planted_tasks.frame(planted_tasks.world(made, confident=0.7))
    registry = prereg.load()
    claim = registry.claim(claim_id)
    claim = replace(claim, params={**asdict(registry.rules), **claim.params})
    judged = import_module(f"analysis.estimands.{claim.estimand}").measure(rows, claim, *DRAWS)
    (stratum,) = judged.strata
    beside = judged.beside[stratum.name]
    panel = beside.get("panel_topk", {})
    known = {("poisson", "certificate"): stratum.measures.get("auc") or beside["auc"],
             ("poisson", "logprob"): beside["auc_logprob"]}  # fmt: skip
    known |= {("topk", name): panel[name]["induced"] for name in ("entropy", "margin") if panel}
    drawn = {(one.policy, one.signal): one for one in curves(Cells("all", rows, "document"), claim, DRAWS)}
    assert len(drawn) == 4
    for key, auc in known.items():
        assert area(drawn[key].false, drawn[key].true) == pytest.approx(auc.value, abs=1e-12)
        assert drawn[key].of.auc(key[1]).at(0.95) == auc.at(0.95)
