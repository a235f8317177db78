"""The registered claims: complete, strict, disjoint; digests that notice every change and no other; the freeze."""

import itertools
import json
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from runs import prereg
from runs.errors import UserError
from runs.lock import write_lock
from runs.registry import CLAIMS, IDS, ROOT, Rule, load

TODAY = "2030-01-02"
REPLAYED = {"claim-1", "claim-2", "extension-4", "extension-6"}
ANSWERED = {f"claim-{n}" for n in range(3, 8)} | {"extension-1", "extension-5"}
MANIFEST = "prereg/manifests/pydoc_topics.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of what the digests read, with stand-ins for the judging modules."""
    for folder in ("prereg", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / prereg.LOCK).unlink(missing_ok=True)
    (tmp_path / prereg.DEVIATIONS).write_text("# Deviations\n")
    (tmp_path / MANIFEST).parent.mkdir(exist_ok=True)
    (tmp_path / MANIFEST).write_text('{"documents": []}\n')
    for path in (*prereg.JUDGING, *re.findall(r"(?:analysis|cert)/[\w/]+\.py", (ROOT / CLAIMS).read_text())):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"# {path}\n")
    return tmp_path


@pytest.fixture
def frozen(root: Path) -> Path:
    prereg.freeze(root, no_rows, "2030-01-01")
    return root


def no_rows(claim: str) -> bool:
    return False


def edit(root: Path, path: str, old: str, new: str) -> None:
    text = (root / path).read_text()
    assert old in text, f"{path} has no {old!r}"
    (root / path).write_text(text.replace(old, new, 1))


def all_digests(root: Path) -> dict[str, prereg.Digests]:
    registry = load(root)
    return {claim: prereg.digests(registry, claim, root) for claim in IDS}


def changed(root: Path, before: dict[str, prereg.Digests], kind: str) -> set[str]:
    return {claim for claim, now in all_digests(root).items() if getattr(now, kind) != getattr(before[claim], kind)}


# ---------------------------------------------------------------- content


def test_grids_have_the_registered_sizes(root: Path) -> None:
    grids = load(root).grids
    assert [grids["replay"].profiles[p].cells for p in ("smoke", "laptop", "paper")] == [96, 12_096, 12_096]
    assert grids["tasks"].profiles["paper"].cells == 76_800
    assert grids["tasks"].profiles["laptop"].cells == 40 * 6 * 12
    assert grids["synthetic"].profiles["laptop"].cells == 4 * 30 * 4


def test_every_claim_of_the_study_is_there_with_its_thresholds(root: Path) -> None:
    claims = load(root).claims
    rules = {claim.id: (claim.supported_if, claim.killed_if) for claim in claims.values()}
    shown = {claim: " | ".join("; ".join(map(str, some)) for some in both) for claim, both in rules.items()}
    assert shown == {
        "claim-1": "low(coverage) >= 0.95 | high(coverage) < 0.95",
        "claim-2": "low(spearman) >= 0.9 | high(spearman) < 0.9",
        "claim-3": "low(difference) > -0.02 | high(difference) < -0.02",
        "claim-4": "low(difference) > 0.02 | high(difference) < 0.02",
        "claim-5": "low(auc_difference) > 0 | high(auc_difference) < 0",
        "claim-6": "low(gain_difference) > 0.01 | high(gain_difference) < 0.01",
        "claim-7": "low(auc) > 0.6; low(auc_difference) > 0 | high(auc) < 0.6; high(auc_difference) < 0",
        "extension-1": "low(over_random) > 0; low(over_confidence) > 0 | "
        "high(over_random) < 0; high(over_confidence) < 0",
        "extension-2": "low(over_random_gate) > 0; low(over_topk_old) > 0 | "
        "high(over_random_gate) < 0; high(over_topk_old) < 0",
        "extension-3": "low(gated_minus_full) > -0.05 | high(gated_minus_full) < -0.05",
        "extension-4": "low(coverage) >= 0.95 | high(coverage) < 0.95",
        "extension-5": "estimate(min_auc) > 0.5; low(mean_auc) > 0.5 | high(mean_auc) < 0.5",
        "extension-6": "low(coverage) >= 0.95; estimate(worst_head) >= 0.85; estimate(radius_ratio) <= 1.1; "
        "estimate(spearman) >= 0.9 | high(coverage) < 0.95; estimate(worst_head) < 0.7",
    }
    assert {claim.min_clusters for claim in claims.values() if claim.id != "extension-3"} == {20}
    assert claims["extension-3"].min_clusters == 10
    assert [claim.id for claim in claims.values() if claim.min_class == 30] == ["claim-5", "claim-7", "extension-5"]


