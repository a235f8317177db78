"""make readme: write README's verdict table from analysis/published. --check: exit 1 where it is stale."""

import argparse
import sys

from analysis.frame import write
from analysis.tables import PUBLISHED, replaced, verdicts
from runs.digests import read_text
from runs.registry import ROOT, load
from scripts._cli import run


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 1 where --check finds another table than the published verdicts give."""
    parser = argparse.ArgumentParser(prog="python -m scripts.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where README.md is stale")
    check = parser.parse_args(argv).check
    path = ROOT / "README.md"
    old = read_text(ROOT, path.name)
    new = replaced(old, verdicts(load(), ROOT / PUBLISHED))
    if check and new != old:
        print("README.md: its verdict table is stale; make readme writes it from analysis/published")
        return 1
    if new != old:
        write(path, new.encode())
    print("README.md: its verdict table is that of analysis/published")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
