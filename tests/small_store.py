"""tests/store_small: made-up rows of known truths, for everything that reads a store. No model ran, and each file says so.

    python -m tests.small_store        writes it anew, byte for byte the committed one

Profile smoke, so that it is whole; its verdicts are always NOT_EVALUATED. The truths are those of TRUTHS below.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

sys.path.insert(0, str(Path(__file__).parent / "analysis"))  # `planted` lies there, also where no pytest runs
import planted
import planted_conversations
import planted_locomo
import planted_tasks

from runs import prereg
from runs.cells import Plan, in_units
from runs.registry import ROOT
from runs.store import Store

FOLDER = ROOT / "tests" / "store_small"
PROVENANCE = {"synthetic": "rows of planted truths by tests/small_store.py; no model ran", "device": "none: synthetic"}
HEADS = ((0, 0), (0, 3), (9, 0), (9, 3))
COVERAGE = {0.125: 0.96, 0.25: 0.97, 0.5: 0.98}  # of the judged radius
SPREAD, LOOSE = 0.6, 0.2  # standard deviations of log err within a head and of log radius - log err
ERROR = {0.125: 0.06, 0.25: 0.03, 0.5: 0.01}  # median of err / ||o||; top-k 1.4 times, uniform 3 times that
RADII = {"normal": 0.8, "conservative": 1.2, "assisted": 1.04}  # over the judged radius
KNOWN = 0.7  # share of requests that the model answers with the full cache
LOST = {  # share of these that an arm loses, whichever policy
    ("aware", 0.25): 0.4, ("aware", 0.5): 0.15, ("agnostic", 0.1): 0.8, ("agnostic", 0.25): 0.5, ("agnostic", 0.5): 0.3,
}  # fmt: skip
AGES = (2, 8, 13, 17, 24, 28)  # in turns, of the facts that dialogues are asked for
RECALLED, FORGOTTEN = 0.8, 0.6  # share of facts that the full cache recalls, and of these that a Poisson sample loses
INDUCED, FAILED = 1.2, 0.8  # by how many standard deviations a loss raises the certificate, any failure -logprob


def coverage(budget: float, times: float = 1.0) -> float:
    """Share of cells covered by `times` the judged radius: log radius - log err is normal."""
    return float(norm.cdf(norm.ppf(COVERAGE[budget]) + np.log(times) / LOOSE))


def spearman(spread: float = SPREAD) -> float:
    """Rank correlation of err and radius, whose logarithms are jointly normal: (6 / pi) asin(rho / 2)."""
    rho = spread / np.hypot(spread, LOOSE)
    return float(6 / np.pi * np.arcsin(rho / 2))


def auc(shift: float) -> float:
    """AUC of a normal signal that one class raises by `shift` standard deviations."""
    return float(norm.cdf(shift / np.sqrt(2)))


def prediction_auc(mode: str, budget: float) -> float:
    """AUC of the certificate, failure against success: induced failures raise it, inherent ones do not."""
    induced, inherent = KNOWN * LOST[mode, budget], 1 - KNOWN
    return (induced * auc(INDUCED) + inherent / 2) / (induced + inherent)


def gain(mode: str, budget: float, fraction: float, choice: str, after: float = 0.0) -> float:
    """Gain of answering a fraction of the requests again, where the second answer loses `after` of the known ones."""
    induced, success = KNOWN * LOST[mode, budget], KNOWN * (1 - LOST[mode, budget])

    def taken(at: float) -> tuple[float, float]:
        return induced * norm.sf(at - INDUCED), norm.sf(at)

    def chosen(at: float) -> float:
        up, other = taken(at)
        return up + (1 - induced) * other - fraction

    share = {"random": (fraction * induced, fraction * success), "oracle": (min(fraction, induced), 0.0)}
    if choice == "certificate":
        up, other = taken(brentq(chosen, -9, 9))
        share[choice] = (up, success * other)
    return share[choice][0] * (1 - after) - share[choice][1] * after


# ---------------------------------------------------------------- rows


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Three digits: the truths need no more, and the files are a third of the size."""
    return {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in row.items()}