@pytest.mark.parametrize("claim_id", IDS)
def test_the_prose_states_every_number_of_its_claim(root: Path, claim_id: str) -> None:
    claim = load(root).claims[claim_id]
    section = prereg.sections(root)[claim_id]
    said = {float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", section)}
    thresholds = [rule.value for rule in (*claim.supported_if, *claim.killed_if)]
    sizes = [claim.min_clusters, claim.min_class or claim.min_clusters, *claim.strata.levels]
    for value in claim.params.values():
        sizes += [x for x in (value if isinstance(value, list) else [value]) if not isinstance(x, str)]
    missing = [x for x in thresholds if x not in said]
    missing += [x for x in sizes if not any(math.isclose(x * scale, y) for y in said for scale in (1, 100))]  # or in %
    assert not missing, f"{claim_id}: not in its section: {missing}"


def test_the_common_prose_states_the_common_rules_and_sizes(root: Path) -> None:
    registry, prose = load(root), prereg.sections(root)
    common, tasks = prose["common"], prose["grids tasks, synthetic"]
    said = set(re.findall(r"[\d.,]+\d", common + tasks))
    rules = registry.rules
    assert {f"{rules.resamples:,}", str(rules.seed), f"{rules.max_failed_share:g}", f"{rules.kill_error:g}"} <= said
    assert f"the {rules.level:.0%} interval".replace("%", " %") in common
    for grid in ("replay", "tasks"):
        for name in ("laptop", "desktop", "paper"):
            assert f"{registry.grids[grid].profiles[name].cells:,}" in said


def test_a_grid_section_counts_for_the_claims_on_that_grid_alone(root: Path) -> None:
    before = all_digests(root)
    edit(root, "prereg/PREREG.md", "## grids tasks, synthetic: A", "## grids tasks, synthetic: B")
    after = all_digests(root)
    changed = {claim for claim in IDS if before[claim].design != after[claim].design}
    assert changed == {claim.id for claim in load(root).claims.values() if claim.grid in ("tasks", "synthetic")}


def test_a_section_of_a_grid_that_is_not_there_is_refused(root: Path) -> None:
    edit(root, "prereg/PREREG.md", "## grids tasks, synthetic:", "## grids tasks, synthetik:")
    with pytest.raises(UserError, match="names grids synthetik"):
        all_digests(root)


def test_another_block_may_join_a_profile_without_touching_the_replay(root: Path) -> None:
    before = all_digests(root)
    path = root / "configs/profile/laptop.yaml"
    path.write_text(path.read_text() + "poems: {documents: 40}\n")
    assert all_digests(root) == before
    edit(root, "configs/profile/laptop.yaml", "documents: 40", "documents: 41")
    after = all_digests(root)
    assert {claim for claim in IDS if after[claim].grid != before[claim].grid} == {
        claim.id for claim in load(root).claims.values() if claim.grid in ("tasks", "synthetic")
    } - {"extension-5"}
    edit(root, "configs/profile/laptop.yaml", "documents: 56", "documents: 57")
    assert all_digests(root)["claim-1"].grid != before["claim-1"].grid


# ---------------------------------------------------------------- strictness


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  claim-1:\n    title: Coverage", "  claim-1:\n    titel: Coverage", ["claim-1", "titel", "title"]),
        ("    min_clusters: 20\n", "", ["claim-1", "min_clusters", "missing"]),
        ("bound: low, op: \">=\", value: 0.95", "bound: lo, op: \">=\", value: 0.95", ["claim-1", "bound", "lo"]),
        ("bound: low, op: \">=\", value: 0.95", "bound: low, op: \"=>\", value: 0.95", ["claim-1", "op", "=>"]),
        ("bound: low, op: \">=\", value: 0.95", "bound: low, op: \">=\", value: high", ["claim-1", "value", "number"]),
        ("bound: low, op: \">=\", value: 0.95", "bound: low, op: \">=\", value: .nan", ["claim-1", "value", "nan"]),
        ("{measure: coverage, bound: low", "{measure: covrage, bound: low", ["claim-1", "covrage"]),
        ("op: \"<\", value: 0.95}]", "op: \"<\", value: 0.96}]", ["claim-1", "disjoint"]),
        ("min_clusters: 20", "min_clusters: 20.5", ["claim-1", "min_clusters", "whole number"]),
        ("min_clusters: 20", "min_clusters: true", ["claim-1", "min_clusters", "whole number"]),
        ("grid: replay", "grid: reply", ["claim-1", "grid", "reply"]),
        ("calibration: assistant", "calibration: assistent", ["extension-3", "calibration", "assistent"]),
        ("cells: 12096", "cells: 12095", ["grids.replay", "laptop", "cells", "12096"]),
        ("configs/profile/smoke.yaml", "configs/profile/smok.yaml", ["smok.yaml", "grids.replay"]),
        ("judging: [analysis/estimands/coverage.py", "judging: [analysis/estimands/nope.py", ["claim-1", "nope.py"]),
        ("  claim-2:\n", "  claim-0:\n", ["claim-0"]),
        ("version: 1", "version: 2", ["version"]),
        ("  level: 0.95", "  level: 0.95\n  level: 0.90", ["level", "twice"]),
        ("rules:\n", "rule:\n", ["rules"]),
        ("claims:\n", "claims: [\n", ["YAML"]),
        ("version: 1", "version: 2030-13-01", ["YAML", "month"]),
        ("version: 1", f"version: {'9' * 5000}", ["YAML", "digits"]),
        ("version: 1", "version: !!int one", ["YAML", "one"]),
        ("version: 1", "version: !!timestamp one", ["YAML"]),
        ("version: 1", "version: !!bool one", ["YAML", "one"]),
        ("version: 1", f"version: {'[' * 5000 + ']' * 5000}", ["YAML", "depth"]),
        ("rules:\n", "? [rules]\n:\n", ["YAML", "unhashable"]),
        ("params: {", "params: {since: 2030-01-01, ", ["YAML", "date"]),
        ("params: {", "params: &p {since: *p, ", ["YAML", "Circular"]),
    ],
)  # fmt: skip
def test_loading_refuses_and_names_file_claim_and_key(root: Path, old: str, new: str, words: list[str]) -> None:
    edit(root, CLAIMS, old, new)
    with pytest.raises(UserError) as error:
        load(root)
    message = str(error.value)
    assert CLAIMS in message and "\n" not in message
    assert all(word in message for word in words), message


