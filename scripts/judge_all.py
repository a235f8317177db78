"""make judge-all: judge every claim and extension from stored rows, no torch needed. python -m scripts.judge_all"""

import argparse
import sys

from analysis.study import elsewhere
from analysis.text import sentence
from runs.registry import ROOT, load
from scripts._cli import run, settings
from scripts.judge import found_in, judged


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever the verdicts, 2 where rows, LOCK or settings do not fit."""
    argparse.ArgumentParser(prog="python -m scripts.judge_all", description=__doc__).parse_args(argv)
    chosen = settings()
    chosen.require_store()
    for claim in load(ROOT).claims.values():
        found, _ = judged(claim.id, found_in(chosen, claim))
        print(f"{claim.id:12} {claim.title:28} {sentence(found.result)}", flush=True)
        if said := elsewhere(chosen.request, found.result):
            print(f"{'':12} {said}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
