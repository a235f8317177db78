"""The freeze: LOCK and DEVIATIONS.md, what differs from them, and what judging accepts."""

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runs.digests import JUDGING, PROSE, Digests, digests, grid_digest, kind_of, read_text, sections
from runs.errors import UserError
from runs.lock import DEVIATIONS, LOCK, Deviation, Lock, Version, deviations, read_lock, write_lock
from runs.registry import IDS, ROOT, Claim, Registry, Rule, load

__all__ = [
    "DEVIATIONS", "IDS", "JUDGING", "LOCK", "PROSE", "ROOT", "Accepted", "Claim", "Deviation", "Digests", "FrozenError",
    "Lock", "Mismatch", "Registry", "Rule", "Version", "accept", "deviations", "digests", "freeze", "grid_digest",
    "load", "read_lock", "sections", "verify", "write_lock",
]  # fmt: skip


@dataclass(frozen=True)
class Mismatch:
    """Something that differs from what was registered; kind: design, judging, grid or deviations."""

    claim: str
    kind: str
    part: str
    message: str


@dataclass(frozen=True)
class Accepted:
    """What a claim may be judged with: its digests, the grid digests its rows may carry, the deviations in force."""

    design: str
    judging: str
    grids: frozenset[str]
    deviations: tuple[Deviation, ...]


class FrozenError(UserError):
    """Claims that have rows were changed; entries: what DEVIATIONS.md lacks, ready to append."""

    def __init__(self, message: str, entries: tuple[str, ...]) -> None:
        super().__init__(message)
        self.entries = entries


def _undeclared(now: Digests, locked: Digests, entries: Iterable[Deviation]) -> list[tuple[str, str]]:
    """(kind, digest) of what differs from the lock and no entry names. A design digest covers the grid's."""
    declared = {(entry.kind, entry.digest) for entry in entries}
    return [pair for kind in _differing(now, locked) if (pair := (kind, getattr(now, kind))) not in declared]


def _differing(now: Digests, locked: Digests) -> list[str]:
    return [kind for kind in ("design", "judging") if getattr(now, kind) != getattr(locked, kind)]


# ---------------------------------------------------------------- verify, accept, freeze


def verify(root: Path = ROOT) -> list[Mismatch]:
    """Everything that differs from the LOCK and that no deviation declares, one entry for each claim and file.

    Also where DEVIATIONS.md was changed otherwise than by appending to the committed one, and where a published verdict
    carries digests that are neither locked nor declared. Raises UserError where the files cannot be read.
    """
    registry, lock, entries = load(root), read_lock(root), deviations(root)
    if lock is None:
        raise UserError(f"{LOCK}: is not there; expected the file that make freeze writes")
    found = _rewritten(root)
    for claim_id in IDS:
        own = [entry for entry in entries if entry.claim == claim_id]
        found += _claim_mismatches(claim_id, digests(registry, claim_id, root), lock.claims.get(claim_id), own)
        found += _published_mismatches(root, claim_id, lock.claims.get(claim_id), own)
    return found


def _claim_mismatches(claim_id: str, now: Digests, locked: Digests | None, entries: list[Deviation]) -> list[Mismatch]:
    if locked is None:
        return [Mismatch(claim_id, "design", LOCK, f"{LOCK}: {claim_id} is not frozen; expected make freeze")]
    kinds = {kind for kind, _ in _undeclared(now, locked, entries)}
    found = []
    for part in sorted(now.parts.keys() | locked.parts.keys()):
        old, new, kind = locked.parts.get(part), now.parts.get(part), kind_of(part)
        if old != new and ("judging" if kind == "judging" else "design") in kinds:
            shown = f"expected {(old or 'nothing')[:12]}, found {(new or 'nothing')[:12]}"
            message = f"{part.replace('#', ': ')}: {claim_id} {kind} differs from {LOCK}; {shown}"
            found.append(Mismatch(claim_id, kind, part, message))
    if kinds and not found:
        found.append(
            Mismatch(claim_id, min(kinds), LOCK, f"{LOCK}: {claim_id}: digests that its own parts do not give")
        )
    return found


