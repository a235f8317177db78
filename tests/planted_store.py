"""A plan with made-up rows for tests of everything that reads a store; no torch, so that a killed child starts fast."""

import hashlib
from pathlib import Path

import pyarrow as pa

from runs.attempt import Attempt
from runs.cells import Plan, cell_id, in_units
from runs.schema import REPLAY
from runs.store import Store

DESIGN = "d" * 64
REQUEST = {"model": None, "data": None, "ctx": None, "args": ""}


def header(design=DESIGN, **over):
    return {
        "grid": "replay",
        "kind": "replay",
        "profile": "smoke",
        "design": design,
        "request": REQUEST,
        "registered": True,
        "population": "planted rows",
        "population_notes": [],
        "model": {"name": "planted", "digest": "0" * 64},
        "documents": {"n": 1, "registered_matching": 1},
    } | over


def plan(documents=6, steps=3, size=2, design=DESIGN, **over):
    cells = []
    for document in range(documents):
        for budget in (0.125, 0.5):
            for step in range(steps):
                fields = {"example": f"example {document}", "document": f"document {document}", "model": "planted"}
                fields |= {"task": "none", "budget": budget, "layer": 0, "kv_head": 0, "head": 0, "step": step}
                cells.append({"cell": cell_id(fields), **fields})
    return Plan(header(design, **over), in_units(cells, design, size))


def made_up(cell):
    """The row of a cell, numbers from its hash, so that one in the wrong place is seen; with every null that may be."""
    bits = hashlib.sha256(cell["cell"].encode()).digest()
    row = {}
    for k, field in enumerate(REPLAY.arrow):
        number = int.from_bytes(bits[k % 24 : k % 24 + 8], "big")
        plain = {pa.float64(): number / 3e17, pa.int64(): number >> 2, pa.bool_(): bool(number % 2), pa.string(): None}
        row[field.name] = None if field.name in REPLAY.optional and number % 3 == 0 else plain[field.type]
    return row | cell | {"status": "ok", "message": None}


def do(attempt: Attempt, failing=(), wall_s=2.0):
    """Finish an attempt: every missing example recorded, or failed where it is in `failing`."""
    for example in attempt.missing:
        if example in failing:
            attempt.fail(example, "RuntimeError: planted", wall_s)
        else:
            attempt.record(example, [made_up(cell) for cell in attempt.planned(example)], wall_s)
    return attempt.publish()


def work(root: Path, design=DESIGN, failing=(), provenance=None):
    """Do what a worker does: the missing units of all stored plans of a design, one after the other."""
    store = Store(root)
    for made in store.plans():
        if made["design"] == design:
            todo = store.read_plan(made["grid"], made["profile"], made["request"])
            for unit in store.missing(todo):
                do(store.attempt(unit, design, provenance or {"host": "planted"}), failing)
    return store


def planted(root: Path, made: Plan | None = None, **how) -> tuple[Store, Plan]:
    """Store a plan and all its rows."""
    made = made or plan()
    Store(root).write_plan(made)
    return work(root, made.design, **how), made
