"""The two records of the freeze: LOCK, what was registered, and DEVIATIONS.md, what was changed afterwards and why."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from runs.build import build
from runs.digests import Digests, read_text
from runs.errors import UserError
from runs.registry import IDS, ROOT

LOCK = "prereg/LOCK"
DEVIATIONS = "prereg/DEVIATIONS.md"
_ENTRY = re.compile(r"## (\d{4}-\d{2}-\d{2}) ((?:claim|extension)-\d) (design|judging|grid) ([0-9a-f]{64})")


@dataclass(frozen=True)
class Version:
    """A frozen state: the digests by claim id."""

    version: int
    date: str
    claims: Mapping[str, Digests]


@dataclass(frozen=True)
class Lock(Version):
    """The state in force; history holds, oldest first, the digests that each later version replaced."""

    history: tuple[Version, ...] = ()


@dataclass(frozen=True)
class Deviation:
    """One entry of DEVIATIONS.md: the digest that it declares, and why."""

    date: str
    claim: str
    kind: str
    digest: str
    text: str


def read_lock(root: Path = ROOT) -> Lock | None:
    """The LOCK, None before the first freeze. Raises UserError where it is damaged."""
    if not (root / LOCK).exists():
        return None
    try:
        return build(Lock, json.loads(read_text(root, LOCK)), LOCK)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{LOCK}: no valid JSON ({error}); expected the file that make freeze wrote") from None


def write_lock(root: Path, lock: Lock) -> None:
    """Write the LOCK atomically: the old one or the new one, nothing between. UserError where that is not possible."""
    try:
        handle, temporary = tempfile.mkstemp(dir=root / "prereg", prefix=".LOCK-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(lock), indent=1, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)  # mkstemp's 0o600 would keep others from reading it
            Path(temporary).replace(root / LOCK)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {LOCK}: {error.strerror}; expected room and write permission") from None


def deviations(root: Path = ROOT) -> list[Deviation]:
    """The entries of DEVIATIONS.md: a line `## 2026-12-01 claim-1 judging <64 hex>`, then prose.

    Raises UserError with the line number for a heading of another form, or without a reason below it.
    """
    entries: list[tuple[int, re.Match[str], list[str]]] = []
    for number, line in enumerate(read_text(root, DEVIATIONS).splitlines(), 1):
        if line.startswith("## "):
            match = _ENTRY.fullmatch(line.strip())
            if not match or match[2] not in IDS or not _is_date(match[1]):
                form = "## YYYY-MM-DD <claim> design|judging|grid <64 hex>"
                raise UserError(f"{DEVIATIONS}, line {number}: {line[:40]!r}; expected a heading {form!r}")
            entries.append((number, match, []))
        elif entries:
            entries[-1][2].append(line)
    for number, _, lines in entries:
        if not "".join(lines).strip():
            raise UserError(f"{DEVIATIONS}, line {number}: no reason below the heading; expected what changed, and why")
    return [Deviation(m[1], m[2], m[3], m[4], "\n".join(lines).strip()) for _, m, lines in entries]


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
