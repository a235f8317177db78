"""The store: plans and finished units as parquet, unfinished ones as journals; nothing lost, nothing doubled.

    plans/<hash of grid, profile, request>.parquet   all cells of a plan, written before the first one runs
    journal/<unit>.<number>.<k>.jsonl                examples that the k-th process at work on a unit has finished
    units/<unit>.<number>.parquet                    all rows of the unit; 0 is the first attempt, each later try of
                                                     examples that failed has the next number
A unit is written to a temporary file, fsynced and linked to its name. A link fails where the name exists: the first
complete attempt wins, without locks (shared file systems lie about them), without clocks. Readers drop doubles by
cell id. Only this module reads and writes parquet.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from runs import files, journal
from runs.attempt import Attempt, is_ok, records_of
from runs.cells import ID_LENGTH, Plan, id_prefix
from runs.errors import UserError
from runs.files import UnitFile
from runs.schema import row_schema

_META = b"kvcert"
_PLAN_NAME = re.compile(rf"[0-9a-f]{{{ID_LENGTH}}}\.parquet")
_CELL = pa.schema([pa.field("cell", pa.string(), nullable=False)])
# what stands beside the rows, with its types: in a plan's file, and in a unit's
_HEADER: dict[str, type] = dict.fromkeys(("grid", "kind", "profile", "design", "population"), str)
_HEADER |= {"request": dict, "registered": bool, "population_notes": list, "model": dict, "documents": dict}
_UNIT: dict[str, type] = {
    "unit": str,
    "number": int,
    "design": str,
    "rows": int,
    "plan": dict,
    "runs": list,
    "run_of": dict,
    "wall_s": dict,
}


@dataclass(frozen=True)
class Found:
    """A stored row, the file that holds it and that file's metadata."""

    row: dict[str, Any]
    path: Path
    meta: dict[str, Any]


