"""One page that holds the whole study: verdicts, figures with the rows behind them, tables, where the rows come from.

It asks for nothing: style, script, figures and downloads are inside, and its policy lets no browser load anything else.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis import figures
from analysis.computed import git_revision, grids
from analysis.scores import by_task
from analysis.study import SYNTHETIC, Study, Table, numbers
from analysis.tables import estimates
from analysis.tables_study import ON_TASKS, TABLES, rows_of, spoken, tables
from analysis.text import sentence, three
from runs.lock import read_lock

INTERVAL = re.compile(r" \[(\S+), (\S+)\]")
PAGE = Path(__file__).parent / "page"
SIGNS = {"SUPPORTED": "✓", "KILLED": "✗", "INCONCLUSIVE": "≈", "NOT_EVALUATED": "○"}
BY_TASK = Table(ON_TASKS, "Every arm on every task: answers, mean scores, budget kept, signals", by_task)
ELSEWHERE = ("verdicts", "grids", "deviations")  # these have a form of their own on the page
TITLES = {"ctx_tokens": "tokens"}


def page(study: Study) -> bytes:
    """The page as HTML; equal rows, code and LOCK give equal bytes. Whatever stands in a row is shown, never obeyed."""
    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined)
    environment.filters["cell"] = lambda value: "–" if value != value else three(value)  # NaN alone differs from itself
    style, script = ((PAGE / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    every = tuple(study.judged)
    return (
        environment.get_template("report.html")
        .render(
            style=style,
            script=script,
            policy=_policy(style, script),
            claims=[_claim(study, name) for name in every],
            pictures=[_picture(study, name) for name in figures.PICTURES],
            tables=[_table(study, name, table) for name, table in _tables().items()],
            grids=grids(study).to_dict("records"),
            deviations=_table(study, "deviations", TABLES["deviations"]),
            lacking=[f"{name}: {mark}" for name in every for mark in study.marks([name]) if mark != SYNTHETIC],
            synthetic=study.synthetic,
            profile=study.profile,
            request={name: value for name, value in study.request.items() if value},
            revision=git_revision(study.root),
            lock=read_lock(study.root),
            rules=study.rules,
        )
        .encode()
    )


def _policy(style: str, script: str) -> str:
    """What a browser may do with the page: show the figures inside, run this style and this script, and nothing else."""
    allowed = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (style, script)
    ]
    return f"default-src 'none'; img-src data:; style-src {allowed[0]}; script-src {allowed[1]}; base-uri 'none'"


def _claim(study: Study, claim_id: str) -> dict[str, Any]:
    """A claim's section: its verdict as JSON has it, and what is made of it."""
    result = study.result(claim_id)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    return {
        "result": result,
        "sign": SIGNS[result["verdict"]],
        "sentence": sentence(result),
        "estimates": [INTERVAL.sub("\u00a0[\\1,\u00a0\\2]", line) for line in estimates(result)],  # not to be broken
        "strata": _table(study, claim_id, tables(study.registry)[claim_id]),
        "beside": _shown(f"beside-{claim_id}", "Beside, not judged", _beside(result)),
        "picture": _picture(study, claim_id),
        "json": _data(text.encode(), "application/json"),
        "lacks": study.lacks([claim_id]),
    }


def _beside(result: Mapping[str, Any]) -> pd.DataFrame:
    """What is measured and not judged, but for what is of a list; what its name means."""
    every = numbers(result)
    judged = {name for stratum in result["strata"] for name in stratum["measures"]}
    own = every[(every["of"] == "") & ~every["name"].isin(judged)].drop(columns="of")
    meant = [result["words"].get(str(name).partition(" ")[0], "") for name in own["name"]]
    return own.assign(name=own["name"].map(spoken), meaning=meant)


def _picture(study: Study, name: str) -> dict[str, Any]:
    picture = figures.pictures(study.registry)[name]
    points = figures.points_of(study, picture)
    (image,) = figures.drawn(study, picture, points, ("svg",))
    return {
        "name": name,
        "caption": picture.caption,
        "image": _data(image, "image/svg+xml"),
        "rows": len(points),
        "csv": _data(points.to_csv(index=False).encode(), "text/csv"),
    }


def _tables() -> dict[str, Table]:
    return {"by-task": BY_TASK} | {name: table for name, table in TABLES.items() if name not in ELSEWHERE}


def _table(study: Study, name: str, table: Table) -> dict[str, Any]:
    lacks = study.lacks(table.claims)
    return _shown(f"table-{name}", table.caption, rows_of(study, table)) | {
        "lacks": lacks,
        "marks": study.marks(table.claims),
    }


def _shown(name: str, caption: str, rows: pd.DataFrame) -> dict[str, Any]:
    numeric = [pd.api.types.is_numeric_dtype(rows[column]) for column in rows]
    return {
        "name": name,
        "caption": caption,
        "columns": [TITLES.get(str(column), str(column)).replace("_", " ") for column in rows],
        "numeric": numeric,
        "rows": list(rows.itertuples(index=False)),
        "lacks": [],
        "marks": [],
    }


def _data(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