def test_an_unknown_claim_is_refused_by_name(root: Path) -> None:
    with pytest.raises(UserError, match="claim-9"):
        load(root).claim("claim-9")


# ---------------------------------------------------------------- disjoint rules


def _reads(rule: Rule, low: float, estimate: float, high: float) -> float:
    return {"low": low, "estimate": estimate, "high": high}[rule.bound]


def test_excludes_agrees_with_brute_force_over_intervals() -> None:
    grid = [-1.0, 0.0, 0.5, 1.0, 2.0]
    intervals = [t for t in itertools.product(grid, repeat=3) if t[0] <= t[1] <= t[2]]
    pairs = [(a, b) for a in intervals for b in intervals if a[1] == b[1]]  # two levels, one estimate
    rules = [
        Rule("m", *rest) for rest in itertools.product(("low", "estimate", "high"), (">", ">=", "<", "<="), (0.0, 1.0))
    ]
    for one, other in itertools.product(rules, repeat=2):
        together = any(one.holds(_reads(one, *a)) and other.holds(_reads(other, *b)) for a, b in pairs)
        if one.op[0] != other.op[0]:
            assert one.excludes(other) == (not together), (str(one), str(other))
        else:
            assert not one.excludes(other)  # two lower bounds can always both hold
    assert not Rule("m", "low", ">", 1.0).excludes(Rule("other", "high", "<", 0.0))


