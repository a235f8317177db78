"""Rows of a plan as a data frame."""

import hashlib
from collections.abc import Collection

import pandas as pd

from runs.cells import Plan
from runs.store import Store


def load(store: Store, plan: Plan, designs: Collection[str]) -> pd.DataFrame:
    """The stored rows of a plan in its order; a null number is NaN here. UserError where a file is damaged."""
    return store.rows(plan, designs).to_pandas()


def digest(frame: pd.DataFrame) -> str:
    """SHA-256 over every value of the rows: equal rows, equal digest."""
    hashed = pd.util.hash_pandas_object(frame, index=False).to_numpy()
    return hashlib.sha256(",".join(frame.columns).encode() + hashed.tobytes()).hexdigest()
