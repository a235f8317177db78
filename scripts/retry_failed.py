"""make retry-failed: the failed examples of the stored plans once more, or of those of PROFILE=, MODEL=, ... alone."""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from runs.errors import UserError
from runs.grid import RUNNABLE
from runs.prereg import accept
from runs.registry import ROOT, Registry, load
from runs.store import Store
from scripts._cli import Settings, run, settings
from scripts._command import typed
from scripts._grid import compute


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 where nothing is failed any more, 1 where something is, 2 where a plan could not be taken up."""
    argparse.ArgumentParser(prog="python -m scripts.retry_failed", description=__doc__).parse_args(argv)
    chosen, registry = settings(), load()
    chosen.require_store()
    codes = [
        _retried(chosen, registry, header)
        for header in Store(chosen.store).plans()
        if header["grid"] in RUNNABLE and _wanted(chosen, header)
    ]
    if not codes:
        print(f"no plan of these settings in {chosen.store}", file=sys.stderr)
    return max(codes, default=0)


def _wanted(chosen: Settings, header: Mapping[str, Any]) -> bool:
    """Whether a plan has every setting that the user typed."""
    profiles = (chosen.profile,) if os.environ.get("PROFILE", "").strip() else (header["profile"],)
    named = {key: value for key, value in chosen.request.items() if value}
    return header["profile"] in profiles and named.items() <= header["request"].items()


def _retried(chosen: Settings, registry: Registry, header: Mapping[str, Any]) -> int:
    """Exit code of one plan; its mistakes are a line and do not keep the other plans from being taken up."""
    mine = chosen.of(header["profile"], header["request"])
    print(f"{header['grid']} {typed(header)}".strip(), file=sys.stderr)
    try:
        claim = next(claim.id for claim in registry.claims.values() if claim.grid == header["grid"])
        designs = accept(ROOT, claim, registry).grids
        if header["design"] not in designs:
            print("planned under a design that is no longer accepted: left as it is", file=sys.stderr)
            return 0
        return compute(mine, registry, header["grid"], designs, retry_only=True)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run(main))
