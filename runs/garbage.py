"""What may be removed from a store: rows of designs that no locked claim accepts, and what killed processes left."""

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runs import files, journal
from runs.store import Store

LEFT_AFTER_S = 86_400  # a temporary file lives for seconds, a journal gets its first line within minutes


@dataclass(frozen=True)
class Garbage:
    """A file to remove: its size in bytes, its rows (0 where it is no unit) and the reason."""

    path: Path
    size: int
    rows: int
    why: str


def find(store: Store, designs: Collection[str]) -> list[Garbage]:
    """List what is neither of one of `designs` nor still of use; UserError where a file cannot be read."""
    found = []
    for path, rows, why in _find(store, set(designs)):
        with suppress(FileNotFoundError):  # a running process has published its unit since
            found.append(Garbage(path, path.stat().st_size, rows, why))
    return found


def _find(store: Store, designs: set[str]) -> Iterator[tuple[Path, int, str]]:
    published = {(file.unit, file.number) for file in store.unit_files()}
    for file in store.unit_files():
        meta = store.meta(file.path)
        if meta["design"] not in designs:
            yield file.path, meta["rows"], f"rows of design {meta['design'][:12]}"
    for path in store.plan_files():
        if (design := store.meta(path)["design"]) not in designs:
            yield path, 0, f"plan of design {design[:12]}"
    for file in store.journals():
        of = {row["design"] for record in journal.read(file.path) for row in record["rows"]}
        if (file.unit, file.number) in published:
            yield file.path, 0, "journal of a published unit"
        elif of and not of & designs:
            yield file.path, 0, f"journal of design {min(of)[:12]}"
        elif not of and _old(file.path):
            yield file.path, 0, "journal without a whole line"
    for folder in ("plans", "units"):
        for path in files.listing(store.root / folder):
            if path.name.startswith(".") and path.suffix == ".tmp" and _old(path):
                yield path, 0, "left by a process that was killed"


def _old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > LEFT_AFTER_S
    except FileNotFoundError:
        return False


def remove(garbage: Collection[Garbage]) -> None:
    """Remove the files; UserError where one cannot be removed."""
    for item in garbage:
        with files.writing(item.path):
            item.path.unlink(missing_ok=True)
