"""make claims: every claim and extension, what it asks and where it stands by the last judging here."""

import argparse
import sys

from analysis.judge import OUT
from analysis.tables import read
from analysis.text import sentence
from runs.prereg import read_lock
from runs.registry import ROOT, load
from scripts._cli import run


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever the verdicts."""
    argparse.ArgumentParser(prog="python -m scripts.claims", description=__doc__).parse_args(argv)
    lock = read_lock(ROOT)
    for claim in load().claims.values():
        result = read(ROOT / OUT, claim.id)
        hint = f"not judged yet: make {claim.id}" if claim.judging else "this version cannot run it yet"
        stands = sentence(result) if result else hint
        locked = lock.claims.get(claim.id) if lock else None
        if result and locked and (result["design"], result["judging"]) != (locked.design, locked.judging):
            stands += f"; judged with other digests than the locked ones: make {claim.id}"
        print(f"{claim.id:12} {claim.title:28} {stands}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
