"""The freeze: LOCK and DEVIATIONS.md, what differs from them, and what judging accepts."""

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs.digests import JUDGING, PROSE, Digests, digests, grid_digest, kind_of, read_text, sections
from runs.errors import UserError
from runs.lock import DEVIATIONS, LOCK, Deviation, Lock, Version, deviations, read_lock, write_lock
from runs.registry import IDS, ROOT, Claim, Registry, Rule, Rules, load

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
    carries digests that are neither locked nor declared, is another one than was committed, or does not follow from its
    own strata. Raises UserError where the files cannot be read.
    """
    registry, lock, entries = load(root), read_lock(root), deviations(root)
    if lock is None:
        raise UserError(f"{LOCK}: is not there; expected the file that make freeze writes")
    found = _rewritten(root)
    for claim_id in IDS:
        own = [entry for entry in entries if entry.claim == claim_id]
        now = digests(registry, claim_id, root)
        found += _claim_mismatches(claim_id, now, lock.claims.get(claim_id), own)
        found += _published_mismatches(root, claim_id, lock.claims.get(claim_id), own)
        found += _published_otherwise(root, claim_id, registry, now)
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
    verdict = _published(root, claim_id)
    for kind, digest in ((kind, str(verdict[kind])) for kind in ("design", "judging") if verdict):
        if (kind, digest) not in allowed:
            message = f"{path}: {claim_id} was judged with {kind} {digest[:12]}, neither locked nor in {DEVIATIONS}"
            found.append(Mismatch(claim_id, kind, path, message))
    return found


def _published_otherwise(root: Path, claim_id: str, registry: Registry, now: Digests) -> list[Mismatch]:
    """Where a published verdict is not the committed one, or (judged by the rules as they are now) not its strata's."""
    path, verdict = f"analysis/published/{claim_id}.json", _published(root, claim_id)
    found, committed = [], _committed(root, path)
    if committed is not None and (not verdict or read_text(root, path) != committed.decode().replace("\r\n", "\n")):
        found.append(f"{path}: differs from the committed one; expected that, or a commit of the new one")
    if verdict and str(verdict["design"]) == now.design and (why := _unfounded(verdict, registry, claim_id, path)):
        found.append(f"{path}: {claim_id} is {verdict['verdict']} there, but {why}")
    return [Mismatch(claim_id, "judging", path, message) for message in found]


def _published(root: Path, claim_id: str) -> dict[str, Any]:
    path = f"analysis/published/{claim_id}.json"
    if not (root / path).exists():
        return {}
    try:
        verdict = json.loads(read_text(root, path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no valid JSON ({error}); expected the JSON that judging writes") from None
    keys = ("verdict", "design", "judging")
    if not isinstance(verdict, dict) or not all(isinstance(verdict.get(key), str) for key in keys):
        raise UserError(f"{path}: no verdict; expected the JSON that judging writes, with the texts {', '.join(keys)}")
    return verdict


def _unfounded(verdict: Mapping[str, Any], registry: Registry, claim_id: str, path: str) -> str:
    """What contradicts a verdict in its own numbers, "" where nothing does."""
    try:
        if verdict["verdict"] == "NOT_EVALUATED":
            return "" if verdict["reasons"] else "it gives no reason"
        outcome = _outcome(verdict, registry.rules, registry.claim(claim_id))
        return "" if outcome == verdict["verdict"] else f"its strata and counts make it {outcome}"
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: no whole verdict ({error!r}); expected the JSON that judging writes") from None


def _outcome(verdict: Mapping[str, Any], rules: Rules, claim: Claim) -> str:
    """The outcome that the numbers of a verdict have under a claim's rules: analysis/verdict.py without the rows."""
    strata = verdict["strata"]
    few = any(stratum["n"] < 1 or stratum["clusters"] < claim.min_clusters for stratum in strata)
    failed = verdict["failed"] > rules.max_failed_share * verdict["planned"]
    wanted = len(claim.strata.levels) or 1
    kill_level = 1 - rules.kill_error / max(len(strata), 1)
    levels = math.isclose(verdict["kill_level"], kill_level, rel_tol=1e-9) and verdict["level"] == rules.level
    if not strata or len(strata) % wanted or few or failed or verdict["missing"] or not levels:
        return "NOT_EVALUATED"
    if any(rule.holds(_bound(stratum, rule, "kill_")) for stratum in strata for rule in claim.killed_if):
        return "KILLED"
    supported = all(rule.holds(_bound(stratum, rule)) for stratum in strata for rule in claim.supported_if)
    return "SUPPORTED" if supported else "INCONCLUSIVE"


def _bound(stratum: Mapping[str, Any], rule: Rule, level: str = "") -> float:
    value = stratum["measures"][rule.measure][rule.bound if rule.bound == "estimate" else level + rule.bound]
    return math.nan if value is None else value


def _committed(root: Path, path: str) -> bytes | None:
    """A file as it stands in the last commit; None without git, without a commit, or where it has no such file."""
    try:
        shown = subprocess.run(["git", "-C", str(root), "show", f"HEAD:./{path}"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return None if shown.returncode else shown.stdout


def _rewritten(root: Path) -> list[Mismatch]:
    committed = _committed(root, DEVIATIONS)
    if committed is None or (root / DEVIATIONS).read_bytes().startswith(committed):
        return []
    message = f"{DEVIATIONS}: what was committed has been changed; expected only appended entries"
    return [Mismatch("all", "deviations", DEVIATIONS, message)]


def accept(root: Path, claim_id: str, registry: Registry | None = None) -> Accepted:
    """The digests that judging a claim may use; registry: of this root, where it is already loaded.

    Raises UserError naming file and claim where the files differ from the LOCK and no deviation names the new digest,
    and where DEVIATIONS.md is not the committed one with entries appended.
    """
    now, lock = digests(registry or load(root), claim_id, root), read_lock(root)
    own = [entry for entry in deviations(root) if entry.claim == claim_id]
    locked = lock.claims.get(claim_id) if lock else None
    mismatches = [*_claim_mismatches(claim_id, now, locked, own), *_rewritten(root)]
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
