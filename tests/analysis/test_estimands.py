"""Coverage, fidelity and conditional coverage against loops over rows, scipy, and planted worst heads."""

import numpy as np
import pandas as pd
import planted
import pytest
from scipy import stats

from analysis.estimands import Cells, conditional, coverage, fidelity, label, strata
from runs.prereg import ROOT, load

REGISTRY = load()
ONE, TWO, SIX, FOUR = (REGISTRY.claim(name) for name in ("claim-1", "claim-2", "extension-6", "extension-4"))


def rows(change=None, models=("planted",), **how):
    made = planted.plan(ROOT, documents=8, steps=3, models=models)
    return pd.DataFrame(planted.rows(made, change=change, **how).values())


def measured(module, frame, claim):
    found = module.measure(frame, claim, 200, 1)
    return {stratum.name: stratum for stratum in found.strata}, found.beside


@pytest.fixture(scope="module")
def frame():
    """Radii that miss one cell in ten; undefined in some cells, nothing evicted in others."""

    def change(cell, row):
        if cell["document"] == "planted 3" and cell["step"] == 1:
            row |= {f"radius_{rule}": None for rule in coverage.RULES}
        if cell["document"] == "planted 5" and cell["budget"] == 0.5:
            row |= {f"radius_{rule}": 0.0 for rule in coverage.RULES} | {"err": 0.0, "exact": True}
        row["radius_assisted"] = row["radius_assisted"] and 1.1 * row["radius_assisted"]
        return row

    return rows(change, covered=0.9, noise=0.4)


def test_coverage_is_counted_row_by_row(frame) -> None:
    found, beside = measured(coverage, frame, ONE)
    assert list(found) == ["budget 12.5 %", "budget 25 %", "budget 50 %"]
    for budget, (name, stratum) in zip(planted.BUDGETS, found.items(), strict=True):
        own = [row for row in frame.to_dict("records") if row["budget"] == budget]
        hits = [row["err"] <= row["radius_empirical_bernstein"] + 1e-6 * row["full_norm"] for row in own]
        assert stratum.measures["coverage"].value == pytest.approx(np.mean(hits))
        assert (stratum.n, stratum.clusters) == (len(own), 8)
        assert beside[name]["undefined"]["normal"] == 3  # a miss for coverage
        heads = {(h["layer"], h["head"]): h["coverage"] for h in beside[name]["coverage_head"]}
        for layer, head in heads:
            of_head = [hit for row, hit in zip(own, hits, strict=True) if (row["layer"], row["head"]) == (layer, head)]
            assert heads[layer, head] == pytest.approx(np.mean(of_head))
    assert beside["budget 50 %"]["exact"] == 9 and beside["budget 25 %"]["exact"] == 0


def test_the_slack_is_a_millionth_of_the_full_output() -> None:
    def change(cell, row):
        row |= {"err": 1.0 + (2e-6 if cell["step"] == 1 else 4e-6), "radius_empirical_bernstein": 1.0, "full_norm": 3.0}
        return row

    found, _ = measured(coverage, rows(change), ONE)
    assert found["budget 25 %"].measures["coverage"].value == pytest.approx(1 / 3)


@pytest.mark.parametrize(("module", "claim"), [(coverage, ONE), (coverage, FOUR), (conditional, SIX)])
@pytest.mark.parametrize(("excess", "expected"), [(0.9e-6, 1.0), (1.1e-6, 0.0)])
def test_just_above_radius_and_slack_is_a_miss_for_every_claim(module, claim, excess, expected) -> None:
    def change(_, row):
        radii = {f"radius_{rule}": 1.0 for rule in coverage.RULES}
        return row | radii | {"full_norm": 5.0, "err": 1.0 + 5 * excess}

    found, _ = measured(module, rows(change), claim)
    own = [stratum for stratum in found.values() if stratum.n]
    assert own and all(stratum.measures["coverage"].value == expected for stratum in own)


def test_all_covered_is_bounded_by_independent_draws() -> None:
    """Steps share a draw, and so do query heads of a KV head: 8 documents x 3 layer-and-KV-heads, not 72 cells."""
    found, _ = measured(coverage, rows(covered=1.0), ONE)
    assert found["budget 25 %"].measures["coverage"].at(0.95) == (pytest.approx(0.025 ** (1 / 24)), 1.0)


def test_the_constant_knows_only_other_documents(frame) -> None:
    cells = strata(frame, ONE)[0]
    for quantile in (0.5, 0.95):
        constant = coverage.leave_one_out(cells, quantile)
        for row, value in list(zip(cells.rows.to_dict("records"), constant, strict=True))[::7]:
            same = (cells.rows["layer"] == row["layer"]) & (cells.rows["head"] == row["head"])
            others = cells.rows[same & (cells.rows["document"] != row["document"])]["err"]
            assert value == pytest.approx(np.quantile(others, quantile))
    assert np.isnan(coverage.leave_one_out(cells.only(cells.cluster == 0), 0.5)).all()


