"""make verify: does everything that was registered still stand, or stand with declared deviations?"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from runs.prereg import IDS, ROOT, accept, load, read_lock, verify
from scripts import _cli


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each claim, or for each file in which it differs; exit 2 where anything differs."""
    ArgumentParser("scripts.verify", description=__doc__).parse_args(argv)
    mismatches = verify(ROOT)
    differing = {mismatch.claim for mismatch in mismatches}
    for mismatch in mismatches:
        print(f"MISMATCH {mismatch.message}")
    registry = load(ROOT)
    for claim in IDS:
        if not differing & {claim, "all"}:
            print(claim, "ok, with deviations" if accept(ROOT, claim, registry).deviations else "ok")
    lock = read_lock(ROOT)
    assert lock is not None  # verify has read it
    print(f"LOCK version {lock.version} of {lock.date}: {'DIFFERS' if mismatches else 'holds'}")
    return 2 if mismatches else 0


if __name__ == "__main__":
    sys.exit(_cli.run(main))
