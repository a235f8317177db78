"""make figures: every figure, table and number of the paper from stored rows, no torch needed. python -m scripts.figures"""

import argparse
import sys

from analysis import figures, latex
from analysis.frame import write
from analysis.study import study
from runs.registry import ROOT
from scripts._cli import run, settings


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever is missing, which each file says; 2 where rows, LOCK or settings do not fit."""
    parser = argparse.ArgumentParser(prog="python -m scripts.figures", description=__doc__)
    parser.parse_args(argv)
    chosen = settings()
    chosen.require_store()
    found = study(chosen.profile, chosen.request, chosen.store)
    written = [write(ROOT / "paper" / "figures" / name, image) for name, image in figures.files(found)]
    written += [write(ROOT / "paper" / name, text) for name, text in latex.files(found)]
    for line in [*found.marks(tuple(found.judged)), *found.lacks(tuple(found.judged))]:
        print(line)
    print(f"{len(written)} files in paper/figures, paper/tables, paper/numbers")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
