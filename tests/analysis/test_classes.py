"""Answers in no pair, and strata too small for a verdict: counted by hand beside, and said in words."""

from dataclasses import replace

import planted
import planted_tasks
import pytest

from analysis import classes, text
from analysis.judge import judged
from analysis.verdict import Stratum
from runs import prereg
from runs.metrics import METRIC_OF

REGISTRY = prereg.load()
RULES = replace(REGISTRY.rules, resamples=200)
CELL = ["model", "task", "budget"]
SUITE = ("needle", "multi_key", "key_value", "tracking")


def by_hand(rows, claim):
    """Certified answers of a class, all of them minus those in cells of both classes, without the estimands' code."""
    wide = rows.pivot(index=["model", "task", "ctx_tokens", "example", "request"], columns="arm", values="official")
    mode, budgets = claim.params["mode"], claim.params["budgets"]
    own = rows[(rows.policy == "poisson") & (rows["mode"] == mode) & (rows.draw == 0) & rows.budget.isin(budgets)]
    own = own[own.cert_steps > 0].assign(right=own.official >= 0.5)
    full = wide["full"].rename("full").reset_index()
    own = own.merge(full, on=["model", "task", "ctx_tokens", "example", "request"])
    if claim.id == "claim-7":
        own = own[~own.right].assign(positive=lambda x: x.full >= 0.5)
        names = {True: "induced", False: "inherent"}
    else:
        own, names = own.assign(positive=~own.right), {True: "failures", False: "successes"}
    alone = own.groupby(CELL).positive.transform("nunique") == 1
    found: dict[str, int] = {}
    for row in own[alone].itertuples():
        name = names[row.positive] + (f" of {row.model}, {row.task}" if claim.id == "extension-5" else "")
        found[name] = found.get(name, 0) + 1
    return found


def world(root, claim, change):
    """The judged verdict of planted answers, altered by `change`, and the rows."""
    grid = REGISTRY.claim(claim).grid
    made = planted_tasks.plan(root) if grid == "tasks" else planted_tasks.plan(
        root, 40, 1, planted_tasks.SYNTHETIC, SUITE, grid="synthetic"
    )  # fmt: skip
    planted.fill(root, made, planted_tasks.world(made, known=0.7, damage=0.4, change=change))
    return judged(claim, root=root, rules=RULES)


@pytest.fixture
def root(tmp_path):
    return planted_tasks.study(tmp_path)


@pytest.mark.parametrize("claim", ["claim-5", "claim-7", "extension-5"])
def test_all_wrong_is_no_pair_and_is_not_called_no_rows(root, claim) -> None:
    found = world(root, claim, lambda _, row: row | {"official": 0.0})
    result, (stratum,) = found.result, found.result["strata"]
    assert result["verdict"] == "NOT_EVALUATED" and stratum["n"] == 0
    assert stratum["one_class"] == by_hand(found.frame, REGISTRY.claim(claim)) and sum(stratum["one_class"].values())
    here = ", ".join(f"{count} {name}" for name, count in stratum["one_class"].items())
    assert f"{stratum['name']}: no cell has both classes: {here}" in result["reasons"]
    assert not any("no rows" in reason for reason in result["reasons"])
    said = " ".join(text.render(result).split())
    assert f"not counted, in cells without the other class: {here}" in said


@pytest.mark.parametrize("claim", ["claim-5", "claim-7", "extension-5"])
def test_some_cells_of_one_class_are_counted_as_by_hand(root, claim) -> None:
    def change(cell, row):
        lost = cell["budget"] == 0.25 and cell["task"] in ("facts", "needle") and cell["policy"] == "poisson"
        return row | ({"official": 0.0} if lost or (claim == "claim-7" and cell["budget"] == 1) else {})

    found = world(root, claim, change)
    (stratum,) = found.result["strata"]
    assert stratum["one_class"] == by_hand(found.frame, REGISTRY.claim(claim))
    assert sum(stratum["one_class"].values()) > 0 and (sum(stratum["classes"].values()) > 0) == (claim != "claim-7")


def test_answers_that_all_pair_add_no_word(root) -> None:
    for claim in ("claim-3", "claim-5", "claim-7"):
        (first, *_) = world(root, claim, None).result["strata"]
        assert "one_class" not in first


def test_an_answer_without_a_certificate_is_of_no_class(root) -> None:
    blind = {"certificate": None, "cert_steps": 0, "no_certificate": "no step"}
    found = world(root, "claim-5", lambda cell, row: row | {"official": 0.0} | (blind if cell["request"] else {}))
    (stratum,) = found.result["strata"]
    assert stratum["one_class"] == {"failures": 24 * 2} == by_hand(found.frame, REGISTRY.claim("claim-5"))


def test_tasks_without_a_threshold_have_no_classes(root) -> None:
    made = planted_tasks.plan(root, tasks=("facts", "summaries"), documents=12)
    wrong = lambda cell, row: row | {"official": 0.0} | ({"metric": "rouge-l 1"} if cell["task"] != "facts" else {})  # noqa: E731
    planted.fill(root, made, planted_tasks.world(made, change=wrong))
    (stratum,) = judged("claim-5", root=root, rules=RULES).result["strata"]
    assert stratum["one_class"] == {"failures": 12 * 4 * 2}


@pytest.mark.parametrize(
    ("claim", "documents", "short"),
    [("claim-5", 29, 58), ("claim-5", 30, None), ("claim-7", 19, 57), ("claim-7", 20, None), ("claim-3", 1, None)],
)
def test_a_plan_too_small_for_two_classes_is_named_before_any_row(root, claim, documents, short) -> None:
    made = planted_tasks.plan(root, documents, 1)
    said = [] if short is None else [f"512 tokens: descriptive: {short} answers planned, not 30 of each of two classes"]
    assert classes.too_few(REGISTRY.claim(claim), made.cells.to_pandas(), False) == said
    planted.fill(root, made, {}, units=[])
    assert set(said) <= set(judged(claim, root=root, rules=RULES).result["reasons"])


def test_tasks_without_a_threshold_and_other_arms_do_not_count_for_it(root) -> None:
    """16 tasks, two prompts each, as the laptop's sample of LongBench: 24 prompts have a threshold."""
    claim = REGISTRY.claim("claim-5")
    made = planted_tasks.plan(root, 2, 1, tasks=tuple(METRIC_OF), ctx_tokens=2048)
    (said,) = classes.too_few(claim, made.cells.to_pandas(), False)
    assert said == "2,048 tokens: descriptive: 48 answers planned, not 30 of each of two classes"
    (more,) = classes.too_few(claim, made.cells.to_pandas(), True)
    assert more == said + classes.MORE


def test_reasons_of_strata_without_rows_stay() -> None:
    never, failed = Stratum("a", {}, 0, 0), Stratum("b", {"x": None}, 0, 0)
    said = classes.told(("a: no rows", "b: no rows", "3 of 5 cells missing"), (never, failed), {}, "pairs")
    assert said == ["a: no rows", "b: none of its pairs counts", "3 of 5 cells missing"]


def test_equal_levels_are_one_column(root) -> None:
    one, two = (world(root, claim, None).result for claim in ("claim-4", "claim-3"))
    assert text.render(one).count(" % interval") == 1 and len(one["strata"]) == 1
    said = text.render(two)
    assert "95 % interval" in said and "97.5 % interval" in said and len(two["strata"]) == 2
    for stratum in two["strata"]:
        for of in stratum["measures"].values():
            assert f"{of['kill_low']:.4f} to {of['kill_high']:.4f}" in said
