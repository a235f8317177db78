"""make explain CELL=id: one row, where it comes from, and how to compute it again. python -m scripts.explain id"""

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from runs.errors import UserError
from runs.prereg import ROOT, load
from runs.store import Found, Store
from scripts import _cli
from scripts._command import command


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row's values, files, design, code, machine, configuration and seconds; the id may be shortened."""
    parser = ArgumentParser("scripts.explain", description=__doc__)
    parser.add_argument("cell", nargs="?", help="the id, 4 to 24 hex digits; without it that of CELL=")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    cell = options.cell or os.environ.get("CELL", "").strip()
    if not cell:
        raise UserError("no cell is named; expected make explain CELL=id, an id of column cell of the rows")
    found = explanation(Store(_cli.settings().store).find_cell(cell))
    print(json.dumps(found, indent=1) if options.json else "\n".join(_lines(found)))
    return 0


def explanation(found: Found) -> dict[str, Any]:
    """The row, its file, the plan it belongs to, the process that computed it, its seconds and the command."""
    row, meta = found.row, found.meta
    if row["example"] not in meta["run_of"]:
        raise UserError(f"{found.path}: its metadata have no example {row['example']!r}, which a row has; move it away")
    run = meta["runs"][meta["run_of"][row["example"]]]
    claims = [claim.id for claim in load(ROOT).claims.values() if claim.grid == meta["plan"]["grid"]]
    return {
        "row": row,
        "file": str(found.path),
        "attempt": meta["number"],
        "example_wall_s": meta["wall_s"][row["example"]],
        "plan": meta["plan"],
        "run": run,
        "again": _again(claims, meta["plan"], run) if claims else None,
    }


def _again(claims: Sequence[str], header: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    revision = (run.get("git") or {}).get("revision")
    checkout = f"git checkout {revision} && " if revision else ""
    return f"{checkout}{command(claims[0], header)} STORE=an_empty_folder"


def _lines(found: Mapping[str, Any]) -> list[str]:
    plan, run = found["plan"], dict(found["run"])
    git, packages, config = (run.pop(key, {}) for key in ("git", "packages", "config"))
    lines = ["row", *_pairs(found["row"])]
    lines += ["file", *_pairs({"path": found["file"], "attempt": found["attempt"]})]
    lines += ["plan", *_pairs(plan)]
    lines += ["computed by", *_pairs(run | {f"git {key}": value for key, value in git.items()})]
    lines += [*_pairs({"example_wall_s": found["example_wall_s"]})]
    lines += ["packages", *_pairs(packages), "configuration", *_pairs(config)]
    return [*lines, "compute it again (all rows of its plan, into a folder of their own)", f"    {found['again']}"]


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"    {name:<27} {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]


if __name__ == "__main__":
    sys.exit(_cli.run(main))
