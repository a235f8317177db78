"""prereg/claims.yaml as frozen data: rules, grids, claims. Strict: what the loader does not know it refuses."""

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from runs.build import build
from runs.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = "prereg/claims.yaml"
SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's where there is one, many times as fast
# PyYAML lets through what its constructors meet: month 13, a list as a key, a text under !!int, a nesting too deep.
YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
IDS = tuple(f"claim-{n}" for n in range(1, 8)) + tuple(f"extension-{n}" for n in range(1, 7))

_OPS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_ENDS = {"low": 0, "estimate": 1, "high": 2}  # in every interval low <= estimate <= high


@dataclass(frozen=True)
class Rule:
    """One condition on one measure: `bound op value`, bound one of low, estimate, high."""

    measure: str
    bound: str
    op: str
    value: float

    def __post_init__(self) -> None:
        if self.bound not in _ENDS:
            raise UserError(f"bound: {self.bound!r}; expected low, estimate or high")
        if self.op not in _OPS:
            raise UserError(f"op: {self.op!r}; expected one of {', '.join(_OPS)}")
        if not math.isfinite(self.value):
            raise UserError(f"value: {self.value}; expected a finite number")

    def holds(self, x: float) -> bool:
        """Whether the bound's value x satisfies the condition; an undefined (NaN) one never does."""
        return bool(_OPS[self.op](x, self.value))

    def excludes(self, other: "Rule") -> bool:
        """Whether the two can never hold together, whatever interval with low <= estimate <= high each reads.

        The two intervals may have different levels; both hold the same estimate, so that any low is at most any high.
        """
        if self.measure != other.measure or self.op[0] == other.op[0]:
            return False
        above, below = (self, other) if self.op[0] == ">" else (other, self)
        ordered = _ENDS[above.bound] <= _ENDS[below.bound] and not above.bound == below.bound != "estimate"
        touching = above.value == below.value and not (above.op == ">=" and below.op == "<=")
        return ordered and (above.value > below.value or touching)

    def __str__(self) -> str:
        return f"{self.bound}({self.measure}) {self.op} {self.value:g}"


@dataclass(frozen=True)
class Rules:
    """What holds for every claim: levels, exclusions, bootstrap."""

    level: float
    kill_error: float
    max_failed_share: float
    resamples: int
    seed: int


@dataclass(frozen=True)
class Profile:
    """One size of a grid: the configs and manifests it is made of, the models it runs, its cells = product of sizes.

    calibration: sizes of what is computed beside, for a threshold; its cells count too. settings: what no config file
    holds yet.
    """

    configs: tuple[str, ...]
    models: tuple[str, ...]
    sizes: Mapping[str, int]
    cells: int
    manifests: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    calibration: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        product = sum(math.prod(sizes.values()) for sizes in self.parts)
        if product != self.cells:
            raise UserError(f"cells: {self.cells}; expected the product of sizes, {product}")

    @property
    def parts(self) -> tuple[Mapping[str, int], ...]:
        """The sizes, and those of the calibration where there is one."""
        return (self.sizes, self.calibration) if self.calibration else (self.sizes,)


