"""The columns of a row, in one place for each kind of grid, and the check that every row passes before it is written."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from runs.errors import UserError

STATUS = ("ok", "failed")


@dataclass(frozen=True)
class RowSchema:
    """The columns of a kind of rows; `optional` names those that may be null in a row with status "ok" (null = undefined, never NaN)."""

    arrow: pa.Schema
    optional: frozenset[str]

    def checked(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with plain Python values in column order; UserError naming column and cell where a row does not fit."""
        return [self._row(row) for row in rows]

    def failed(self, planned: Mapping[str, Any], message: str) -> dict[str, Any]:
        """Make the row of a planned cell that could not be computed: what the plan knows, the message, and nulls."""
        return {name: planned.get(name) for name in self.arrow.names} | {"status": "failed", "message": message}

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        where = f"cell {row.get('cell')!r}"
        if wrong := row.keys() ^ set(self.arrow.names):
            kind = "unknown" if wrong & row.keys() else "missing"
            raise UserError(f"{kind} column {min(wrong)!r}; expected exactly the columns of runs/schema.py; in {where}")
        if row["status"] not in STATUS:
            raise UserError(f"status is {row['status']!r}; expected one of {', '.join(STATUS)}; in {where}")
        return {field.name: self._value(field, row, where) for field in self.arrow}

    def _value(self, field: pa.Field, row: Mapping[str, Any], where: str) -> Any:
        value = row[field.name]
        if value is None:
            must = not field.nullable or (field.name not in self.optional if row["status"] == "ok" else field.name == "message")
            if must:
                raise UserError(f"column {field.name} is null; expected a value where status is {row['status']}; in {where}")
            return None
        convert = _CONVERT[field.type]
        plain = convert(value)
        if plain is None:
            raise UserError(f"column {field.name} is {value!r}; expected {_EXPECTED[field.type]} or null; in {where}")
        return plain


def _float(value: Any) -> float | None:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return None
        value = float(value)
    return value if math.isfinite(value) else None


def _int(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not -(2**63) <= value < 2**63:
        return None
    return int(value)


def _bool(value: Any) -> bool | None:
    return bool(value) if isinstance(value, bool | np.bool_) else None


def _text(value: Any) -> str | None:
    # a lone surrogate has no UTF-8 and would be found only when the unit is published
    return value if type(value) is str and value.encode("utf-8", "replace").decode() == value else None


_CONVERT = {pa.float64(): _float, pa.int64(): _int, pa.bool_(): _bool, pa.string(): _text}
_EXPECTED = {pa.float64(): "a finite number", pa.int64(): "a 64-bit integer", pa.bool_(): "true or false", pa.string(): "text (Unicode)"}

_IDENTITY = [pa.field(name, pa.string(), nullable=False) for name in ("cell", "unit", "example", "document", "model", "task", "design", "status")]


def _fields(kind: pa.DataType, names: str) -> list[pa.Field]:
    return [pa.field(name, kind) for name in names.split()]


# One (budget, layer, query head, decode step) of one document: the error of one draw and all that was said about it beforehand.
# n_tokens: cached tokens at that step; budget: fraction, budget_tokens: tokens; n_kept: realised by this KV head's draw; exact: nothing was evicted;
# out_norm: ||o_hat||, full_norm: ||o||; var_true: V with the true p and o; undefined: why a radius is null; err_topk: top-k at n_kept tokens.
REPLAY = RowSchema(
    pa.schema(
        [
            *_IDENTITY,
            *_fields(pa.string(), "message"),
            *_fields(pa.int64(), "ctx_tokens"),
            *_fields(pa.float64(), "budget"),
            *_fields(pa.int64(), "layer kv_head head step n_tokens budget_tokens"),
            *_fields(pa.bool_(), "budget_raised"),
            *_fields(pa.float64(), "expected_kept"),
            *_fields(pa.int64(), "n_kept"),
            *_fields(pa.float64(), "err out_norm full_norm var_hat var_true var_anticipated max_term"),
            *_fields(pa.float64(), "radius_empirical_bernstein radius_normal radius_conservative radius_assisted"),
            *_fields(pa.bool_(), "exact"),
            *_fields(pa.string(), "undefined"),
            *_fields(pa.float64(), "err_topk err_uniform entropy margin"),
        ]
    ),
    frozenset("message undefined radius_empirical_bernstein radius_normal radius_conservative radius_assisted max_term var_hat entropy margin".split()),
)

SCHEMAS = {"replay": REPLAY}


def row_schema(kind: str) -> RowSchema:
    """Return the schema of a grid's kind; UserError where no rows of that kind can be stored."""
    if kind not in SCHEMAS:
        raise UserError(f"rows of kind {kind!r} have no schema; expected one of {', '.join(SCHEMAS)}; see runs/schema.py")
    return SCHEMAS[kind]
