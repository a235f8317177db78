"""What judging reads and writes: the rows of a plan as a data frame, and files that appear whole or not at all."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from runs.cells import Plan
from runs.errors import UserError
from runs.prereg import accept
from runs.registry import Claim, Registry
from runs.schema import STATUS
from runs.store import Store


def load(store: Store, plan: Plan, designs: Collection[str]) -> pd.DataFrame:
    """The stored rows of a plan in its order; a null number is NaN here. Wrong labels are those that the plan knows.

    UserError where a file is damaged, or holds a value that no row may have (runs/schema.py).
    """
    table = store.rows(plan, designs)
    for field in table.schema:
        if pa.types.is_floating(field.type):
            odd = pc.invert(pc.is_finite(table[field.name]))
            _require(store, table, field.name, odd, "expected a finite number, or null where it is undefined")
    odd = pc.invert(pc.is_in(table["status"], value_set=pa.array(STATUS)))
    _require(store, table, "status", odd, f"expected one of {', '.join(STATUS)}")
    frame = table.to_pandas()
    if "wrong_label" in plan.cells.column_names:  # a list of these may be given after the answers were
        told = dict(zip(plan.cells["cell"].to_pylist(), plan.cells["wrong_label"].to_pylist(), strict=True))
        frame["wrong_label"] = frame["cell"].map(told)
    return frame


def whole(store: Store, plan: Plan, designs: Collection[str]) -> pd.DataFrame:
    """As load; a plan whose cells are of other documents than its header counts was cut, and is refused."""
    counted, stored = plan.header["documents"].get("n"), pc.count_distinct(plan.cells["document"]).as_py()
    if counted != stored:
        path = store.plan_path(*(plan.header[key] for key in ("grid", "profile", "request")))
        raise UserError(
            f"{path}: its cells are of {stored} documents, its header says {counted}; expected as many; "
            "delete the file, and plan again: the rows stay"
        )
    return load(store, plan, designs)


def calibrated(
    rows: pd.DataFrame, plan: Plan, claim: Claim, store: Store, registry: Registry, root: Path
) -> pd.DataFrame:
    """The rows of a claim's plan, and behind them those of claim.params.calibration_task in the grid that the claim is
    calibrated on, as far as they are stored: under the same profile and model, nothing else changed.
    """
    if not claim.calibration:
        return rows
    request = {"model": plan.header["request"]["model"], "data": None, "ctx": None, "args": None}
    other = store.read_plan(claim.calibration, plan.header["profile"], request)
    if other is None:
        return rows
    lent = whole(store, other, accept(root, registry.owner(claim.calibration), registry).grids)
    return pd.concat([rows, lent[lent["task"] == claim.params["calibration_task"]]], ignore_index=True)


def _require(store: Store, table: pa.Table, column: str, odd: pa.ChunkedArray, expected: str) -> None:
    """Refuse a table with an odd value in a column, naming the first cell that has one, and its file."""
    wrong = table.filter(odd)
    if wrong.num_rows:
        cell, value = wrong["cell"][0].as_py(), wrong[column][0].as_py()
        where = store.find_cell(cell).path
        raise UserError(f"column {column} is {value!r} in cell {cell}; {expected}; in {where}: delete it and run again")


def code_versions(store: Store, plan: Plan) -> int:
    """How many versions of the measuring code the stored rows of a plan come from."""
    seen = set()
    for file in store.unit_files():
        if file.unit in plan.units:
            for run in store.meta(file.path)["runs"]:
                seen.add(run.get("code") or (run.get("git") or {}).get("revision"))
    return len(seen)


def digest(frame: pd.DataFrame) -> str:
    """SHA-256 over every value of the rows but wall_s, which is no part of the result: equal rows, equal digest."""
    frame = frame.drop(columns="wall_s", errors="ignore")
    hashed = pd.util.hash_pandas_object(frame, index=False).to_numpy()
    return hashlib.sha256(",".join(frame.columns).encode() + hashed.tobytes()).hexdigest()


def write(path: Path, data: bytes) -> Path:
    """Give a file its content in one step. Raises UserError where that is not possible."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_bytes(data)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; expected room and write permission") from None
    return path
