"""The store: plans and finished units as parquet, attempts in journals; nothing lost, nothing doubled.

    plans/<hash of grid, profile, request>.parquet      all cells of a plan, written before the first one runs
    journal/<unit>/<number>.<k>.jsonl                   finished examples of the k-th process that works on a unit
    units/<unit>.<number>.parquet                       the unit's rows, complete; the first attempt has number 0, each later try of failed examples the next

A unit is written to a temporary file, fsynced and linked to its name: the link fails where the name exists, so the first complete attempt wins, without locks
(shared file systems lie about them) and without clocks. Readers drop doubles by cell id. Only this module reads and writes parquet.
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from runs import journal
from runs.cells import ID_LENGTH, Plan, id_prefix
from runs.errors import UserError
from runs.journal import Attempt, fsync_folder, is_ok, writing
from runs.schema import row_schema

META = b"kvcert"
NO_HARD_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
UNIT_NAME = re.compile(rf"([0-9a-f]{{{ID_LENGTH}}})\.(\d+)\.parquet")
JOURNAL_NAME = re.compile(r"(\d+)\.(\d+)\.jsonl")


@dataclass(frozen=True, order=True)
class UnitFile:
    """A published unit: `meta` in the file says where its rows come from."""

    unit: str
    attempt: int
    path: Path


@dataclass(frozen=True)
class Found:
    """A stored row with the file that holds it and that file's metadata."""

    row: dict[str, Any]
    file: UnitFile
    meta: dict[str, Any]


