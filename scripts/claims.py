"""make claims: every claim and extension, what it asks and where it stands by the last judging here."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from analysis.judge import OUT
from analysis.tables import read
from analysis.text import sentence
from runs.errors import UserError
from runs.prereg import accept
from runs.registry import ROOT, Registry, load
from scripts._cli import run


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever the verdicts."""
    argparse.ArgumentParser(prog="python -m scripts.claims", description=__doc__).parse_args(argv)
    registry = load(ROOT)
    for claim in registry.claims.values():
        result = read(ROOT / OUT, claim.id)
        typed = f"make {claim.id}{' DATA=...' if claim.grid == 'locomo' else ''}"
        hint = f"not judged here yet: {typed}" if claim.judging else "this version cannot run it yet"
        stands = sentence(result) if result else hint
        stands += _doubt(registry, claim.id, result) if result else ""
        print(f"{claim.id:12} {claim.title:28} {stands}")
    print("published verdicts: README.md and analysis/published; their rows are not part of the checkout")
    return 0


def _doubt(registry: Registry, claim_id: str, result: Mapping[str, Any]) -> str:
    try:
        accepted = accept(ROOT, claim_id, registry)
    except UserError:
        return "; what it was registered with has changed since: make verify"
    if (result["design"], result["judging"]) == (accepted.design, accepted.judging):
        return ""
    return f"; judged with other digests than the accepted ones: make {claim_id}"


if __name__ == "__main__":
    sys.exit(run(main))
