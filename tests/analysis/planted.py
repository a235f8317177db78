"""A registered study in a folder of its own, with planted replay rows: what a test of judging needs, without torch."""

import shutil
from pathlib import Path

import numpy as np

from runs import prereg
from runs.cells import Plan, cell_id, in_units
from runs.registry import ROOT
from runs.store import Store

BUDGETS = (0.125, 0.25, 0.5)
LAPTOP = "documents: 56, layers: 4, heads: 3, steps: 6}\n        cells: 12096"
SMALL = "documents: 6, layers: 3, heads: 1, steps: 2}\n        cells: 108"
REQUEST = {"model": None, "data": None, "ctx": None, "args": None}


def study(root: Path) -> Path:
    """The repository's registration and judging code copied to root and frozen there, with a laptop profile of 108
    cells, so that a small planted plan is the whole of it."""
    for folder in ("prereg", "configs", "analysis", "cert"):
        shutil.copytree(
            ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "out", "published", "LOCK")
        )
    claims = root / "prereg" / "claims.yaml"
    before = claims.read_text()
    assert LAPTOP in before
    claims.write_text(before.replace(LAPTOP, SMALL, 1))
    prereg.freeze(root, lambda _: False, "2026-01-01")
    return root


def plan(root: Path, documents=28, heads=((0, 0), (0, 3), (9, 0)), steps=2, models=("planted",), **header) -> Plan:
    """A replay plan: heads are (layer, query head), each with a KV head of its own."""
    cells = []
    for model in models:
        for document in range(documents):
            for layer, head in heads:
                for budget in BUDGETS:
                    for step in range(1, steps + 1):
                        fields = {"example": f"{model} {document}", "document": f"{model} {document}", "model": model}
                        fields |= {"task": "docs", "ctx_tokens": 1024, "budget": budget, "layer": layer}
                        fields |= {"kv_head": head, "head": head, "step": step}
                        cells.append({"cell": cell_id(fields), **fields})
    registry = prereg.load(root)
    head = {
        "grid": "replay",
        "kind": "replay",
        "profile": "laptop",
        "design": prereg.grid_digest(registry, "replay", root),
        "request": REQUEST,
        "registered": True,
        "population": f"{', '.join(models)}; made-up rows",
        "population_notes": [],
        "model": {"name": ", ".join(models), "digest": ["0" * 64] * len(models), "trained": True},
        "documents": {"n": documents * len(models), "registered_matching": None},
    } | header
    return Plan(head, in_units(cells, head["design"], 4))


def row(cell: dict, err: float, radius: float | None) -> dict:
    """A replay row with the given error and radius by every rule; the rest is plain."""
    undefined = "no tail token retained" if radius is None else None
    radii = dict.fromkeys(("empirical_bernstein", "normal", "conservative", "assisted"), radius)
    return cell | {f"radius_{rule}": value for rule, value in radii.items()} | {
        "status": "ok", "message": None, "n_tokens": 1030, "budget_tokens": round(1024 * cell["budget"]),
        "budget_raised": False, "expected_kept": 1024 * cell["budget"], "n_kept": 100, "err": err, "out_norm": 1.0,
        "full_norm": 1.0, "var_hat": 0.01, "var_true": 0.01, "var_anticipated": 0.01, "max_term": 0.01, "exact": False,
        "undefined": undefined, "err_topk": 1.4 * err, "err_uniform": 3 * err, "entropy": 1.0, "margin": 0.1,
    }  # fmt: skip


def rows(made: Plan, covered=0.98, noise=0.1, seed=0, change=None) -> dict[str, dict]:
    """A row per cell: error from head, document and cell; the radius covers it with probability `covered`.

    noise: of the log radius, which loosens the rank correlation. change(cell, row) may alter each row.
    """
    rng, planted = np.random.default_rng(seed), {}
    for cell in made.cells.to_pylist():
        err = float(np.exp(cell["layer"] / 4 + cell["head"] / 3 + 0.5 * rng.normal()))
        bad = rng.random() >= covered
        made_row = row(
            {**cell, "design": made.design},
            err,
            err * float(np.exp((-1 if bad else 1) * (0.5 + abs(noise * rng.normal())))),
        )
        planted[cell["cell"]] = change(cell, made_row) if change else made_row
    return planted


def fill(root: Path, made: Plan, planted: dict[str, dict], units=None, failing=(), code="1") -> Store:
    """Store the plan and its rows (of the given units only); failing: examples that could not be computed; code: digest."""
    store = Store(root / "runs" / "store")
    store.write_plan(made)
    for unit in made.units if units is None else units:
        attempt = store.attempt(unit, made.design, {"host": "planted", "code": code})
        for example in attempt.missing:
            if example in failing:
                attempt.fail(example, "RuntimeError: planted", 1.0)
            else:
                attempt.record(example, [planted[cell["cell"]] for cell in attempt.planned(example)], 1.0)
        attempt.publish()
    return store