@pytest.mark.parametrize("claim_id", IDS)
def test_no_interval_supports_and_kills(root: Path, claim_id: str) -> None:
    claim, rng = load(root).claims[claim_id], random.Random(claim_id)
    values = {rule.value for rule in (*claim.supported_if, *claim.killed_if)}
    supported = killed = 0
    for _ in range(5_000):
        wide, narrow = {}, {}
        for measure in claim.measures:
            points = sorted(rng.choice(sorted(values)) + rng.choice((0.0, rng.gauss(0, 0.1))) for _ in range(5))
            wide[measure], narrow[measure] = (points[0], points[2], points[4]), (points[1], points[2], points[3])
        support = all(rule.holds(_reads(rule, *narrow[rule.measure])) for rule in claim.supported_if)
        kill = any(rule.holds(_reads(rule, *wide[rule.measure])) for rule in claim.killed_if)
        assert not (support and kill), (narrow, wide)
        supported, killed = supported + support, killed + kill
    assert supported and killed  # the search reached both


# ---------------------------------------------------------------- digests


def test_a_threshold_changes_the_design_of_its_claim_alone(root: Path) -> None:
    before = all_digests(root)
    edit(root, CLAIMS, 'op: ">", value: -0.02', 'op: ">", value: -0.01')
    assert changed(root, before, "design") == {"claim-3"}
    assert changed(root, before, "grid") == changed(root, before, "judging") == set()


def test_comments_and_layout_change_nothing(root: Path) -> None:
    before = all_digests(root)
    edit(root, CLAIMS, "version: 1", "# another comment\n\nversion:   1  # one")
    edit(
        root,
        CLAIMS,
        '{measure: coverage, bound: low, op: ">=", value: 0.95}',
        "{value: 0.95, op: '>=', bound: low, measure: coverage}",
    )
    edit(root, prereg.PROSE, "## claim-1: Coverage\n", "## claim-1: Coverage  \n")
    assert all_digests(root) == before


@pytest.mark.parametrize(
    ("path", "old", "new", "design", "grid", "judging"),
    [
        (prereg.PROSE, "## claim-4: Damage", "## claim-4: Damages", {"claim-4"}, set(), set()),
        (prereg.PROSE, "# Pre-registration", "# Pre-registered", set(IDS), set(), set()),
        (CLAIMS, "resamples: 10000", "resamples: 10001", set(IDS), set(), set()),
        ("configs/profile/paper.yaml", "steps: 3", "steps: 4", REPLAYED, REPLAYED, set()),
        (MANIFEST, "[]", "[1]", REPLAYED, REPLAYED, set()),
        ("configs/profile/paper.yaml", "\nreplay:", "\nother: {sizes: 1}\nreplay:", set(), set(), set()),
        ("configs/policy/topk.yaml", "# ", "# another comment, ", set(), set(), set()),
        (prereg.PROSE, "## grids tasks, synthetic: ", "## grids tasks, synthetic: On ", ANSWERED, set(), set()),
        ("analysis/intervals.py", "# ", "## ", set(), set(), set(IDS)),
        ("analysis/estimands/fidelity.py", "# ", "## ", set(), set(), {"claim-2", "extension-6"}),
        ("analysis/estimands/conditional.py", "# ", "## ", set(), set(), {"extension-6"}),
        ("configs/launcher/local.yaml", "local", "elsewhere", set(), set(), set()),
    ],
)  # fmt: skip
def test_what_each_file_belongs_to(
    root: Path, path: str, old: str, new: str, design: set, grid: set, judging: set
) -> None:
    before = all_digests(root)
    edit(root, path, old, new)
    assert changed(root, before, "design") == design
    assert changed(root, before, "grid") == grid
    assert changed(root, before, "judging") == judging


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## claim-3: ", "## claim-33: "),
        ("## claim-3: ", "### claim-3: "),
        ("**Question.** Does the certificate rank", "## More\n"),
    ],
)
def test_prose_without_a_section_for_each_claim_is_refused(root: Path, old: str, new: str) -> None:
    edit(root, prereg.PROSE, old, new)
    with pytest.raises(UserError, match="PREREG"):
        all_digests(root)


