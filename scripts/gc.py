"""make gc: list the rows that no locked claim accepts; make gc ARGS=--yes removes them. python -m scripts.gc --yes"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from runs import garbage
from runs.prereg import ROOT, accept, load
from runs.store import Store
from scripts import _cli


def main(argv: Sequence[str] | None = None) -> int:
    """List what may go with its size, and remove it where --yes is given; rows of the current design always stay."""
    parser = ArgumentParser("scripts.gc", description=__doc__)
    parser.add_argument("--yes", action="store_true", help="remove what is listed")
    settings = _cli.settings()
    options = parser.parse_args([*(sys.argv[1:] if argv is None else argv), *settings.args])
    registry = load(ROOT)
    designs = set().union(*(accept(ROOT, claim, registry).grids for claim in registry.claims))
    found = garbage.find(Store(settings.store), designs)
    for item in found:
        rows = f", {item.rows:,} rows" if item.rows else ""
        print(f"{item.path}: {item.why}{rows}, {_size(item.size)}")
    total = f"{len(found)} files, {sum(item.rows for item in found):,} rows, {_size(sum(i.size for i in found))}"
    if not found:
        print(f"nothing to remove in {settings.store}")
    elif options.yes:
        garbage.remove(found)
        print(f"removed: {total}")
    else:
        print(f"to be removed: {total}; make gc ARGS=--yes removes them")
    return 0


def _size(n_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.4g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.4g} GiB"


if __name__ == "__main__":
    sys.exit(_cli.run(main))
