"""One process's work on one unit: take over what was finished, record what is missing, publish."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from runs import journal
from runs.cells import Plan
from runs.errors import UserError
from runs.schema import row_schema

if TYPE_CHECKING:
    from runs.store import Store

# what is known of a finished example: example, rows, wall_s (seconds), run (provenance of the process that computed it)
Record = Mapping[str, Any]


def is_ok(record: Record) -> bool:
    """Say whether every row of an example was computed."""
    return all(row["status"] == "ok" for row in record["rows"])


class Attempt:
    """Made by `Store.attempt`; `record` or `fail` each example of `missing`, then `publish` under `number`."""

    def __init__(self, store: "Store", plan: Plan, unit: str, number: int, provenance: Mapping[str, Any]) -> None:
        self.plan, self.unit, self.number = plan, unit, number
        self._store, self._schema = store, row_schema(plan.header["kind"])
        self._run = json.loads(json.dumps(provenance))  # as a later process will read it
        self._journal: Path | None = None
        self._records: dict[str, Record] = {}
        self._planned: dict[str, dict[str, dict[str, Any]]] = {}  # example -> cell -> what the plan says of it
        for cell in plan.unit_cells(unit).to_pylist():
            self._planned.setdefault(cell["example"], {})[cell["cell"]] = cell | {"design": plan.design}

    @property
    def finished(self) -> dict[str, list[dict[str, Any]]]:
        """Rows by example, both in plan order, of what is done, also by earlier processes."""
        return {example: self._records[example]["rows"] for example in self._planned if example in self._records}

    @property
    def missing(self) -> list[str]:
        """Examples without rows, in plan order."""
        return [example for example in self._planned if example not in self._records]

    def planned(self, example: str) -> list[dict[str, Any]]:
        """Return the plan's cells of an example of this unit, in plan order, with their design."""
        if example not in self._planned:
            raise UserError(f"unit {self.unit} has no example {example!r}; expected one of its plan")
        return list(self._planned[example].values())

    def recover(self, records: Iterable[Record]) -> None:
        """Take over records of earlier processes: rows that are all "ok" before failed ones, then the earlier."""
        for record in records:
            known = self._records.get(record["example"])
            if known is None or (is_ok(record) and not is_ok(known)):
                with suppress(UserError):  # another version's columns: to be computed again
                    rows = self._checked(record["example"], record["rows"])
                    self._records[record["example"]] = {**record, "rows": rows}

    def begin(self) -> None:
        """Create the journal now, so that a store which cannot be written is reported before any work is done."""
        self._journal = journal.create(self._store.root / "journal", self.unit, self.number)

    def record(self, example: str, rows: Sequence[Mapping[str, Any]], wall_s: float) -> None:
        """Journal an example durably: one row for each planned cell, in any order; wall_s: its seconds.

        UserError where the rows do not fit the plan or the schema, or cannot be written.
        """
        checked = self._checked(example, rows)
        record = {"example": example, "wall_s": float(wall_s), "run": self._run, "rows": checked}
        if self._journal is None:
            raise UserError(f"unit {self.unit} has nothing to do; expected no further example {example!r}")
        journal.append(self._journal, record)
        self._records[example] = record

    def fail(self, example: str, message: str, wall_s: float) -> None:
        """Journal an example that could not be computed: rows with a status and a message, neither gaps nor zeros."""
        self.record(example, [self._schema.failed(cell, message) for cell in self.planned(example)], wall_s)

    def publish(self) -> Path:
        """Publish the complete unit and remove its journals; returns its file, also where another process was first."""
        if self.missing:
            raise UserError(f"unit {self.unit} lacks {len(self.missing)} examples; expected all before it is published")
        by_cell = {row["cell"]: row for record in self._records.values() for row in record["rows"]}
        ordered = [by_cell[cell] for cell in self.plan.unit_cells(self.unit)["cell"].to_pylist()]
        return self._store.publish(
            self.unit, self.number, pa.Table.from_pylist(ordered, schema=self._schema.arrow), self._meta()
        )

    def _meta(self) -> dict[str, Any]:
        header, records = self.plan.header, [self._records[example] for example in self._planned]
        runs: list[Mapping[str, Any]] = []
        for record in records:
            if record["run"] not in runs:
                runs.append(record["run"])
        return {
            "unit": self.unit,
            "number": self.number,
            "design": self.plan.design,
            "rows": self.plan.unit_cells(self.unit).num_rows,
            "plan": header,
            "runs": runs,
            "run_of": {record["example"]: runs.index(record["run"]) for record in records},
            "wall_s": {record["example"]: record["wall_s"] for record in records},
        }

    def _checked(self, example: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        planned = {cell["cell"]: cell for cell in self.planned(example)}
        by_cell = {row["cell"]: row for row in self._schema.checked(rows)}
        if len(by_cell) != len(rows) or by_cell.keys() != planned.keys():
            raise UserError(
                f"example {example!r} has {len(rows)} rows; expected one for each of its {len(planned)} planned cells;"
                f" in unit {self.unit}"
            )
        for cell, row in by_cell.items():
            for name in row.keys() & planned[cell].keys():
                if row[name] != planned[cell][name]:
                    raise UserError(
                        f"column {name} is {row[name]!r}; expected {planned[cell][name]!r} as planned; in cell {cell!r}"
                    )
        return [by_cell[cell] for cell in planned]


def records_of(rows: Iterable[Mapping[str, Any]], meta: Mapping[str, Any]) -> list[Record]:
    """Turn the rows and the metadata of a published unit back into records."""
    by_example: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_example.setdefault(row["example"], []).append(row)
    return [
        {"example": name, "rows": mine, "wall_s": meta["wall_s"][name], "run": meta["runs"][meta["run_of"][name]]}
        for name, mine in by_example.items()
    ]