@pytest.mark.parametrize("claim_id", IDS)
def test_judging_digests_cover_every_analysis_module_that_they_import(claim_id: str) -> None:
    listed = {*prereg.JUDGING, *load().claims[claim_id].judging}
    for path in listed:
        for name in re.findall(
            r"^ *from (analysis[\w.]*) import|^ *import (analysis[\w.]*)", (ROOT / path).read_text(), re.M
        ):
            module = "".join(name).replace(".", "/")
            assert {f"{module}.py", f"{module}/__init__.py"} & listed, f"{path} imports {module}"


# ---------------------------------------------------------------- freeze, verify, accept


def test_tampering_is_named_and_refused_and_restoring_passes(frozen: Path) -> None:
    assert prereg.verify(frozen) == []
    accepted = prereg.accept(frozen, "claim-1")
    assert accepted.deviations == () and accepted.grids == {prereg.grid_digest(load(frozen), "replay", frozen)}
    edit(frozen, CLAIMS, 'bound: low, op: ">=", value: 0.95', 'bound: low, op: ">=", value: 0.96')
    (mismatch,) = prereg.verify(frozen)
    assert (mismatch.claim, mismatch.kind, mismatch.part) == ("claim-1", "design", f"{CLAIMS}#claim-1")
    assert CLAIMS in mismatch.message and "claim-1" in mismatch.message
    with pytest.raises(UserError, match=rf"{CLAIMS}.*claim-1"):
        prereg.accept(frozen, "claim-1")
    assert prereg.accept(frozen, "claim-2")  # another claim's block is not touched
    edit(frozen, CLAIMS, 'bound: low, op: ">=", value: 0.96', 'bound: low, op: ">=", value: 0.95')
    assert prereg.verify(frozen) == []
    assert prereg.accept(frozen, "claim-1") == accepted


def test_a_config_of_a_grid_is_named_for_each_claim_that_uses_it(frozen: Path) -> None:
    edit(frozen, "configs/policy/topk.yaml", "pool: 1", "pool: 7")
    found = prereg.verify(frozen)
    assert {m.part for m in found} == {"configs/policy/topk.yaml"} and {m.kind for m in found} == {"grid"}
    assert {m.claim for m in found} == set(IDS)


def test_a_claim_is_registered_with_the_grid_that_it_is_calibrated_on(frozen: Path) -> None:
    before = prereg.digests(load(frozen), "extension-3", frozen)
    edit(frozen, CLAIMS, "      turns: 30", "      turns: 31")
    found = {(m.claim, m.part) for m in prereg.verify(frozen)}
    assert found == {(claim, f"{CLAIMS}#grids.assistant") for claim in ("extension-2", "extension-3")}
    after = prereg.digests(load(frozen), "extension-3", frozen)
    assert after.design != before.design and after.grid == before.grid  # its own rows stay what they are
    with pytest.raises(UserError, match=r"grids.assistant: extension-3"):
        prereg.accept(frozen, "extension-3")


def test_nothing_is_accepted_without_a_lock(root: Path) -> None:
    with pytest.raises(UserError, match=r"LOCK.*make freeze"):
        prereg.accept(root, "claim-1")
    with pytest.raises(UserError, match=r"LOCK.*make freeze"):
        prereg.verify(root)


def test_freezing_again_changes_nothing_and_a_change_without_rows_makes_a_version(frozen: Path) -> None:
    first = (frozen / prereg.LOCK).read_bytes()
    assert prereg.freeze(frozen, no_rows, TODAY).version == 1
    assert (frozen / prereg.LOCK).read_bytes() == first
    old = prereg.read_lock(frozen)
    edit(frozen, CLAIMS, "title: Damage", "title: Any damage")
    lock = prereg.freeze(frozen, no_rows, TODAY)
    assert lock == prereg.read_lock(frozen)
    assert (lock.version, lock.date) == (2, TODAY)
    assert [(v.version, v.date, set(v.claims)) for v in lock.history] == [(1, "2030-01-01", {"claim-4"})]
    assert lock.history[0].claims["claim-4"] == old.claims["claim-4"]
    assert prereg.verify(frozen) == []
    assert not [path for path in (frozen / "prereg").iterdir() if path.name.startswith(".")]


