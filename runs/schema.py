"""The columns of a row, in one place for each kind of grid, and the check every row passes before it is written."""

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
    """The columns of one kind of rows; `optional`: those that may be null (undefined, never NaN) in an "ok" row."""

    arrow: pa.Schema
    optional: frozenset[str]

    def checked(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows as plain Python values in column order; UserError naming column and cell where one is wrong.

        Numpy scalars become Python ones; an integer is a float where the column is, but never the other way round.
        """
        return [self._row(row) for row in rows]

    def failed(self, planned: Mapping[str, Any], message: str) -> dict[str, Any]:
        """Make the row of a planned cell that could not be computed: what the plan knows, the message, and nulls."""
        return {name: planned.get(name) for name in self.arrow.names} | {"status": "failed", "message": message}

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        where = f"in cell {row.get('cell')!r}"
        if wrong := row.keys() ^ set(self.arrow.names):
            kind = "unknown" if wrong & row.keys() else "missing"
            raise UserError(f"{kind} column {min(wrong)!r}; expected exactly the columns of runs/schema.py; {where}")
        if row["status"] not in STATUS:
            raise UserError(f"column status is {row['status']!r}; expected one of {', '.join(STATUS)}; {where}")
        return {field.name: self._value(field, row, where) for field in self.arrow}

    def _value(self, field: pa.Field, row: Mapping[str, Any], where: str) -> Any:
        value = row[field.name]
        if value is None:
            needed = field.name not in self.optional if row["status"] == "ok" else field.name == "message"
            if needed or not field.nullable:
                raise UserError(f"column {field.name} is null; expected a value as status is {row['status']}; {where}")
            return None
        convert, expected = _PLAIN[field.type]
        plain = convert(value)
        if plain is None:
            raise UserError(f"column {field.name} is {value!r}; expected {expected} or null; {where}")
        return plain


def _float(value: Any) -> float | None:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return None
        value = float(value)
    return value if math.isfinite(value) else None


def _int(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value) if -(2**63) <= int(value) < 2**63 else None


def _bool(value: Any) -> bool | None:
    return bool(value) if isinstance(value, bool | np.bool_) else None


def _text(value: Any) -> str | None:
    # a lone surrogate has no UTF-8: it would be found only when the unit is published
    return value if type(value) is str and value.encode("utf-8", "replace").decode() == value else None


_PLAIN = {
    pa.float64(): (_float, "a finite number"),
    pa.int64(): (_int, "a 64-bit integer"),
    pa.bool_(): (_bool, "true or false"),
    pa.string(): (_text, "Unicode text"),
}
_IDENTITY = ["cell", "unit", "example", "document", "model", "task", "design", "status"]
_RADII = ["radius_empirical_bernstein", "radius_normal", "radius_conservative", "radius_assisted"]


def _fields(kind: pa.DataType, names: str) -> list[pa.Field]:
    return [pa.field(name, kind) for name in names.split()]


# One (budget, layer, query head, decode step) of a document: the error of one draw and what was said about it before.
# n_tokens: cached at that step; budget: fraction, budget_tokens: tokens; n_kept: realised by this KV head's draw;
# out_norm: ||o_hat||, full_norm: ||o||; var_true: V with the true p and o; exact: nothing evicted; undefined: why a
# radius is null; err_topk: top-k at n_kept tokens.
REPLAY = RowSchema(
    pa.schema(
        [
            *(pa.field(name, pa.string(), nullable=False) for name in _IDENTITY),
            *_fields(pa.string(), "message"),
            *_fields(pa.int64(), "ctx_tokens"),
            *_fields(pa.float64(), "budget"),
            *_fields(pa.int64(), "layer kv_head head step n_tokens budget_tokens"),
            *_fields(pa.bool_(), "budget_raised"),
            *_fields(pa.float64(), "expected_kept"),
            *_fields(pa.int64(), "n_kept"),
            *_fields(pa.float64(), "err out_norm full_norm var_hat var_true var_anticipated max_term"),
            *(pa.field(name, pa.float64()) for name in _RADII),
            *_fields(pa.bool_(), "exact"),
            *_fields(pa.string(), "undefined"),
            *_fields(pa.float64(), "err_topk err_uniform entropy margin"),
        ]
    ),
    frozenset([*_RADII, "message", "undefined", "var_hat", "max_term", "entropy", "margin"]),
)

# One answer: a request under an arm. arm: its name in the registration; policy: full, topk or poisson; mode: full,
# aware or agnostic; draw: 0, or 1 for a second one; prompt_tokens: context and question; answer_tokens: generated, the
# stop token included; answers, all_classes, certificate_layers: JSON lists; official, corrected: scores from 0 to 1;
# logprob: mean raw log-probability of the generated tokens; certificate...: of the request, null with the reason in
# no_certificate; cert_flagged: over a tenth undefined, ranked highest; entropy, margin: deterministic self-signals;
# expected_budget, realised_budget: fractions of n_tokens, the length at the compression; cache_bytes_before/after: of
# that prefix; wall_s: seconds of this arm, no part of the result.
_PLANNED = "arm policy mode prompt_sha256 kind"
_CERTIFICATES = "certificate certificate_assisted certificate_mean certificate_top certificate_max undefined_share"
_COMPRESSED = "expected_budget realised_budget"
_OPTIONAL = "message scorer_error all_classes certificate_layers no_certificate entropy margin"
_OPTIONAL += " n_tokens budget_tokens budget_raised"
_ANSWERED = [
    *_fields(pa.int64(), "context_tokens prompt_tokens answer_tokens"),
    *_fields(pa.bool_(), "truncated"),
    *_fields(pa.string(), "prediction stop answers all_classes metric scorer_error"),
    *_fields(pa.float64(), "official corrected logprob"),
    *_fields(pa.bool_(), "scorer_exception"),
    *_fields(pa.float64(), _CERTIFICATES),
    *_fields(pa.int64(), "cert_steps"),
    *_fields(pa.bool_(), "cert_flagged"),
    *_fields(pa.string(), "certificate_layers no_certificate"),
]
_KEPT = [
    *_fields(pa.int64(), "n_tokens budget_tokens"),
    *_fields(pa.bool_(), "budget_raised"),
    *_fields(pa.float64(), _COMPRESSED),
    *_fields(pa.int64(), "cache_bytes_before cache_bytes_after"),
]
TASKS = RowSchema(
    pa.schema(
        [
            *(pa.field(name, pa.string(), nullable=False) for name in _IDENTITY),
            *_fields(pa.string(), "message"),
            *_fields(pa.int64(), "ctx_tokens request draw"),
            *_fields(pa.float64(), "budget"),
            *_fields(pa.string(), _PLANNED),
            *_ANSWERED,
            *_fields(pa.float64(), "entropy margin"),
            *_KEPT,
            *_fields(pa.float64(), "wall_s"),
        ]
    ),
    frozenset([*_OPTIONAL.split(), *_CERTIFICATES.split(), *_COMPRESSED.split()]),
)

# One answer of a system at the end of a conversation. system: of runs/conversations.py; age: turns since what is asked
# after was said, 1 for the last; wrong_label: a list names its reference as wrong (null: no list); turns: fed; left_out:
# those there was no room for; budget: kept after each turn, 1 for full; audited: the conversation's coin; miss_steps,
# miss_steps_strict: of its poisson rows, JSON, the share of heads whose served error is above the radius of level delta
# (delta / 10), a number an answer step; replayed: of its last question's, JSON, runs/replayed.py; the rest as for TASKS.
CONVERSATIONS = RowSchema(
    pa.schema(
        [
            *(pa.field(name, pa.string(), nullable=False) for name in _IDENTITY),
            *_fields(pa.string(), "message"),
            *_fields(pa.int64(), "request age turns left_out"),
            *_fields(pa.float64(), "budget"),
            *_fields(pa.string(), "system prompt_sha256 kind"),
            *_fields(pa.bool_(), "audited wrong_label"),
            *_ANSWERED,
            *_KEPT,
            *_fields(pa.string(), "miss_steps miss_steps_strict replayed"),
            *_fields(pa.float64(), "wall_s"),
        ]
    ),
    frozenset(
        f"{_OPTIONAL} {_CERTIFICATES} {_COMPRESSED} age wrong_label miss_steps miss_steps_strict replayed".split()
    ),
)

SCHEMAS = {"replay": REPLAY, "tasks": TASKS, "conversations": CONVERSATIONS}


def row_schema(kind: str) -> RowSchema:
    """Return the schema of a grid's kind; UserError where no rows of that kind can be stored."""
    if kind not in SCHEMAS:
        raise UserError(f"rows of kind {kind!r} have no columns; expected {' or '.join(SCHEMAS)}; see runs/schema.py")
    return SCHEMAS[kind]
