"""make report: one self-contained HTML page of everything that stored rows say, no torch needed. python -m scripts.report"""

import argparse
import sys

from analysis.frame import write
from analysis.judge import OUT
from analysis.report import page
from analysis.study import study
from analysis.text import shown
from runs.registry import ROOT
from scripts._cli import run, settings


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever is missing, which the page says; 2 where rows, LOCK or settings do not fit."""
    argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__).parse_args(argv)
    chosen = settings()
    chosen.require_store()
    found = study(chosen.profile, chosen.request, chosen.store)
    print(f"{shown(write(ROOT / OUT / 'report.html', page(found)))}; open it in a browser, it needs no network")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