def test_a_claim_with_rows_is_not_frozen_again_and_says_what_to_append(frozen: Path) -> None:
    before = (frozen / prereg.LOCK).read_bytes()
    edit(frozen, CLAIMS, "title: Coverage", "title: Covering")
    edit(frozen, CLAIMS, "title: Damage", "title: Any damage")
    edit(frozen, "analysis/estimands/coverage.py", "# ", "## ")
    with pytest.raises(prereg.FrozenError, match="claim-1 ") as error:
        prereg.freeze(frozen, lambda claim: claim == "claim-1", TODAY)
    assert (frozen / prereg.LOCK).read_bytes() == before
    now = all_digests(frozen)["claim-1"]
    assert error.value.entries == (
        f"## {TODAY} claim-1 design {now.design}",
        f"## {TODAY} claim-1 judging {now.judging}",
    )
    with (frozen / prereg.DEVIATIONS).open("a") as file:
        for entry in error.value.entries:
            file.write(f"\n{entry}\n\nA word was changed; no verdict had been seen.\n")
    lock = prereg.freeze(frozen, lambda claim: claim == "claim-1", TODAY)
    assert lock.claims["claim-4"] == all_digests(frozen)["claim-4"]  # it has no rows: frozen anew
    assert lock.claims["claim-1"] != now  # it has: the registered digests stay
    assert prereg.verify(frozen) == []
    accepted = prereg.accept(frozen, "claim-1")
    assert (accepted.design, accepted.judging) == (now.design, now.judging)
    assert [(d.kind, d.text) for d in accepted.deviations] == [
        ("design", "A word was changed; no verdict had been seen."),
        ("judging", "A word was changed; no verdict had been seen."),
    ]
    edit(frozen, CLAIMS, "title: Covering", "title: Covered")  # a further change needs a further entry
    with pytest.raises(UserError, match="claim-1"):
        prereg.accept(frozen, "claim-1")


def test_a_changed_grid_under_a_declared_design_accepts_registered_and_new_rows(frozen: Path) -> None:
    registered = prereg.grid_digest(load(frozen), "replay", frozen)
    edit(frozen, "configs/profile/laptop.yaml", "steps: 6", "steps: 5")
    now = all_digests(frozen)["claim-2"]
    other = "ab" * 32
    (frozen / prereg.DEVIATIONS).write_text(
        f"## {TODAY} claim-2 design {now.design}\nShorter.\n## {TODAY} claim-2 grid {other}\nRows of a colleague.\n"
    )
    assert prereg.accept(frozen, "claim-2").grids == {registered, now.grid, other}
    assert "claim-1" in {mismatch.claim for mismatch in prereg.verify(frozen)}  # the entry is not for this one
    assert "claim-2" not in {mismatch.claim for mismatch in prereg.verify(frozen)}


def published(root: Path, claim_id: str, **over: object) -> Path:
    """Publish what judging would have written where every measure is well inside its support rule."""
    registry, locked = load(root), prereg.read_lock(root).claims[claim_id]
    claim = registry.claim(claim_id)
    good = {rule.measure: rule.value + (0.02 if rule.op[0] == ">" else -0.02) for rule in claim.supported_if}
    bounds = ("low", "estimate", "high", "kill_low", "kill_high")
    measures = {name: dict.fromkeys(bounds, value) for name, value in good.items()}
    strata = [
        {"name": str(k), "n": 99, "clusters": 30, "measures": measures} for k in range(len(claim.strata.levels) or 1)
    ]
    verdict = {"verdict": "SUPPORTED", "reasons": [], "strata": strata, "missing": 0, "failed": 0, "planned": 99}
    verdict |= {"level": 0.95, "kill_level": 1 - 0.05 / len(strata), "design": locked.design, "judging": locked.judging}
    path = root / f"analysis/published/{claim_id}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(verdict | over))
    return path


