"""make judge-N: judge from stored rows alone, no torch needed. python -m scripts.judge claim-1"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from analysis import figures, judge, text
from analysis.study import asked
from runs.registry import ROOT, Claim, load
from runs.store import Store
from scripts._cli import Settings, run, settings


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever the verdict, 2 where rows, LOCK or settings do not fit."""
    options = parser("python -m scripts.judge", __doc__).parse_args(argv)
    chosen = settings()
    chosen.require_store()
    if chosen.data is None:
        chosen = found_in(chosen, load(ROOT).claim(options.claim))
    show(options.claim, chosen, options.json)
    return 0


def found_in(chosen: Settings, claim: Claim) -> Settings:
    """The settings with the DATA under which the store has the rows of a claim's grid."""
    data = asked(Store(chosen.store), claim.grid, chosen.profile, chosen.request)["data"]
    return replace(chosen, data=str(data) if data else None)


def parser(program: str, says: str | None) -> argparse.ArgumentParser:
    """Arguments of the commands that end in a verdict."""
    made = argparse.ArgumentParser(prog=program, description=says)
    made.add_argument("claim", help="claim-1 .. claim-7, extension-1 .. extension-6")
    made.add_argument("--json", action="store_true", help="print the verdict as JSON alone")
    return made


def show(claim: str, chosen: Settings, as_json: bool) -> str:
    """Judge a claim, write its JSON and figure, print the verdict and return it."""
    found, drawn = judged(claim, chosen)
    cell = None if found.frame is None or found.frame.empty else str(found.frame["cell"].iloc[0])
    print(json.dumps(found.result, indent=1) if as_json else text.render(found.result, drawn, cell))
    return found.result["verdict"]


def judged(claim: str, chosen: Settings) -> tuple[judge.Judged, list[Path]]:
    """Judge a claim, write its JSON and figure; what was found, and the files of the figure."""
    found = judge.judged(claim, chosen.profile, chosen.request, chosen.store)
    drawn = figures.draw(claim, found.frame, found.result, ROOT / judge.OUT)
    if not drawn:  # a figure of other rows must not stand beside this verdict
        for path in (ROOT / judge.OUT).glob(f"{claim}.p[nd][gf]"):
            path.unlink()
    return found, drawn


if __name__ == "__main__":
    sys.exit(run(main))
