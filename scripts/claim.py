"""make claim-N, make extension-N: plan, run the missing cells, judge, draw and print. python -m scripts.claim claim-1"""

import sys

from runs.grid import RUNNABLE
from runs.prereg import accept
from runs.registry import ROOT, load
from scripts._cli import run, settings
from scripts._grid import calibrate, compute
from scripts.judge import parser, show


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever the verdict, 1 where cells failed or a worker died, 2 for a user's mistake."""
    options = parser("python -m scripts.claim", __doc__).parse_args(argv)
    chosen, registry = settings(), load()
    claim = registry.claim(options.claim)
    accepted = accept(ROOT, claim.id, registry)  # nothing is computed under a design that is not the locked one
    code = 0
    if claim.grid in RUNNABLE:
        code = max(calibrate(chosen, registry, claim), compute(chosen, registry, claim.grid, accepted.grids))
    show(claim.id, chosen, options.json)
    return code


if __name__ == "__main__":
    sys.exit(run(main))