def test_a_published_verdict_counts_as_rows_and_must_carry_known_digests(frozen: Path) -> None:
    published(frozen, "claim-4")
    assert prereg.verify(frozen) == []
    edit(frozen, CLAIMS, "title: Damage", "title: Any damage")
    with pytest.raises(prereg.FrozenError, match="claim-4"):
        prereg.freeze(frozen, no_rows, TODAY)
    edit(frozen, CLAIMS, "title: Any damage", "title: Damage")
    published(frozen, "claim-4", design="0" * 64)
    (mismatch,) = prereg.verify(frozen)
    assert (mismatch.claim, mismatch.part) == ("claim-4", "analysis/published/claim-4.json")


@pytest.mark.parametrize("claim_id", ["claim-1", "claim-2", "claim-3", "extension-6"])
@pytest.mark.parametrize("other", ["KILLED", "INCONCLUSIVE", "REFUTED"])
def test_a_published_verdict_must_follow_from_its_own_strata(frozen: Path, claim_id: str, other: str) -> None:
    path = published(frozen, claim_id)
    assert prereg.verify(frozen) == []
    published(frozen, claim_id, verdict=other)
    (mismatch,) = prereg.verify(frozen)
    assert (mismatch.claim, mismatch.part) == (claim_id, f"analysis/published/{path.name}")
    assert f"is {other} there, but its strata and counts make it SUPPORTED" in mismatch.message


def _bound(verdict: dict, bound: str, value: float | None) -> None:
    verdict["strata"][1] = json.loads(json.dumps(verdict["strata"][1]))
    verdict["strata"][1]["measures"]["coverage"][bound] = value


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda v: _bound(v, "low", 0.94), "INCONCLUSIVE"),
        (lambda v: _bound(v, "low", None), "INCONCLUSIVE"),
        (lambda v: _bound(v, "kill_high", 0.94), "KILLED"),
        (lambda v: v["strata"].pop(), "NOT_EVALUATED"),
        (lambda v: v["strata"].clear(), "NOT_EVALUATED"),
        (lambda v: v["strata"][0].update(clusters=19), "NOT_EVALUATED"),
        (lambda v: v.update(missing=1), "NOT_EVALUATED"),
        (lambda v: v.update(failed=1), "NOT_EVALUATED"),
        (lambda v: v.update(kill_level=0.5), "NOT_EVALUATED"),
    ],
)
def test_edited_numbers_make_another_outcome(frozen: Path, change, outcome: str) -> None:
    verdict = json.loads(published(frozen, "claim-1").read_text())
    change(verdict)
    published(frozen, "claim-1", **verdict)
    (mismatch,) = prereg.verify(frozen)
    assert mismatch.message.endswith(f"make it {outcome}")
    published(frozen, "claim-1", **verdict | {"verdict": outcome, "reasons": ["said"]})
    assert prereg.verify(frozen) == []


def test_no_verdict_needs_a_reason(frozen: Path) -> None:
    published(frozen, "claim-1", verdict="NOT_EVALUATED")
    assert "gives no reason" in prereg.verify(frozen)[0].message
    published(frozen, "claim-1", verdict="NOT_EVALUATED", reasons=["72 of 504 cells missing"], strata=[])
    assert prereg.verify(frozen) == []


def test_the_published_verdicts_of_this_repository_follow_from_their_strata(tmp_path: Path) -> None:
    for folder in ("prereg", "configs", "analysis", "cert"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "out"))
    assert list((tmp_path / "analysis" / "published").glob("*.json")) and prereg.verify(tmp_path) == []


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[1]", "7", "{}", '{"verdict": 1, "design": "", "judging": ""}', "[" * 100_000]
)
def test_a_published_file_that_is_no_verdict_is_one_line(frozen: Path, text: str) -> None:
    published(frozen, "claim-2").write_text(text)
    for does in (prereg.verify, lambda root: prereg.freeze(root, no_rows, TODAY)):
        edit(frozen, CLAIMS, "title: Fidelity", "title: Fidelities")  # freeze asks of what has changed alone
        with pytest.raises(UserError, match=r"analysis/published/claim-2\.json: no .*expected the JSON"):
            does(frozen)
        edit(frozen, CLAIMS, "title: Fidelities", "title: Fidelity")


