"""For notebooks: open a study, and look at its verdicts, figures and tables. Everything shown says what it is made of."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pandas as pd

from analysis import figures
from analysis.study import Study, study
from analysis.tables_study import rows_of, tables
from analysis.text import render, three
from runs.errors import UserError


@dataclass(frozen=True)
class Shown:
    """What a notebook displays, as HTML; printed elsewhere it is its own text."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def opened(*claims: str) -> Study:
    """Judge some claims from the rows of STORE (runs/store by default) under PROFILE (laptop by default).

    Raises UserError where STORE is no folder, else as `study`.
    """
    store = os.environ.get("STORE")
    if store and not Path(store).is_dir():
        raise UserError(f"STORE={store}: no such folder; expected one that an earlier run has filled")
    return study(os.environ.get("PROFILE") or "laptop", store=Path(store) if store else None, only=claims)


def verdict(of: Study, claim_id: str) -> Shown:
    """The verdict as `make judge-N` prints it."""
    return Shown(f"{_marks(of, (claim_id,))}<pre>{escape(render(of.result(claim_id)))}</pre>")


def figure(of: Study, name: str) -> Shown:
    """A figure by its name in analysis/figures.py, with its caption."""
    picture = figures.pictures(of.registry)[name]
    (image,) = figures.drawn(of, picture, figures.points_of(of, picture), ("svg",))
    drawing = image[image.index(b"<svg") :].decode()
    return Shown(f"{_marks(of, picture.claims)}{drawing}<p>{escape(picture.caption)}</p>")


def table(of: Study, name: str) -> Shown:
    """A table by its name in analysis/tables_study.py."""
    made = tables(of.registry)[name]
    rows, lacks = rows_of(of, made), "; ".join(of.lacks(made.claims))
    body = f"<p>{escape(lacks)}</p>" if rows.empty else _html(rows)
    return Shown(f"<p>{escape(made.caption)}</p>{_marks(of, made.claims)}{body}")


def _html(rows: pd.DataFrame) -> str:
    return rows.to_html(index=False, float_format=three, border=0)


def _marks(of: Study, claims: Sequence[str]) -> str:
    return "".join(f"<p><b>{escape(mark)}</b></p>" for mark in of.marks(claims))