@dataclass(frozen=True)
class Grid:
    """A set of cells that several claims share, by profile; settings hold for every profile."""

    kind: str
    profiles: Mapping[str, Profile]
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Strata:
    """Axes that divide a claim's rows; levels: the registered values of the last axis (none: those of the plan)."""

    by: tuple[str, ...] = ()
    levels: tuple[float, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One claim or extension. supported_if: all must hold in every stratum; killed_if: any in any stratum.

    measures: what the rules read, and beside: what is only reported, both by name with a sentence each. params: the
    constants of the estimand. calibration: another grid, of which it needs some rows. paper: the source's figure by
    stratum name, paper_text: the same in words.
    """

    title: str
    question: str
    grid: str
    estimand: str
    supported_if: tuple[Rule, ...]
    killed_if: tuple[Rule, ...]
    measures: Mapping[str, str]
    min_clusters: int
    cluster: str
    paper_text: str
    min_class: int | None = None
    strata: Strata = Strata()
    beside: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, object] = field(default_factory=dict)
    judging: tuple[str, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict)
    calibration: str = ""
    id: str = ""

    def __post_init__(self) -> None:
        for rule in (*self.supported_if, *self.killed_if):
            if rule.measure not in self.measures:
                raise UserError(f"measures: no {rule.measure!r}, which a rule reads; it has {', '.join(self.measures)}")
        for kill in self.killed_if:
            if not any(support.excludes(kill) for support in self.supported_if):
                raise UserError(f"killed_if: {kill} can hold together with supported_if; the rules must be disjoint")


@dataclass(frozen=True)
class Registry:
    """The whole of claims.yaml; raw keeps its blocks as parsed, the matter that is digested."""

    version: int
    rules: Rules
    grids: Mapping[str, Grid]
    claims: Mapping[str, Claim]
    raw: Mapping[str, Any]

    def claim(self, claim_id: str) -> Claim:
        """The claim by its id; UserError for an id that is not registered."""
        if claim_id not in self.claims:
            raise UserError(f"{claim_id!r} is no registered claim; expected one of {', '.join(IDS)}")
        return self.claims[claim_id]

    def owner(self, grid: str) -> str:
        """The id of the first claim on a grid."""
        return next(claim.id for claim in self.claims.values() if claim.grid == grid)


class _Loader(SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(root: Path = ROOT) -> Registry:
    """Read and check prereg/claims.yaml.

    Raises UserError naming file, block and key for anything unknown, missing, of another type, for rules of a claim
    that are not disjoint, and for a file that a grid or claim names but that is not there.
    """
    raw = _parse(root)
    if raw["version"] != 1:
        raise UserError(f"{CLAIMS}: version {raw['version']!r}; expected 1")
    rules = build(Rules, raw["rules"], f"{CLAIMS}: rules")
    grids = {name: build(Grid, block, f"{CLAIMS}: grids.{name}") for name, block in raw["grids"].items()}
    if tuple(raw["claims"]) != IDS:
        raise UserError(f"{CLAIMS}: claims are {', '.join(map(str, raw['claims']))}; expected {', '.join(IDS)}")
    claims = {}
    for name, block in raw["claims"].items():
        claim = build(Claim, block, f"{CLAIMS}: {name}")
        for key in ("grid", "calibration"):
            if (named := getattr(claim, key)) not in grids and (named or key == "grid"):
                raise UserError(f"{CLAIMS}: {name}.{key}: {named!r}; expected one of {', '.join(grids)}")
        claims[name] = replace(claim, id=name)
    _check_files(root, grids, claims)
    return Registry(raw["version"], rules, grids, claims, raw)


def _parse(root: Path) -> dict[str, Any]:
    blocks = ("rules", "grids", "claims")
    try:
        raw = yaml.load((root / CLAIMS).read_text(encoding="utf-8"), _Loader)
        whole = isinstance(raw, dict) and set(raw) == {"version", *blocks}
        json.dumps(raw if whole else None, sort_keys=True)  # as the digests will: a date is no value
    except OSError as error:
        raise UserError(f"{CLAIMS}: {error.strerror}; expected the registered claims") from None
    except YAML_ERRORS as error:
        raise UserError(f"{CLAIMS}: no valid YAML: {' '.join(str(error).split())}") from None
    if not whole or not all(isinstance(raw[block], dict) for block in blocks):
        raise UserError(f"{CLAIMS}: expected the key version and the mappings {', '.join(blocks)}, and nothing else")
    return raw


def _check_files(root: Path, grids: Mapping[str, Grid], claims: Mapping[str, Claim]) -> None:
    named = [(f"claims.{c.id}.judging", path) for c in claims.values() for path in c.judging]
    for name, grid in grids.items():
        for label, profile in grid.profiles.items():
            paths = [path.partition("#")[0] for path in (*profile.configs, *profile.manifests)]
            named += [(f"grids.{name}.{label}", path) for path in paths]
    for where, path in named:
        if not (root / path).is_file():
            raise UserError(f"{CLAIMS}: {where}: {path} is not there; expected a file of the repository")
