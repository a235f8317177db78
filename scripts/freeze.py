"""make freeze: lock the claims that have no rows yet; for the others, say what DEVIATIONS.md needs."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any, Protocol

from runs.prereg import DEVIATIONS, ROOT, FrozenError, freeze, load, read_lock
from runs.store import Store
from scripts import _cli


class Units(Protocol):
    """What is asked of a store: its published units and what is written beside their rows."""

    def unit_files(self) -> Iterable[Any]: ...

    def meta(self, path: Any) -> Mapping[str, Any]: ...


def registered_designs(store: Units) -> set[str]:
    """The grid digests of the registered rows in a store; the smoke profile is never evidence."""
    metas = (store.meta(file.path) for file in store.unit_files())
    return {meta["design"] for meta in metas if meta["plan"]["registered"] and meta["plan"]["profile"] != "smoke"}


def main(argv: Sequence[str] | None = None) -> int:
    """Freeze, print what happened; exit 2 with the entries to append where claims with rows were changed."""
    ArgumentParser("scripts.freeze", description=__doc__).parse_args(argv)
    before, today = read_lock(ROOT), date.today().isoformat()
    designs = registered_designs(Store(_cli.settings().store))
    try:
        lock = freeze(ROOT, lambda claim: before is not None and before.claims[claim].grid in designs, today)
    except FrozenError as error:
        print(f"Restore the files, or append to {DEVIATIONS}, each with what changed, why, and what had been seen:")
        print(*error.entries, sep="\n")
        raise
    if before == lock:
        print(f"nothing changed: version {lock.version} of {lock.date} stays in force")
        return 0
    renewed = [claim for claim in load(ROOT).claims if before is None or before.claims.get(claim) != lock.claims[claim]]
    print(f"frozen: version {lock.version} of {lock.date}: {', '.join(renewed)}")
    return 0


if __name__ == "__main__":
    sys.exit(_cli.run(main))
