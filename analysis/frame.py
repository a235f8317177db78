"""What judging reads and writes: the rows of a plan as a data frame, and files that appear whole or not at all."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

import pandas as pd

from runs.cells import Plan
from runs.errors import UserError
from runs.store import Store


def load(store: Store, plan: Plan, designs: Collection[str]) -> pd.DataFrame:
    """The stored rows of a plan in its order; a null number is NaN here. UserError where a file is damaged."""
    return store.rows(plan, designs).to_pandas()


def digest(frame: pd.DataFrame) -> str:
    """SHA-256 over every value of the rows: equal rows, equal digest."""
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
