"""What a cell, a unit and a plan are: identity comes from content, never from a clock, a job or a user's name."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from runs.errors import UserError

ID_LENGTH = 24  # 96 bits: among 10^6 cells a collision has probability 10^-17
PLAN_COLUMNS = frozenset(["cell", "unit", "example", "document", "model", "task"])
HEADER_KEYS = frozenset(
    [
        "grid",
        "kind",
        "profile",
        "design",
        "request",
        "registered",
        "population",
        "population_notes",
        "model",
        "documents",
    ]
)


def canonical(value: Any) -> str:
    """Write JSON in the one form that is hashed: sorted keys, no spaces, floats by repr, ASCII.

    NaN, infinity and keys that are not strings are refused (UserError): they have no, or no unique, form.
    """
    _refuse_odd_keys(value)
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise UserError(f"NaN or infinity where an id is made; expected finite numbers; in {value!r}") from None


def _refuse_odd_keys(value: Any) -> None:
    # json turns the keys 1 and None into "1" and "null": two different cells would share an id
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UserError(f"the key {key!r} is not text; expected names only; in {value!r}")
            _refuse_odd_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_odd_keys(item)


def content_id(value: Any) -> str:
    """Return the first 24 hex digits of SHA-256 over the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()[:ID_LENGTH]


def cell_id(fields: Mapping[str, Any]) -> str:
    """Identify a cell by everything that can change its result and by nothing else (no workers, host, log level)."""
    return content_id(dict(fields))


def unit_id(design: str, cells: Sequence[str]) -> str:
    """Identify a unit by its design digest and its cell ids in plan order: a file of that name holds exactly those."""
    return content_id([design, list(cells)])


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two plan headers are of one design, one model and equal inputs, whatever was typed; known ones only."""
    return all(key in one and key in other and one[key] == other[key] for key in ("design", "inputs", "model"))


def id_prefix(text: str) -> str:
    """Return an id, or the beginning of one, in lower case; anything but 4 to 24 hex digits is a UserError."""
    if not re.fullmatch(rf"[0-9a-f]{{4,{ID_LENGTH}}}", text.lower()):
        raise UserError(f"{text!r} is no cell id; expected 4 to {ID_LENGTH} hex digits, the id or its beginning")
    return text.lower()


def in_units(
    cells: Sequence[Mapping[str, Any]], design: str, size: int, by: Sequence[str] = ("model", "task")
) -> pa.Table:
    """Cut cells into units of `size` examples that agree in `by`; returns the plan's table, with the column `unit`.

    cells: mappings with the other PLAN_COLUMNS and the axes of the grid; their order stays. An example (one context,
    one prefill) is never divided between units.
    """
    place: dict[tuple, dict[str, int]] = {}
    members: dict[tuple, list[str]] = {}
    keys = []
    for cell in cells:
        group = tuple(cell[name] for name in by)
        examples = place.setdefault(group, {})
        key = (*group, examples.setdefault(cell["example"], len(examples)) // size)
        members.setdefault(key, []).append(cell["cell"])
        keys.append(key)
    units = {key: unit_id(design, ids) for key, ids in members.items()}
    rows = [{"cell": cell["cell"], "unit": units[key], **cell} for cell, key in zip(cells, keys, strict=True)]
    return pa.Table.from_pylist(rows)


@dataclass(frozen=True, eq=False)
class Plan:
    """All cells of a grid under a profile and a request: what is missing is known without Hydra, data or torch.

    header: JSON with at least HEADER_KEYS, `design` being the grid's digest; cells: one row a cell, PLAN_COLUMNS and
    the axes of the grid. UserError where either is malformed or a cell stands twice.
    """

    header: dict[str, Any]
    cells: pa.Table

    def __post_init__(self) -> None:
        if absent := HEADER_KEYS - self.header.keys() or PLAN_COLUMNS - set(self.cells.column_names):
            raise UserError(
                f"the plan lacks {', '.join(sorted(absent))}; expected the keys and columns of runs/cells.py"
            )
        canonical(self.header)
        for name in ("cell", "unit"):
            good = pc.match_substring_regex(self.cells[name], f"^[0-9a-f]{{{ID_LENGTH}}}$")
            if self.cells[name].null_count or not pc.all(good, min_count=0).as_py():
                raise UserError(f"the plan's column {name} holds something else than ids of {ID_LENGTH} hex digits")
        if pc.count_distinct(self.cells["cell"]).as_py() != self.cells.num_rows:
            raise UserError("the plan has a cell twice; expected fields that tell any two cells apart")

    @property
    def design(self) -> str:
        """The digest of the grid, as it stands in column `design` of every row."""
        return self.header["design"]

    @cached_property
    def units(self) -> dict[str, list[str]]:
        """Unit ids in plan order, each with its example ids in plan order."""
        units: dict[str, dict[str, None]] = {}
        for unit, example in zip(self.cells["unit"].to_pylist(), self.cells["example"].to_pylist(), strict=True):
            units.setdefault(unit, {})[example] = None
        return {unit: list(examples) for unit, examples in units.items()}

    def unit_cells(self, unit: str) -> pa.Table:
        """Return the plan's rows of one unit, in plan order."""
        return self.cells.filter(pc.equal(self.cells["unit"], unit))

    @staticmethod
    def key(grid: str, profile: str, request: Mapping[str, Any]) -> str:
        """Name the plan's file by a hash: profile and request are typed by users and must become no path."""
        return content_id({"grid": grid, "profile": profile, "request": dict(request)})
