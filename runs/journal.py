"""An attempt at a unit: finished examples go to its own journal, line by line, until the unit can be published.

A line is the SHA-256 of the text behind it and that text, JSON with the rows of one example. What a kill, a full disk or a bad sector left of a line fails its
checksum and is dropped: at most the example in flight is lost. Every attempt writes a file of its own, so two processes never append to one.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from runs.cells import Plan
from runs.errors import UserError
from runs.schema import row_schema

if TYPE_CHECKING:
    from runs.store import Store


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError (full disk, read-only store, missing rights) into a UserError with the path and the reason."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"cannot write {path}: {reason}; expected a store (STORE=) with room and write permission; what is stored is whole") from error


def fsync_folder(folder: Path) -> None:
    """Make names that were created in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, payload: Mapping[str, Any]) -> None:
    """Append one checksummed line and fsync; where that fails the file is cut back to what it was and a UserError says why."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    line = f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)  # another process may have published the unit and removed the folder
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        before = os.fstat(handle).st_size
        try:
            while line:
                line = line[os.write(handle, line) :]
            os.fsync(handle)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(handle, before)
            raise
        finally:
            os.close(handle)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the payloads of the whole lines of a journal, whatever stands between them; a journal that is gone has none."""
    payloads = []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:  # its unit was published since the folder was listed
        return []
    for line in lines:
        digest, _, text = line.partition(b" ")
        if digest == hashlib.sha256(text).hexdigest().encode():
            payloads.append(json.loads(text))
    return payloads


class Attempt:
    """One process's work on one unit; made by `Store.attempt`.

    number: under which the unit will be published; missing: examples still to do, in plan order; finished: example -> rows of those that are done, also by
    earlier processes. `record` or `fail` each missing example, then `publish`.
    """

    def __init__(self, store: "Store", plan: Plan, unit: str, number: int, provenance: Mapping[str, Any]) -> None:
        self.unit, self.plan, self.number = unit, plan, number
        self._store, self._provenance, self._schema = store, dict(provenance), row_schema(plan.header["kind"])
        self._records: dict[str, dict[str, Any]] = {}
        self._planned: dict[str, dict[str, dict[str, Any]]] = {}
        for cell in plan.unit_cells(unit).to_pylist():
            self._planned.setdefault(cell["example"], {})[cell["cell"]] = cell | {"design": plan.design}
        self._journal: Path | None = None

    @property
    def finished(self) -> dict[str, list[dict[str, Any]]]:
        """Rows in plan order by example."""
        return {example: self._records[example]["rows"] for example in self._planned if example in self._records}

    @property
    def missing(self) -> list[str]:
        """Examples without rows, in plan order."""
        return [example for example in self._planned if example not in self._records]

    def recover(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take over what earlier processes finished: rows that are all "ok" before failed ones, then the earlier; what no longer fits the plan is left."""
        for record in records:
            known = self._records.get(record["example"])
            if known and (is_ok(known["rows"]) or not is_ok(record["rows"])):
                continue
            with suppress(UserError):  # another version's columns: to be computed again
                self._records[record["example"]] = {**record, "rows": self._checked(record["example"], record["rows"])}

    def open_journal(self) -> None:
        """Create this attempt's journal now, so that a store which cannot be written is reported before any work is done."""
        folder = self._store.journal_folder(self.unit)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for k in count():
                with suppress(FileExistsError):
                    self._journal = folder / f"{self.number}.{k}.jsonl"
                    os.close(os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                    fsync_folder(folder)
                    return

    def record(self, example: str, rows: Sequence[Mapping[str, Any]], wall_s: float) -> None:
        """Journal the rows of an example (any order, one a planned cell) durably; UserError where they do not fit the plan and the schema."""
        entry = {"example": example, "wall_s": float(wall_s), "run": self._provenance, "rows": self._checked(example, rows)}
        if self._journal is None:
            self.open_journal()
        append(self._journal, entry)
        self._records[example] = entry

    def fail(self, example: str, message: str, wall_s: float) -> None:
        """Journal an example that could not be computed: rows with status "failed" and the message, neither a gap nor a zero."""
        self.record(example, [self._schema.failed(planned, message) for planned in self._planned.get(example, {}).values()], wall_s)

    def publish(self) -> Path:
        """Publish the complete unit and remove its journals; returns the file, also where another process published it first."""
        if self.missing:
            raise UserError(f"unit {self.unit} is not complete: {len(self.missing)} examples have no rows, the first is {self.missing[0]!r}")
        by_cell = {row["cell"]: row for rows in self.finished.values() for row in rows}
        ordered = [by_cell[cell] for cell in self.plan.unit_cells(self.unit)["cell"].to_pylist()]
        records = [self._records[example] for example in self._planned]
        return self._store.publish(self, pa.Table.from_pylist(ordered, schema=self._schema.arrow), records)

    def _checked(self, example: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        planned = self._planned.get(example)
        if planned is None:
            raise UserError(f"unit {self.unit} has no example {example!r}; expected one of its plan")
        by_cell = {row["cell"]: row for row in self._schema.checked(rows)}
        if len(by_cell) != len(rows) or by_cell.keys() != planned.keys():
            raise UserError(f"example {example!r} has {len(rows)} rows; expected one for each of its {len(planned)} planned cells; in unit {self.unit}")
        for cell, row in by_cell.items():
            for name in row.keys() & planned[cell].keys():
                if row[name] != planned[cell][name]:
                    raise UserError(f"column {name} is {row[name]!r}; the plan says {planned[cell][name]!r}; in cell {cell!r}")
        return [by_cell[cell] for cell in planned]


def is_ok(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether every row of an example was computed."""
    return all(row["status"] == "ok" for row in rows)