def _published_mismatches(
    root: Path, claim_id: str, locked: Digests | None, entries: list[Deviation]
) -> list[Mismatch]:
    path, found = f"analysis/published/{claim_id}.json", []
    allowed = {(entry.kind, entry.digest) for entry in entries}
    if locked:
        allowed |= {("design", locked.design), ("judging", locked.judging)}
    for kind, digest in _published(root, claim_id).items():
        if (kind, digest) not in allowed:
            message = f"{path}: {claim_id} was judged with {kind} {digest[:12]}, neither locked nor in {DEVIATIONS}"
            found.append(Mismatch(claim_id, kind, path, message))
    return found


def _published(root: Path, claim_id: str) -> dict[str, str]:
    path = f"analysis/published/{claim_id}.json"
    if not (root / path).exists():
        return {}
    try:
        verdict = json.loads(read_text(root, path))
        return {kind: str(verdict[kind]) for kind in ("design", "judging")}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no verdict ({error!r}); expected JSON with design and judging") from None


def _rewritten(root: Path) -> list[Mismatch]:
    try:
        command = ["git", "-C", str(root), "show", f"HEAD:./{DEVIATIONS}"]
        committed = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:  # no git here: there is nothing to compare with
        return []
    if committed.returncode or (root / DEVIATIONS).read_bytes().startswith(committed.stdout):
        return []
    message = f"{DEVIATIONS}: what was committed has been changed; expected only appended entries"
    return [Mismatch("all", "deviations", DEVIATIONS, message)]


def accept(root: Path, claim_id: str, registry: Registry | None = None) -> Accepted:
    """The digests that judging a claim may use; registry: of this root, where it is already loaded.

    Raises UserError naming file and claim where the files differ from the LOCK and no deviation names the new digest.
    """
    now, lock = digests(registry or load(root), claim_id, root), read_lock(root)
    own = [entry for entry in deviations(root) if entry.claim == claim_id]
    locked = lock.claims.get(claim_id) if lock else None
    mismatches = _claim_mismatches(claim_id, now, locked, own)
    if mismatches or locked is None:
        raise UserError(f"{mismatches[0].message}; restore it, or see make verify and {DEVIATIONS}")
    kinds = {*_differing(now, locked), "grid"}
    grids = frozenset({now.grid, locked.grid, *(entry.digest for entry in own if entry.kind == "grid")})
    return Accepted(now.design, now.judging, grids, tuple(entry for entry in own if entry.kind in kinds))


def freeze(root: Path, has_rows: Callable[[str], bool], date: str) -> Lock:
    """Lock every claim that changed and has no rows yet, write the LOCK and return it; unchanged, it is only returned.

    has_rows: whether registered rows of a claim's locked design exist; a published verdict counts as well.
    Raises FrozenError, nothing written, where a claim that has rows was changed and no deviation declares it.
    """
    registry, old, entries = load(root), read_lock(root), deviations(root)
    before = old.claims if old else {}
    now = {claim_id: digests(registry, claim_id, root) for claim_id in IDS}
    changed = [claim_id for claim_id in IDS if before.get(claim_id) != now[claim_id]]
    fixed = [
        claim_id
        for claim_id in changed
        if claim_id in before
        and (has_rows(claim_id) or _published(root, claim_id).get("design") == before[claim_id].design)
    ]
    _require_declared(fixed, now, before, entries, date)
    renewed = {claim_id: now[claim_id] for claim_id in changed if claim_id not in fixed}
    if old and not renewed:
        return old
    history = old.history if old else ()
    replaced = {claim_id: before[claim_id] for claim_id in renewed if claim_id in before}
    if old:
        history += (Version(old.version, old.date, replaced),)
    lock = Lock(old.version + 1 if old else 1, date, {**before, **renewed}, history)
    write_lock(root, lock)
    return lock


def _require_declared(
    fixed: list[str], now: Mapping[str, Digests], before: Mapping[str, Digests], entries: list[Deviation], date: str
) -> None:
    missing = []
    for claim_id in fixed:
        own = [entry for entry in entries if entry.claim == claim_id]
        for kind, digest in _undeclared(now[claim_id], before[claim_id], own):
            missing.append(f"## {date} {claim_id} {kind} {digest}")
    if missing:
        claims = ", ".join(dict.fromkeys(entry.split()[2] for entry in missing))
        message = f"{claims} changed after rows exist; expected no change, or entries in {DEVIATIONS}"
        raise FrozenError(message, tuple(missing))