class Store:
    """A folder of plans, journals and units; reading never creates or changes anything in it."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._plan_of: dict[str, Plan] = {}

    # ------------------------------------------------------------------ plans
    def write_plan(self, plan: Plan) -> Path:
        """Store a plan atomically under its (grid, profile, request); an equal one is left alone, so that a complete read-only store can be used."""
        path = self._plan_path(plan.header["grid"], plan.header["profile"], plan.header["request"])
        with suppress(UserError):  # an unreadable plan is made again
            stored = self._load_plan(path)
            if stored and stored.header == plan.header and stored.cells.equals(plan.cells):
                return path
        with self._temporary(path.parent, plan.cells, plan.header) as temporary, writing(path):
            os.replace(temporary, path)
            fsync_folder(path.parent)
        return path

    def read_plan(self, grid: str, profile: str, request: Mapping[str, Any]) -> Plan | None:
        """Return the stored plan, or None; UserError where its file is damaged."""
        return self._load_plan(self._plan_path(grid, profile, request))

    def plans(self) -> list[dict[str, Any]]:
        """Return the headers of all stored plans, by grid, profile and request."""
        headers = [self.meta(path) for path in self.plan_files()]
        return sorted(headers, key=lambda header: (header["grid"], header["profile"], json.dumps(header["request"], sort_keys=True)))

    def plan_files(self) -> list[Path]:
        """Return the files that hold plans."""
        return [path for path in _listing(self.root / "plans") if path.suffix == ".parquet" and not path.name.startswith(".")]

    def _plan_path(self, grid: str, profile: str, request: Mapping[str, Any]) -> Path:
        return self.root / "plans" / f"{Plan.key(grid, profile, request)}.parquet"

    def _load_plan(self, path: Path) -> Plan | None:
        return Plan(self.meta(path), _read(path).replace_schema_metadata(None)) if path.exists() else None

    # ------------------------------------------------------------------ what is there
    def missing(self, plan: Plan, designs: Collection[str] | None = None) -> list[str]:
        """Return the units, in plan order, that lack a row; rows of `designs` count (by default the plan's own). Failed rows are not missing."""
        have = self._winners(plan, designs, ["cell", "status"])[0]
        absent = pc.invert(pc.is_in(plan.cells["cell"], value_set=have["cell"]))
        return plan.cells["unit"].filter(absent).unique().to_pylist()

    def failing(self, plan: Plan, designs: Collection[str] | None = None) -> list[str]:
        """Return the units, in plan order, that hold failed rows: `attempt(..., retry=True)` tries those examples again."""
        have = self._winners(plan, designs, ["cell", "status"])[0]
        failed = have["cell"].filter(pc.not_equal(have["status"], "ok"))
        return plan.cells["unit"].filter(pc.is_in(plan.cells["cell"], value_set=failed)).unique().to_pylist()

    def counts(self, plan: Plan, designs: Collection[str] | None = None) -> dict[str, int]:
        """Count the plan's cells: done, missing, failed; and `refused`, those of the missing that have rows of another design."""
        have, refused = self._winners(plan, designs, ["cell", "status"])
        done = pc.sum(pc.equal(have["status"], "ok"), min_count=0).as_py()
        return {"done": done, "missing": plan.cells.num_rows - have.num_rows, "failed": have.num_rows - done, "refused": refused}

    def rows(self, plan: Plan, designs: Collection[str]) -> pa.Table:
        """Return the rows of planned cells in plan order, one a cell ("ok" before failed, then the earlier attempt); UserError where all are of other designs."""
        schema = row_schema(plan.header["kind"]).arrow
        table, refused = self._winners(plan, designs, schema.names)
        if refused and not table.num_rows:
            raise UserError(
                f"all {refused:,} rows of grid {plan.header['grid']} are of another design than the accepted ones; expected "
                f"{' or '.join(sorted(design[:12] for design in designs))} (prereg/LOCK, prereg/DEVIATIONS.md); in {self.root}"
            )
        return table

    def _winners(self, plan: Plan, designs: Collection[str] | None, columns: list[str]) -> tuple[pa.Table, int]:
        designs = {plan.design} if designs is None else set(designs)
        schema = row_schema(plan.header["kind"]).arrow
        own: list[UnitFile] = []
        foreign: list[UnitFile] = []
        for file in self.unit_files():
            (own if file.unit in plan.units and plan.design in designs else foreign).append(file)
        empty = pa.schema([schema.field(name) for name in columns]).empty_table()
        table = pa.concat_tables([empty, *(_read(file.path, columns, schema) for file in own)])
        if pc.count_distinct(table["cell"]).as_py() >= plan.cells.num_rows:
            return _first_by_plan(plan, table), 0
        # cells may also stand in units of an accepted older design, or of another profile that cuts its units differently
        accepted = [file for file in foreign if self.meta(file.path)["design"] in designs]
        table = _first_by_plan(plan, pa.concat_tables([table, *(_read(file.path, columns, schema) for file in accepted)]))
        others = [_read(file.path, ["cell"], schema)["cell"].combine_chunks() for file in foreign if file not in accepted]
        if not others:
            return table, 0
        wanted = plan.cells["cell"].filter(pc.invert(pc.is_in(plan.cells["cell"], value_set=table["cell"])))
        return table, pc.sum(pc.is_in(wanted, value_set=pa.concat_arrays(others)), min_count=0).as_py()

    def unit_files(self) -> list[UnitFile]:
        """Return all published units, by unit and attempt; other names in the folder (temporary files) are no units."""
        named = ((UNIT_NAME.fullmatch(path.name), path) for path in _listing(self.root / "units"))
        return sorted(UnitFile(match[1], int(match[2]), path) for match, path in named if match)

    def meta(self, path: Path) -> dict[str, Any]:
        """Return what is written beside the rows of a plan or a unit; UserError where the file is damaged."""
        with _reading(path):
            return json.loads(pq.read_metadata(path).metadata[META])

    def provenance(self, unit: str) -> dict[str, Any]:
        """Return the metadata of a unit's latest attempt: design, plan, `runs` (one per process), `run_of` and `wall_s` by example; UserError if there is none."""
        files = [file for file in self.unit_files() if file.unit == unit]
        if not files:
            raise UserError(f"unit {unit!r} has no rows; expected one of the {len(self.unit_files())} units in {self.root}")
        return self.meta(files[-1].path)

    def find_cell(self, text: str) -> Found:
        """Return the row of a cell named by its id or a unique beginning of it; UserError where that is malformed, unknown or ambiguous."""
        prefix = id_prefix(text)
        hits: list[tuple[dict[str, Any], UnitFile]] = []
        for file in self.unit_files():
            table = _read(file.path)
            hits += [(row, file) for row in table.filter(pc.starts_with(table["cell"], prefix)).to_pylist()]
        cells = sorted({row["cell"] for row, _ in hits})
        if len(cells) != 1:
            some = f"{len(cells)} cells begin so: {', '.join(cells[:3])}" if cells else "no row has it"
            raise UserError(f"cell {prefix}: {some}; expected the id of one stored cell; in {self.root}")
        row, file = min(hits, key=lambda hit: (hit[0]["status"] != "ok", hit[1].attempt))
        return Found(row, file, self.meta(file.path))

    # ------------------------------------------------------------------ attempts
    def attempt(self, unit: str, design: str, provenance: Mapping[str, Any], retry: bool = False) -> Attempt:
        """Begin or take up the work on a unit of a stored plan; with `retry` the failed examples of a published unit are to do again.

        provenance: JSON (`runs.provenance.collect`), kept for each example that THIS process computes. UserError where no stored plan of that design has
        the unit, or where the store cannot be written.
        """
        plan = self._plan_with(unit, design)
        published = [file for file in self.unit_files() if file.unit == unit]
        records = [record for file in published for record in self._published_records(file) if not retry or is_ok(record["rows"])]
        complete = len({record["example"] for record in records}) == len(plan.units[unit])
        number = 0 if not published else published[-1].attempt + (not complete)
        attempt = Attempt(self, plan, unit, number, provenance)
        attempt.recover(records)
        for path in self.journals(unit):
            if path.name.startswith(f"{number}."):
                attempt.recover(journal.read(path))
        if attempt.missing:
            attempt.open_journal()
        return attempt

    def publish(self, attempt: Attempt, rows: pa.Table, records: Sequence[Mapping[str, Any]]) -> Path:
        """Write the unit, link it to its name and remove its journals; where the name exists an equal unit was published before, and stays. Called by `Attempt`."""
        target = self._unit_path(attempt.unit, attempt.number)
        if not target.exists():
            with self._temporary(target.parent, rows, _unit_meta(attempt, records)) as temporary, writing(target):
                target = self._link(temporary, target, attempt)
                fsync_folder(target.parent)
        for path in self.journals(attempt.unit):
            if int(path.name.split(".")[0]) <= attempt.number:
                with suppress(OSError):  # `make gc` lists journals that could not be removed
                    path.unlink(missing_ok=True)
        with suppress(OSError):  # another process is writing there
            self.journal_folder(attempt.unit).rmdir()
        return target

    def journal_folder(self, unit: str) -> Path:
        """Return the folder of a unit's journals."""
        return self.root / "journal" / unit

    def journals(self, unit: str) -> list[Path]:
        """Return the journals of a unit, the earlier first."""
        named = ((JOURNAL_NAME.fullmatch(path.name), path) for path in _listing(self.journal_folder(unit)))
        return [path for _, path in sorted(((int(match[1]), int(match[2])), path) for match, path in named if match)]

    def _link(self, temporary: Path, target: Path, attempt: Attempt) -> Path:
        try:
            os.link(temporary, target)
        except FileExistsError:
            return target
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            number = attempt.number
            while target.exists():
                number += 1
                target = self._unit_path(attempt.unit, number)
            os.rename(temporary, target)  # a race between the two lines replaces a complete unit by an equal one
        return target

    def _unit_path(self, unit: str, number: int) -> Path:
        return self.root / "units" / f"{unit}.{number}.parquet"

    def _plan_with(self, unit: str, design: str) -> Plan:
        if unit not in self._plan_of:  # a unit's id fixes its cells, so what was read once stays true
            plans = [self._load_plan(path) for path in self.plan_files()]
            self._plan_of = {name: plan for plan in plans if plan for name in plan.units}
        plan = self._plan_of.get(unit)
        if plan is None or plan.design != design:
            raise UserError(f"no stored plan of design {design[:12]} has unit {unit!r}; expected the plan to be written first; in {self.root}")
        return plan

    def _published_records(self, file: UnitFile) -> list[dict[str, Any]]:
        meta, rows = self.meta(file.path), {}
        for row in _read(file.path).to_pylist():
            rows.setdefault(row["example"], []).append(row)
        return [
            {"example": example, "wall_s": meta["wall_s"][example], "run": meta["runs"][meta["run_of"][example]], "rows": mine}
            for example, mine in rows.items()
        ]

    @contextmanager
    def _temporary(self, folder: Path, table: pa.Table, meta: Mapping[str, Any]) -> Iterator[Path]:
        sink = pa.BufferOutputStream()
        table = table.replace_schema_metadata({META: json.dumps(meta, sort_keys=True, allow_nan=False)})
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        path = folder / f".{secrets.token_hex(8)}.tmp"
        try:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as file:
                    file.write(sink.getvalue())
                    file.flush()
                    os.fsync(file.fileno())
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _unit_meta(attempt: Attempt, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    runs: list[Mapping[str, Any]] = []
    for record in records:
        if record["run"] not in runs:
            runs.append(record["run"])
    return {
        "unit": attempt.unit,
        "attempt": attempt.number,
        "design": attempt.plan.design,
        "plan": {key: attempt.plan.header[key] for key in ("grid", "kind", "profile", "request", "model", "registered")},
        "runs": runs,
        "run_of": {record["example"]: runs.index(record["run"]) for record in records},
        "wall_s": {record["example"]: record["wall_s"] for record in records},
    }


def _first_by_plan(plan: Plan, table: pa.Table) -> pa.Table:
    # stable: among equal status the order of reading stays, which is by attempt
    order = pc.sort_indices(table["status"], sort_keys=[("", "descending")])  # "ok" > "failed"
    first = pc.index_in(plan.cells["cell"], value_set=table["cell"].take(order))
    return table.take(order.take(first.drop_null()))


def _read(path: Path, columns: list[str] | None = None, schema: pa.Schema | None = None) -> pa.Table:
    with _reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read(columns, use_threads=False).replace_schema_metadata(None)
    if schema is not None and table.schema != pa.schema([schema.field(name) for name in columns or schema.names]):
        raise UserError(f"{path} has other columns than this version stores; expected those of runs/schema.py; move it away and run again")
    return table


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}; expected a whole parquet file of this store; delete it and run again") from error


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {folder}: {os.strerror(error.errno)}; expected a folder that this store may use (STORE=)") from error
