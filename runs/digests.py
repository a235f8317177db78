"""What a claim was registered with, as digests: its design, its judging, and its grid."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from runs.errors import UserError
from runs.registry import CLAIMS, IDS, ROOT, YAML_ERRORS, Registry, SafeLoader

PROSE = "prereg/PREREG.md"
JUDGING = ("analysis/intervals.py", "analysis/verdict.py")  # in every claim's judging digest
_SECTION = re.compile(r"^## ((?:claim|extension)-\d+|grids [a-z, ]+):", re.MULTILINE)


@dataclass(frozen=True)
class Digests:
    """SHA-256 of a claim's design, judging and grid; parts: that of each file or block they are made of, by name."""

    design: str
    judging: str
    grid: str
    parts: Mapping[str, str]


def grid_digest(registry: Registry, grid: str, root: Path = ROOT) -> str:
    """SHA-256 over the grid's block, the config files its profiles name, and their manifests; rows carry it."""
    return _combined(_grid_parts(registry, grid, root))


def digests(registry: Registry, claim_id: str, root: Path = ROOT) -> Digests:
    """The digests of a claim as the files are now.

    design: its block, the common rules, PREREG.md's common part, the claim's section, and of its grid, as of the one it
    is calibrated on, section and digest. judging: the interval, verdict and estimand modules. YAML counts as parsed,
    prose without trailing blanks.
    Raises UserError naming a file that is missing, or PREREG.md where a section is.
    """
    claim = registry.claim(claim_id)
    prose = sections(root)
    if unknown := {name for head in prose for name in _grids(head)} - registry.grids.keys():
        raise UserError(f"{PROSE}: a section names grids {', '.join(sorted(unknown))}; expected those of {CLAIMS}")
    named = {claim.grid, claim.calibration}
    design = {
        f"{CLAIMS}#rules": _json_digest(registry.raw["rules"]),
        f"{CLAIMS}#{claim_id}": _json_digest(registry.raw["claims"][claim_id]),
        f"{PROSE}#common": _sha256(prose["common"].encode()),
        f"{PROSE}#{claim_id}": _sha256(prose[claim_id].encode()),
        **{f"{PROSE}#{head}": _sha256(prose[head].encode()) for head in prose if named & set(_grids(head))},
    }
    grid = _grid_parts(registry, claim.grid, root)
    lent = _grid_parts(registry, claim.calibration, root) if claim.calibration else {}
    judging = {path: _file_digest(root, path) for path in (*JUDGING, *claim.judging)}
    return Digests(
        design=_combined({**design, "grid": _combined(grid)} | ({"calibration": _combined(lent)} if lent else {})),
        judging=_combined(judging),
        grid=_combined(grid),
        parts={**design, **lent, **grid, **judging},
    )


def _grid_parts(registry: Registry, grid: str, root: Path) -> dict[str, str]:
    profiles = registry.grids[grid].profiles.values()
    parts = {f"{CLAIMS}#grids.{grid}": _json_digest(registry.raw["grids"][grid])}
    parts |= {name: _config_digest(root, name) for name in sorted({name for p in profiles for name in p.configs})}
    return parts | {path: _file_digest(root, path) for path in sorted({path for p in profiles for path in p.manifests})}


def _config_digest(root: Path, name: str) -> str:
    """Of a configuration as parsed; `file#key` counts that block alone, so that another grid's sizes may join it."""
    path, _, key = name.partition("#")
    try:
        content = yaml.load(read_text(root, path), SafeLoader)
        return _json_digest(content[key] if key else content)
    except YAML_ERRORS:
        raise UserError(
            f"{path}: expected YAML{f' with a block {key!r}' if key else ''}, as {CLAIMS} names it"
        ) from None


def _grids(head: str) -> list[str]:
    return re.split(r",\s*", head.removeprefix("grids ")) if head.startswith("grids ") else []


def sections(root: Path = ROOT) -> dict[str, str]:
    """PREREG.md cut at its headings `## claim-1: ...` and `## grids a, b: ...`; "common" is the text before the first.

    Raises UserError where a claim has no section, or a section holds another heading of its level.
    """
    text = read_text(root, PROSE)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    heads = list(_SECTION.finditer(text))
    if tuple(head[1] for head in heads if not _grids(head[1])) != IDS:
        raise UserError(f"{PROSE}: expected one section '## id: title' for each of {', '.join(IDS)}, in this order")
    ends = [*(head.start() for head in heads[1:]), len(text)]
    cut = {head[1]: text[head.start() : end].strip() for head, end in zip(heads, ends, strict=True)}
    for claim_id, section in cut.items():
        if section.count("\n## "):
            raise UserError(f"{PROSE}: {claim_id}: a second '## ' heading in its section; expected '### ' inside it")
    return {"common": text[: heads[0].start()].strip(), **cut}


def kind_of(part: str) -> str:
    """Which digest a part belongs to: design, judging or grid."""
    if part.startswith(("analysis/", "cert/")):
        return "judging"
    return "design" if part.startswith(PROSE) or (part.startswith(CLAIMS) and "#grids." not in part) else "grid"


def _combined(parts: Mapping[str, str]) -> str:
    return _json_digest(dict(parts))


def _json_digest(block: object) -> str:
    return _sha256(json.dumps(block, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode())


def _file_digest(root: Path, path: str) -> str:
    return _sha256(read_text(root, path).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_text(root: Path, path: str) -> str:
    """A file of the repository, line ends made equal. Raises UserError naming it."""
    try:
        return (root / path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a text file of the repository") from None