def replay_rows(made: Plan, rng: np.random.Generator, covered: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Cells whose log err is normal about that of their head; covered: of a model by its name, else by budget."""
    for cell in made.cells.to_pylist():
        scale = ERROR[cell["budget"]]
        err = scale * np.exp(SPREAD * rng.normal())
        share = covered.get(cell["model"], COVERAGE[cell["budget"]])
        radius = err * np.exp(LOOSE * (norm.ppf(share) + rng.normal()))
        row = planted.row({**cell, "design": made.design}, err, float(radius))
        row |= {f"radius_{rule}": float(radius * times) for rule, times in RADII.items()}
        row |= {"var_hat": float(err**2), "var_true": float(err**2 / 0.9)}
        yield rounded(row)


def task_rows(made: Plan, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Answers that are right where the model knows and the arm does not lose; signals as INDUCED and FAILED say."""
    knows: dict[tuple[Any, ...], bool] = {}
    for cell in made.cells.to_pylist():
        request = (cell["model"], cell["example"], cell["request"])
        known = knows.setdefault(request, bool(rng.random() < KNOWN))
        lost = rng.random() < LOST.get((cell["mode"], cell["budget"]), 0.0)
        right, (one, two, three, four) = known and not lost, rng.normal(size=4)
        whole = 2**20 * (1 + cell["ctx_tokens"] // 512)
        said = {"prediction": "yes" if right else 'no, "never" <b>'}
        said |= dict.fromkeys(("certificate_mean", "certificate_top", "certificate_max"))
        said |= {"cache_bytes_before": whole, "cache_bytes_after": int(whole * cell["budget"])}
        said |= {} if cell["policy"] == "full" else {"entropy": float(three), "margin": float(four)}
        certificate, logprob = (
            np.exp(0.5 * (one + INDUCED * (known and lost))),
            -np.exp(0.3 * (two + FAILED * (not right))),
        )
        row = planted_tasks.row({**cell, "design": made.design}, right, certificate, logprob, **said)
        yield rounded(row)


# ---------------------------------------------------------------- plans


def plans() -> Iterator[tuple[Plan, Iterator[dict[str, Any]]]]:
    """Every plan with its rows, in an order that fixes the seed of each."""
    registry = prereg.load()

    def header(grid: str, population: str) -> dict[str, Any]:
        design = prereg.grid_digest(registry, grid, ROOT)
        return {"grid": grid, "profile": "smoke", "design": design, "synthetic": True, "registered": False,
                "population": f"synthetic rows; {population}"}  # fmt: skip

    replay = _cut(planted.plan(ROOT, 28, HEADS, 3, **header("replay", "planted errors")), 14)
    yield replay, replay_rows(replay, np.random.default_rng(1), {})
    models = {f"planted architecture {k + 1}": 0.955 + 0.003 * k for k in range(12)}
    twelve = planted.plan(ROOT, 20, HEADS[:1], 1, tuple(models), **header("architectures", "twelve planted models"))
    twelve = _cut(twelve, 120, ("task",))
    yield twelve, replay_rows(twelve, np.random.default_rng(2), models)
    tasks = planted_tasks.plan(
        ROOT, 24, 4, tasks=("planted_facts", "planted <lists>"), **header("tasks", "planted answers")
    )
    yield (tasks := _cut(tasks, 24, ("model",))), task_rows(tasks, np.random.default_rng(3))
    suite = ("single_needle", "multi_key_needle", "key_value_retrieval", "variable_tracking")
    synthetic = planted_tasks.plan(ROOT, 25, 2, planted_tasks.SYNTHETIC, suite, **header("synthetic", "planted suite"))
    yield (synthetic := _cut(synthetic, 50, ("model",))), task_rows(synthetic, np.random.default_rng(4))
    asked = planted_conversations.plan(ROOT, 12, 100, ages=AGES, **header("assistant", "planted dialogues"))
    asked = _cut(asked, 56, ("model",))
    said = planted_conversations.world(asked, 5, RECALLED, FORGOTTEN, INDUCED)
    yield asked, map(rounded, said.values())
    data = {"request": planted.REQUEST | {"data": "locomo10.json"}}  # as a plan of LoCoMo has it
    told = planted_locomo.plan(ROOT, 10, 6, **header("locomo", "planted conversations"), **data)
    yield (
        (told := _cut(told, 5)),
        map(rounded, planted_conversations.world(told, 6, RECALLED, FORGOTTEN, INDUCED).values()),
    )


def _cut(made: Plan, size: int, by: tuple[str, ...] = ("model", "task")) -> Plan:
    """The same cells in other units: a file's columns are described at a cost of 10 kB."""
    cells = [{key: value for key, value in cell.items() if key != "unit"} for cell in made.cells.to_pylist()]
    return Plan(made.header, in_units(cells, made.design, size, by))


def write(folder: Path) -> Store:
    """All plans and units in a folder."""
    store = Store(folder)
    for made, rows in plans():
        store.write_plan(made)
        by_cell = {row["cell"]: row for row in rows}
        for unit in made.units:
            attempt = store.attempt(unit, made.design, PROVENANCE)
            for example in attempt.missing:
                attempt.record(example, [by_cell[cell["cell"]] for cell in attempt.planned(example)], 0.0)
            attempt.publish()
    shutil.rmtree(folder / "journal")
    return store


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    write(FOLDER)