class Store:
    """A folder of plans, journals and units. Reading creates and changes nothing in it."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._plan_of: dict[str, Plan] = {}

    def write_plan(self, plan: Plan) -> Path:
        """Store a plan atomically under its grid, profile and request; UserError where the store cannot be written.

        An equal one is left alone, so that a complete store can be used where it is read-only.
        """
        path = self.plan_path(plan.header["grid"], plan.header["profile"], plan.header["request"])
        with suppress(UserError):  # one that cannot be read is replaced
            stored = self._load_plan(path)
            if stored and stored.header == plan.header and stored.cells.equals(plan.cells):
                return path
        files.replace(path, _parquet(plan.cells, plan.header))
        return path

    def read_plan(self, grid: str, profile: str, request: Mapping[str, Any]) -> Plan | None:
        """Return the stored plan or None; UserError where its file is damaged."""
        return self._load_plan(self.plan_path(grid, profile, request))

    def plans(self) -> list[dict[str, Any]]:
        """Return the headers of all stored plans, sorted by grid, profile and request."""
        headers = [self._header(path) for path in self.plan_files()]
        return sorted(headers, key=lambda header: json.dumps([header[key] for key in ("grid", "profile", "request")]))

    def plan_files(self) -> list[Path]:
        """Return the files of all stored plans."""
        return [path for path in files.listing(self.root / "plans") if _PLAN_NAME.fullmatch(path.name)]

    def missing(self, plan: Plan, designs: Collection[str] | None = None) -> list[str]:
        """Return the units, in plan order, that lack a row of one of `designs` (default: the plan's own).

        A failed row is not missing.
        """
        have, _ = self._winners(plan, designs, ["cell", "status"])
        absent = pc.invert(pc.is_in(plan.cells["cell"], value_set=have["cell"]))
        return plan.cells["unit"].filter(absent).unique().to_pylist()

    def failing(self, plan: Plan, designs: Collection[str] | None = None) -> list[str]:
        """Return the units, in plan order, with failed rows: `attempt(..., retry=True)` tries those examples again."""
        have, _ = self._winners(plan, designs, ["cell", "status"])
        failed = have["cell"].filter(pc.not_equal(have["status"], "ok"))
        return plan.cells["unit"].filter(pc.is_in(plan.cells["cell"], value_set=failed)).unique().to_pylist()

    def counts(self, plan: Plan, designs: Collection[str] | None = None) -> dict[str, int]:
        """Count the plan's cells: done, missing, failed; `refused` are missing ones with a row of another design."""
        have, refused = self._winners(plan, designs, ["cell", "status"])
        done = pc.sum(pc.equal(have["status"], "ok"), min_count=0).as_py()
        missing = plan.cells.num_rows - have.num_rows
        return {"done": done, "missing": missing, "failed": have.num_rows - done, "refused": refused}

    def rows(self, plan: Plan, designs: Collection[str]) -> pa.Table:
        """Return the rows of planned cells in plan order, one a cell: "ok" before failed, then the earlier attempt.

        UserError where a file is damaged, or where there are rows and all of them are of designs not accepted.
        """
        table, refused = self._winners(plan, designs, row_schema(plan.header["kind"]).arrow.names)
        if refused and not table.num_rows:
            wanted = " or ".join(sorted(design[:12] for design in designs))
            raise UserError(
                f"all {refused:,} rows of grid {plan.header['grid']} are of another design; expected {wanted}"
                f" (prereg/LOCK, prereg/DEVIATIONS.md); in {self.root}"
            )
        return table

    def _winners(self, plan: Plan, designs: Collection[str] | None, columns: list[str]) -> tuple[pa.Table, int]:
        designs = {plan.design} if designs is None else set(designs)
        full = row_schema(plan.header["kind"]).arrow
        schema = pa.schema([full.field(name) for name in columns])
        own: list[Path] = []
        foreign: list[Path] = []
        for file in self.unit_files():
            (own if file.unit in plan.units and plan.design in designs else foreign).append(file.path)
        table = _first_by_plan(plan, [schema.empty_table(), *(_read(path, schema) for path in own)])
        if table.num_rows == plan.cells.num_rows:
            return table, 0
        # cells may stand in units of an accepted older design too, or of a profile that cuts its units otherwise
        accepted = {path for path in foreign if self.meta(path)["design"] in designs}
        table = _first_by_plan(plan, [table, *(_read(path, schema) for path in foreign if path in accepted)])
        refused = [_read(path, _CELL) for path in foreign if path not in accepted]
        others = pa.concat_tables([_CELL.empty_table(), *refused])["cell"]
        absent = plan.cells["cell"].filter(pc.invert(pc.is_in(plan.cells["cell"], value_set=table["cell"])))
        return table, pc.sum(pc.is_in(absent, value_set=others), min_count=0).as_py()

    def unit_files(self, unit: str | None = None) -> list[UnitFile]:
        """Return the published units (of one id), by id and number."""
        return files.unit_files(self.root / "units", unit)

    def journals(self, unit: str | None = None) -> list[UnitFile]:
        """Return the journals (of one unit), by unit, number and order of creation."""
        return files.unit_files(self.root / "journal", unit)

    def meta(self, path: Path) -> dict[str, Any]:
        """Return what is written beside the rows of a plan or a unit.

        UserError where the file is damaged, or was not written as a plan or unit of a store.
        """
        with _reading(path):
            stored = pq.read_metadata(path).metadata or {}
            meta = json.loads(stored.get(_META, b"null"))
        kind, keys = ("plan", _HEADER) if path.parent.name == "plans" else ("unit", _UNIT)
        odd = _odd(meta, keys) or (kind == "unit" and (_odd(meta["plan"], _HEADER) or _odd_runs(meta)))
        if odd:
            raise UserError(f"{path} is no {kind} of this store: {odd}; expected what a run writes; move it away")
        return meta

    def provenance(self, unit: str) -> dict[str, Any]:
        """Return the metadata of a unit's latest attempt; UserError if there is none.

        unit, number, design, rows (their number), plan (its header), runs (one provenance a process), and by example
        wall_s and run_of, the index in runs of the process that computed it.
        """
        published = self.unit_files(unit)
        if not published:
            raise UserError(f"no unit {unit!r}; expected one of the {len(self.unit_files())} with rows; in {self.root}")
        return self.meta(published[-1].path)

    def find_cell(self, text: str) -> Found:
        """Return the row of a cell by its id or a unique beginning; UserError: malformed, unknown or ambiguous."""
        prefix = id_prefix(text)
        hits: list[tuple[dict[str, Any], UnitFile]] = []
        for file in self.unit_files():
            if pc.any(pc.starts_with(_read(file.path, _CELL)["cell"], prefix), min_count=0).as_py():
                hits += [(row, file) for row in _read(file.path).to_pylist() if row["cell"].startswith(prefix)]
        cells = sorted({row["cell"] for row, _ in hits})
        if len(cells) != 1:
            some = f"{len(cells)} cells begin so: {', '.join(cells[:3])}, ..." if cells else "no stored row has it"
            raise UserError(f"cell {prefix}: {some}; expected the id of one stored cell; in {self.root}")
        row, file = min(hits, key=lambda hit: (hit[0]["status"] != "ok", hit[1].number))
        return Found(row, file.path, self.meta(file.path))

    def attempt(self, unit: str, design: str, provenance: Mapping[str, Any], retry: bool = False) -> Attempt:
        """Begin or take up the work on a unit of a stored plan; with `retry` failed examples of it are to do again.

        provenance: JSON of `runs.provenance.collect`, kept with each example that this process computes. UserError
        where no stored plan of that design has the unit, or where the store cannot be written.
        """
        plan = self._plan_with(unit, design)
        published = self.unit_files(unit)
        records = [r for file in published for r in records_of(_read(file.path).to_pylist(), self.meta(file.path))]
        keep = [record for record in records if is_ok(record) or not retry]
        complete = {record["example"] for record in keep} == set(plan.units[unit])
        number = published[-1].number + (not complete) if published else 0
        attempt = Attempt(self, plan, unit, number, provenance)
        attempt.recover(keep)
        for file in self.journals(unit):
            if file.number == number:
                attempt.recover(journal.read(file.path))
        if attempt.missing:
            attempt.begin()
        return attempt

    def publish(self, unit: str, number: int, rows: pa.Table, meta: Mapping[str, Any]) -> Path:
        """Write a complete unit and remove its journals; where its file exists, that one stays. Use Attempt.publish.

        The rows are equal whoever publishes them, because the unit's id is the hash of its cells.
        """
        path = self.root / "units" / f"{unit}.{number}.parquet"
        if not path.exists():
            path = files.publish(path, _parquet(rows, meta))
        for file in self.journals(unit):
            if file.number <= number:
                with suppress(OSError):  # `make gc` lists what could not be removed
                    file.path.unlink(missing_ok=True)
        return path

    def plan_path(self, grid: str, profile: str, request: Mapping[str, Any]) -> Path:
        """Return the file of a plan, whether it is there or not."""
        return self.root / "plans" / f"{Plan.key(grid, profile, request)}.parquet"

    def _load_plan(self, path: Path) -> Plan | None:
        try:
            path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}; expected a file in a folder of a store (STORE=)"
            ) from None
        header, cells = self._header(path), _read(path)
        with _reading(path):
            return Plan(header, cells)

    def _header(self, path: Path) -> dict[str, Any]:
        header = self.meta(path)
        with _reading(path):
            expected = self.plan_path(header["grid"], header["profile"], header["request"])
        if path.name != expected.name:
            raise UserError(f"{path} has another plan's name; expected {expected.name}; rename it, or delete it")
        return header

    def _plan_with(self, unit: str, design: str) -> Plan:
        if unit not in self._plan_of:  # a unit's id fixes its cells: what was read once stays true
            plans = [self._load_plan(path) for path in self.plan_files()]
            self._plan_of = {name: plan for plan in plans if plan for name in plan.units}
        plan = self._plan_of.get(unit)
        if plan is None or plan.design != design:
            raise UserError(
                f"unit {unit!r} of design {design[:12]} is in no plan; expected a stored one; in {self.root}"
            )
        return plan