@pytest.mark.parametrize(
    "over", [{"strata": [{}]}, {"strata": 1}, {"strata": [{"n": 1, "clusters": 99, "measures": []}] * 3}]
)
def test_a_published_verdict_without_its_numbers_is_one_line(frozen: Path, over: dict) -> None:
    published(frozen, "claim-1", **over)
    with pytest.raises(UserError, match=r"claim-1\.json: no whole verdict"):
        prereg.verify(frozen)


def test_a_published_verdict_is_the_committed_one(frozen: Path) -> None:
    git = ["git", "-C", str(frozen), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    path = published(frozen, "claim-1")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "prereg", "analysis"], check=True)
    subprocess.run([*git, "commit", "-qm", "publish"], check=True)
    assert prereg.verify(frozen) == []
    edited = json.loads(path.read_text())
    edited["strata"][0]["measures"]["coverage"]["estimate"] = 0.999  # consistent, and yet not what was published
    path.write_text(json.dumps(edited))
    assert "differs from the committed one" in prereg.verify(frozen)[0].message
    path.unlink()
    assert "differs from the committed one" in prereg.verify(frozen)[0].message


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("## yesterday claim-1 design " + "0" * 64, "line 3"),
        ("## 2030-02-30 claim-1 design " + "0" * 64, "line 3"),
        ("## 2030-01-02 claim-9 design " + "0" * 64, "line 3"),
        ("## 2030-01-02 claim-1 designs " + "0" * 64, "line 3"),
        ("## 2030-01-02 claim-1 design " + "0" * 63, "line 3"),
        ("## 2030-01-02 claim-1 design " + "0" * 64, "no reason"),
    ],
)
def test_a_deviation_of_another_form_is_refused_with_its_line(frozen: Path, entry: str, words: str) -> None:
    reason = "" if words == "no reason" else "A reason.\n"
    (frozen / prereg.DEVIATIONS).write_text(f"# Deviations\n\n{entry}\n{reason}")
    with pytest.raises(UserError, match=words):
        prereg.accept(frozen, "claim-2")


def test_deviations_are_append_only(frozen: Path) -> None:
    git = ["git", "-C", str(frozen), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert prereg.verify(frozen) == []  # nothing is committed yet
    subprocess.run([*git, "add", "prereg"], check=True)
    subprocess.run([*git, "commit", "-qm", "freeze"], check=True)
    with (frozen / prereg.DEVIATIONS).open("a") as file:
        file.write(f"\n## {TODAY} claim-1 grid {'0' * 64}\n\nA reason.\n")
    assert prereg.verify(frozen) == []
    (frozen / prereg.DEVIATIONS).write_text("# Other\n")
    (mismatch,) = prereg.verify(frozen)
    assert (mismatch.kind, mismatch.part) == ("deviations", prereg.DEVIATIONS)
    with pytest.raises(UserError, match=r"DEVIATIONS\.md: what was committed has been changed"):
        prereg.accept(frozen, "claim-1")  # nothing is judged beside it


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "[]", '{"version": 1}', '{"version": "1", "date": "", "claims": {}, "history": []}']
)
def test_a_damaged_lock_is_named(frozen: Path, text: str) -> None:
    (frozen / prereg.LOCK).write_text(text)
    with pytest.raises(UserError, match="LOCK"):
        prereg.accept(frozen, "claim-1")


def test_a_digest_altered_in_the_lock_is_named(frozen: Path) -> None:
    digest = prereg.read_lock(frozen).claims["claim-5"].design
    edit(frozen, prereg.LOCK, digest, "0" * 64)
    (mismatch,) = prereg.verify(frozen)
    assert (mismatch.claim, mismatch.part) == ("claim-5", prereg.LOCK)
    with pytest.raises(UserError, match=r"LOCK.*claim-5"):
        prereg.accept(frozen, "claim-5")


def test_a_lock_that_cannot_be_written_is_left_as_it_was(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, lock = (frozen / prereg.LOCK).read_bytes(), prereg.read_lock(frozen)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="cannot write prereg/LOCK: No space"):
        write_lock(frozen, replace(lock, version=9))
    assert (frozen / prereg.LOCK).read_bytes() == before
    assert not [path for path in (frozen / "prereg").iterdir() if path.name.startswith(".")]