def test_what_stands_beside_coverage(frame) -> None:
    _, beside = measured(coverage, frame, ONE)
    own = frame[frame["budget"] == 0.25]
    facts = beside["budget 25 %"]
    assert facts["relative_error"]["topk"] == pytest.approx(1.4 * facts["relative_error"]["certified"])
    assert facts["relative_error"]["certified"] == pytest.approx(own["err"].median())
    assert facts["variance_ratio"] == 1 and facts["budget_raised"] == 0
    assert facts["coverage_assisted"].value >= facts["coverage_normal"].value


def test_fidelity_is_scipys_correlation_without_undefined_radii(frame) -> None:
    found, beside = measured(fidelity, frame, TWO)
    for budget in planted.BUDGETS:
        name = f"planted, {label('budget', budget)}"
        own = frame[(frame["budget"] == budget) & frame["radius_empirical_bernstein"].notna()]
        rank = stats.spearmanr(own["radius_empirical_bernstein"], own["err"])[0]
        assert found[name].measures["spearman"].value == pytest.approx(rank)
        assert (found[name].n, beside[name]["undefined"]) == (len(own), 72 - len(own))
        within = [
            stats.spearmanr(head["radius_empirical_bernstein"], head["err"])[0]
            for _, head in own.groupby(["layer", "head"])
        ]
        assert beside[name]["spearman_within"] == pytest.approx(np.mean(within))
        assert 0 < beside[name]["spearman_constant"] < rank


def test_models_are_strata_of_fidelity_and_pooled_in_coverage() -> None:
    two = rows(models=("one", "two"))
    assert len(measured(fidelity, two, TWO)[0]) == 6
    found, beside = measured(coverage, two, ONE)
    assert [stratum.clusters for stratum in found.values()] == [16, 16, 16]
    assert len(beside["budget 25 %"]["coverage_head"]) == 6


def test_more_documents_than_the_forms_hold_are_resampled_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = strata(rows(noise=0.5), TWO)[0]
    whole = fidelity.correlation(cells, "radius_normal", 500, 1)
    monkeypatch.setattr("analysis.estimands.fidelity.MAX_CLUSTERS", 4)
    grouped = fidelity.correlation(cells, "radius_normal", 500, 1)
    assert grouped.value == pytest.approx(whole.value)
    assert grouped.at(0.95)[1] - grouped.at(0.95)[0] > whole.at(0.95)[1] - whole.at(0.95)[0]


def test_equal_radii_have_no_rank_correlation() -> None:
    found, _ = measured(fidelity, rows(lambda _, row: row | {"radius_empirical_bernstein": 1.0}), TWO)
    assert all(s.measures["spearman"].value is None and s.measures["spearman"].reason for s in found.values())


def test_the_worst_head_is_found_and_pooled_coverage_hides_it() -> None:
    def change(cell, row):
        if cell["head"] == 3:
            row["radius_assisted"] = row["err"] * (0.5 if cell["step"] == 1 else 2)
            row["radius_empirical_bernstein"] = row["err"] * (0.5 if cell["step"] < 3 else 1.8)
        else:
            row |= {"radius_assisted": 1.05 * row["err"], "radius_empirical_bernstein": 1.01 * row["err"]}
        return row

    found, beside = measured(conditional, rows(change), SIX)
    measures = found["budget 50 %"].measures
    assert measures["worst_head"].value == pytest.approx(2 / 3)
    assert measures["coverage"].value == pytest.approx(8 / 9)
    assert beside["budget 50 %"]["worst_head_plain"].value == pytest.approx(1 / 3)
    assert measures["radius_ratio"].value == pytest.approx(1.05 / 1.01)
    assert {h["head"]: (h["plain"], h["assisted"]) for h in beside["budget 50 %"]["heads"]}[3] == (
        pytest.approx(1 / 3), pytest.approx(2 / 3),
    )  # fmt: skip


def test_the_worst_of_many_equal_heads_is_bounded_for_having_been_chosen() -> None:
    """40 heads of coverage 0.9: the smallest share lies below 0.9, its interval still reaches it."""
    rng, reached = np.random.default_rng(1), 0
    for trial in range(60):
        shape = {"document": np.repeat(np.arange(28), 160), "head": np.tile(np.repeat(np.arange(40), 4), 28)}
        frame = pd.DataFrame(shape | {"model": "m", "layer": 0, "task": "t"})
        cells = Cells("all", frame, "document")
        worst = conditional.worst(cells, rng.random(len(frame)) < 0.9, 200, trial)
        assert worst.value < 0.9
        reached += worst.at(0.95)[1] >= 0.9
    assert reached >= 54
    bad = rng.random(len(frame)) < np.where(frame["head"] == 7, 0.5, 0.95)
    low, high = conditional.worst(cells, bad, 200, 1).at(0.95)
    assert 0.25 < low < 0.5 < high < 0.75


def test_further_architectures_are_strata_and_absent_ones_are_missed() -> None:
    found, _ = measured(coverage, rows(models=("a", "b")), FOUR)
    assert list(found)[:2] == ["a", "b"] and len(found) == 12
    assert [stratum.n for stratum in found.values()] == [216, 216] + [0] * 10


def test_an_absent_level_is_a_stratum_without_rows(frame) -> None:
    found, _ = measured(coverage, frame[frame["budget"] > 0.2], ONE)
    assert [stratum.n for stratum in found.values()] == [0, 72, 72]