def _first_by_plan(plan: Plan, tables: Sequence[pa.Table]) -> pa.Table:
    table = pa.concat_tables(tables)
    # a stable order: among rows of one status that of reading stays, which is by attempt
    order = pc.sort_indices(table["status"], sort_keys=[("", "descending")])  # "ok" > "failed"
    first = pc.index_in(plan.cells["cell"], value_set=table["cell"].take(order))
    return table.take(order.take(first.drop_null()))


def _odd(meta: Any, keys: Mapping[str, type]) -> str:
    """What metadata lack, or have of another type; "" where they are as a run writes them."""
    if not isinstance(meta, dict):
        return "it has no metadata"
    odd = [key for key, kind in keys.items() if not isinstance(meta.get(key), kind)]
    return f"its metadata have no {odd[0]!r} that is a {keys[odd[0]].__name__}" if odd else ""


def _odd_runs(meta: Mapping[str, Any]) -> str:
    runs, run_of, wall_s = meta["runs"], meta["run_of"], meta["wall_s"]
    whole = run_of.keys() == wall_s.keys() and all(isinstance(run, dict) for run in runs)
    whole &= all(isinstance(k, int) and 0 <= k < len(runs) for k in run_of.values())
    whole &= all(isinstance(seconds, int | float) for seconds in wall_s.values())
    return "" if whole else "its metadata do not say which process computed an example, and in what time"


def _parquet(table: pa.Table, meta: Mapping[str, Any]) -> bytes:
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({_META: json.dumps(meta, allow_nan=False)})
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def _read(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    with _reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read(schema and schema.names, use_threads=False).replace_schema_metadata(None)
    if schema is not None and table.schema != schema:
        raise UserError(f"cannot use {path}: other columns than those of runs/schema.py; move it away and run again")
    return table


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"cannot read {path}: {reason}; expected a whole parquet file of this store; delete it and run again"
        ) from error
