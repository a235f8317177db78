"""The job after an array: python -m scripts.slurm_judge MANIFEST judges the claims that it was submitted for. No torch."""

import argparse
import sys
from pathlib import Path

from runs import slurm
from runs.errors import UserError
from scripts._cli import Settings, run
from scripts.judge import show


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever the verdicts, 2 where a claim cannot be judged; the others are."""
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm_judge", description=__doc__)
    parser.add_argument("manifest", type=Path)
    path = parser.parse_args(argv).manifest
    made, code, said = slurm.read(path), 0, []
    base = Settings(made.profile, None, None, path.absolute().parents[2], 1, None, ())
    for claim, plan in made.claims.items():
        try:
            mine = base.of(made.profile, made.plans[plan].request)
            said.append(f"{claim} {show(claim, mine, as_json=False)}")
        except UserError as error:
            said.append(f"{claim} not judged: {' '.join(str(error).split())}")
            code = 2
    print(*said, sep="; ")  # the last line, which make slurm-status shows
    return code


if __name__ == "__main__":
    sys.exit(run(main))
