r"""Tables and numbers as LaTeX: fragments to \input, in which a value stands escaped and what is absent is said.

numbers/all.tex defines \kv{key}: the value of a key, "not evaluated" where the rows give none. It \inputs, relative to
paper/, one file a claim with \kvset{key}{value}. A stratum's estimate is <claim>.<stratum>.<measure>, with .low, .high,
.interval (both, with the estimate) and .percent; <claim>.<measure>.lowest and .highest are those over strata.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import yaml

from analysis.computed import git_revision, grids
from analysis.study import NOT_EVALUATED, SYNTHETIC, Study, numbers
from analysis.tables_study import rows_of, tables
from analysis.text import sentence, short, three
from runs.lock import read_lock

SPECIAL = {char: rf"\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "\n": " ",
}  # fmt: skip
PREAMBLE = rf"""\newcommand\kvset[2]{{\expandafter\def\csname kv@#1\endcsname{{#2}}}}
\newcommand\kv[1]{{\ifcsname kv@#1\endcsname\csname kv@#1\endcsname\else {NOT_EVALUATED}\fi}}
"""
PRINTED = re.compile("[ -~\u00a0-ÿ–—‘’“”…]")  # what the paper's font has, of which no name is sure
LONG = 45  # rows of a table that goes over pages
WIDE = 20  # characters of a text that is broken into lines
FULL = 60  # characters from which on a text gets lines, not width
MANY = 9  # columns that a page has room for
SAID = ("verdict", "title", "question", "population", "profile", "paper", "rows", "planned", "missing", "failed")


def escaped(text: str) -> str:
    """Plain text as LaTeX prints it; a character that the paper's font lacks is told by its code."""
    return "".join(SPECIAL.get(char) or (char if PRINTED.match(char) else f"U+{ord(char):04X}") for char in text)


def files(study: Study) -> Iterator[tuple[str, bytes]]:
    """Every table and number as a file of paper/: path, content."""
    for name, table in tables(study.registry).items():
        marks = study.marks(table.claims or tuple(study.judged))
        yield f"tables/{name}.tex", tabular(rows_of(study, table), study.lacks(table.claims), marks).encode()
    names = [*study.judged, "study", "design"]
    for name in study.judged:
        yield f"numbers/{name}.tex", _set(of_claim(study.result(name), name))
    yield "numbers/study.tex", _set(of_study(study))
    yield "numbers/design.tex", _set(of_design(study))
    inputs = "".join(rf"\input{{numbers/{name}}}" + "\n" for name in names)
    yield "numbers/all.tex", (PREAMBLE + inputs).encode()


def _set(values: Mapping[str, str]) -> bytes:
    return "".join(rf"\kvset{{{key}}}{{{escaped(value)}}}" + "\n" for key, value in values.items()).encode()


# ---------------------------------------------------------------- tables


def tabular(rows: pd.DataFrame, lacks: list[str], marks: list[str]) -> str:
    """A table as booktabs' tabular, or as a longtable where it is long, with what must be said of it below.

    rows empty: one line that says so, with what is missing. Numbers stand right, long texts are broken into lines.
    """
    if rows.empty:
        return "\n".join(map(escaped, lacks or ["none"])) + "\n"
    if MANY < len(rows.columns) > len(rows):
        rows = _turned(rows)
    kind = "longtable" if len(rows) > LONG else "tabular"
    spec = "".join(_columns(rows))
    lines = [rf"\begin{{{kind}}}{{@{{}}{spec}@{{}}}}", r"\toprule", _line(rows.columns), r"\midrule"]
    lines += [r"\endhead"] if kind == "longtable" else []
    lines += [_line(three(value) for value in row) for row in rows.itertuples(index=False)]
    lines += [r"\bottomrule", rf"\end{{{kind}}}"]
    lines += [rf"\par\smallskip {{\footnotesize {escaped('; '.join([*marks, *lacks]))}}}"] if marks or lacks else []
    return "\n".join(lines) + "\n"


def _turned(rows: pd.DataFrame) -> pd.DataFrame:
    """A column a row, headed by its first value, and the names of the columns in front."""
    name, *rest = rows.columns
    heads = [f"{k + 1}: {value}" if rows[name].duplicated().any() else value for k, value in enumerate(rows[name])]
    return pd.DataFrame({name: rest} | {head: [three(rows[of].iloc[k]) for of in rest] for k, head in enumerate(heads)})


def _columns(rows: pd.DataFrame) -> Iterator[str]:
    numeric = {name: pd.api.types.is_numeric_dtype(rows[name]) for name in rows}
    longest = {name: max(len(three(value)) for value in rows[name]) for name in rows}
    broken = {name: min(n, FULL) ** 0.5 for name, n in longest.items() if n > WIDE and not numeric[name]}
    room = max(0.9 - 0.1 * (len(rows.columns) - len(broken)), 0.3)  # of the line; what is not broken takes a tenth each
    for name in rows:
        if name in broken:
            width = room * broken[name] / sum(broken.values())
            yield rf">{{\raggedright\arraybackslash}}p{{{width:.2f}\linewidth}}"
        else:
            yield "r" if numeric[name] else "l"


def _line(values: Any) -> str:
    cells = (
        escaped(str(value)).replace(r"\_", r"\_\allowbreak{}") for value in values
    )  # names may be wider than a column
    return " & ".join(cells) + r" \\"


# ---------------------------------------------------------------- numbers


def of_claim(result: Mapping[str, Any], claim_id: str) -> dict[str, str]:
    """What the text may say of a claim, by key; estimates that are undefined have none."""
    found = {f"{claim_id}.{key}": _plain(result[key]) for key in SAID if result[key] is not None}
    found[f"{claim_id}.sentence"] = sentence(result)
    found[f"{claim_id}.reasons"] = "; ".join(result["reasons"]) or "every rule holds"
    found |= {f"{claim_id}.{key.replace('_', '-')}": text for key, text in result["rules"].items()}
    every = numbers(result)
    every = every[(every["of"] == "") & every["estimate"].notna()]
    names = dict(zip(every["stratum"].unique(), short(list(every["stratum"].unique())), strict=True))
    for row in every.to_dict("records"):
        key = ".".join([claim_id, slug(names[row["stratum"]]), slug(row["name"])])
        found |= {f"{key}{end}": value for end, value in _estimate(row)}
    for name, own in every.groupby("name", sort=False):
        ordered = own.sort_values("estimate", kind="stable").to_dict("records")
        for which, row in (("lowest", ordered[0]), ("highest", ordered[-1])):
            key = f"{claim_id}.{slug(str(name))}.{which}"
            found |= {f"{key}{end}": value for end, value in _estimate(row)}
    return found


def of_study(study: Study) -> dict[str, str]:
    """What the text may say of the whole: commit, LOCK, profile, and what computed each grid."""
    lock = read_lock(study.root)
    found = {"study.profile": study.profile, "study.marks": "; ".join(study.marks(tuple(study.judged)))}
    found["study.synthetic"] = SYNTHETIC if study.synthetic else ""
    found["study.commit"] = git_revision(study.root)
    found |= {"study.lock": str(lock.version), "study.lock-date": lock.date} if lock else {}
    for row in grids(study).to_dict("records"):
        found |= {f"grid.{row['grid']}.{slug(str(key))}": three(value) for key, value in row.items() if key != "grid"}
    return found


def of_design(study: Study) -> dict[str, str]:
    """Constants that were fixed beforehand: of the certified policy, of every verdict, of each claim, sizes of each grid."""
    policy = yaml.safe_load((study.root / "configs" / "policy" / "certified.yaml").read_text("utf-8"))
    groups = {"policy": policy, "rules": asdict(study.rules)}
    groups |= {f"params.{name}": study.claim(name).params for name in study.judged}
    for name, grid in study.registry.grids.items():
        if study.profile in grid.profiles:
            groups[f"design.{name}"] = {
                **grid.profiles[study.profile].sizes,
                "cells": grid.profiles[study.profile].cells,
            }
    return {f"{group}.{slug(key)}": _plain(value) for group, known in groups.items() for key, value in known.items()}


def slug(text: str) -> str:
    """A name as part of a key: budget 12.5 % is budget-12.5."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _estimate(row: Any) -> Iterator[tuple[str, str]]:
    value, low, high = row["estimate"], row["low"], row["high"]
    count = np.isnan(low) and value == round(value)
    yield "", f"{value:,.0f}" if count else f"{value:.3f}"
    if not count and abs(value) <= 1:
        yield ".percent", f"{100 * value:.1f}"
    if not np.isnan(low):
        yield from (
            (".low", f"{low:.3f}"),
            (".high", f"{high:.3f}"),
            (".interval", f"{value:.3f} [{low:.3f}, {high:.3f}]"),
        )
