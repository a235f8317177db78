"""A plan from real texts: cut by each model's tokenizer, every cell named before the first one runs."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from runs.cells import Plan, in_units
from runs.data import TASKS
from runs.grid import UNIT_EXAMPLES, Part
from runs.kinds import kind_named


def documents(part: Part) -> list[Any]:
    """The texts of one part. Raises UserError where there are too few, or longer than the model's positions."""
    return kind_named(part.kind).texts(part)


def texts(parts: Sequence[Part], plan: Plan, units: Collection[str]) -> list[list[Any]]:
    """The texts of each part with some of these units, and none of the others: a plan's rest can be of one model alone."""
    wanted, names = set(units), zip(plan.cells["unit"].to_pylist(), plan.cells["model"].to_pylist(), strict=True)
    models = {model for unit, model in names if unit in wanted}
    return [documents(part) if part.model in models else [] for part in parts]


def plan(
    parts: Sequence[Part], found: Sequence[Sequence[Any]], header: Mapping[str, Any], manifests: Sequence[Path]
) -> Plan:
    """All cells of the grid, in units of four texts; the header says how many documents are the registered ones.

    found: the texts of each part. manifests: files listing the SHA-256 of the registered documents.
    """
    kind = kind_named(header["kind"])
    cells = [cell for part, mine in zip(parts, found, strict=True) for cell in kind.cells(part, mine)]
    registered = {digest for path in manifests for digest in json.loads(path.read_text())["documents"]}
    hashes = {cell["document"] for cell in cells}
    more = kind.notes(parts, found)
    notes, matching = [*header["population_notes"], *more.pop("population_notes", [])], None
    if registered and header["registered"]:
        listed = {cell["document"] for cell in cells if cell["task"] not in TASKS}  # LongBench rows are in no manifest
        matching = len(listed & registered)
        if matching < len(listed):
            notes.append(f"{len(listed) - matching} of {len(listed)} documents differ from the registered texts")
    counted = {"n": len(hashes), "registered_matching": matching}
    full = {**header, **more, "population_notes": notes, "documents": counted}
    return Plan(full, in_units(cells, header["design"], UNIT_EXAMPLES, kind.units))
