"""From a planted store to the verdict's JSON and text: outcomes as constructed, digests, determinism, no torch."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import planted
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from analysis import text
from analysis.frame import digest
from analysis.judge import OUT, judged
from runs import prereg
from runs.cells import Plan
from runs.errors import UserError
from runs.store import Store

RULES = replace(prereg.load().rules, resamples=400)


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    return planted.study(tmp_path_factory.mktemp("registered"))


@pytest.fixture
def root(registered, tmp_path):
    return shutil.copytree(registered, tmp_path / "study")


def verdict(root, claim="claim-1", **how):
    return judged(claim, root=root, rules=RULES, **how).result


@pytest.mark.parametrize(("covered", "expected"), [(1.0, "SUPPORTED"), (0.96, "INCONCLUSIVE"), (0.7, "KILLED")])
def test_planted_coverage_gives_its_verdict(root, covered, expected) -> None:
    made = planted.plan(root, steps=4)
    planted.fill(root, made, planted.rows(made, covered))
    result = verdict(root)
    assert (result["verdict"], result["rows"], result["missing"], result["failed"]) == (expected, 1008, 0, 0)


@pytest.mark.parametrize(("noise", "expected"), [(0.2, "SUPPORTED"), (3.0, "KILLED")])
def test_planted_fidelity_gives_its_verdict(root, noise, expected) -> None:
    made = planted.plan(root)
    planted.fill(root, made, planted.rows(made, 1.0, noise))
    assert verdict(root, "claim-2")["verdict"] == expected


def test_conditional_coverage_is_judged_from_the_same_rows(root) -> None:
    def one_bad_head(cell, row):
        if cell["layer"] == 9 and cell["budget"] == 0.125 and cell["step"] <= 3:
            row["radius_assisted"] = row["err"] / 2
        return row

    made = planted.plan(root, steps=8)
    planted.fill(root, made, planted.rows(made, 1.0, change=one_bad_head))
    result = verdict(root, "extension-6")
    assert result["verdict"] == "KILLED"
    assert any("estimate(worst_head) is 0.625" in reason for reason in result["reasons"])
    assert verdict(root)["verdict"] == "SUPPORTED"


# ---------------------------------------------------------------- no verdict, and why


def test_rows_of_two_versions_of_the_code_are_told(root) -> None:
    made = planted.plan(root)
    whole = planted.rows(made)
    first, *rest = made.units
    planted.fill(root, made, whole, units=[first])
    assert verdict(root)["population_notes"] == []
    planted.fill(root, made, whole, units=rest, code="2")
    assert verdict(root)["population_notes"] == ["its rows come from 2 versions of the code (make explain tells which)"]


def test_a_missing_unit_forbids_a_verdict_and_is_said(root) -> None:
    made = planted.plan(root)
    store = planted.fill(root, made, planted.rows(made, 1.0), units=list(made.units)[:-1])
    result = verdict(root)
    assert (result["verdict"], result["missing"], result["rows"]) == ("NOT_EVALUATED", 72, 432)
    assert result["reasons"] == ["72 of 504 cells missing"]
    assert result["strata"][0]["estimate"] == 1.0  # what there is, is shown
    assert result["next"].startswith("make claim-1   runs the missing cells")
    planted.fill(root, made, planted.rows(made, 1.0))
    assert store.missing(made) == [] and verdict(root)["verdict"] == "SUPPORTED"


def test_failed_examples_count_and_above_one_per_cent_forbid_a_verdict(root) -> None:
    made = planted.plan(root)
    planted.fill(root, made, planted.rows(made, 1.0), failing={"planted 5"})
    result = verdict(root)
    assert (result["verdict"], result["failed"], result["rows"]) == ("NOT_EVALUATED", 18, 504)
    assert result["reasons"] == ["18 of 504 cells failed (3.6%, at most 1%)"]
    assert [(s["n"], s["clusters"], s["estimate"]) for s in result["strata"]] == [(162, 27, 1.0)] * 3  # no gap, no miss


def test_too_few_documents_forbid_a_verdict(root) -> None:
    made = planted.plan(root, documents=19)
    planted.fill(root, made, planted.rows(made, 1.0))
    assert verdict(root)["reasons"][0] == "budget 12.5 %: 19 documents of at least 20, 1 short"


@pytest.mark.parametrize(
    ("header", "how", "reason"),
    [
        ({"profile": "smoke"}, {"profile": "smoke"}, "smoke profile"),
        ({"model": {"name": "tiny", "digest": "0", "trained": False}}, {}, "random weights"),
        (
            {"request": planted.REQUEST | {"args": "replay.delta=0.2"}},
            {},
            "ARGS=replay.delta=0.2 is not the registered",
        ),
    ],
)
def test_what_is_no_evidence_gets_no_verdict(root, header, how, reason) -> None:
    made = planted.plan(root, **header)
    planted.fill(root, made, planted.rows(made, 0.5))
    result = verdict(root, request=made.header["request"], **how)
    assert result["verdict"] == "NOT_EVALUATED" and result["strata"][0]["estimate"] < 0.7
    assert any(reason in why for why in result["reasons"])


def test_undefined_radii_everywhere_leave_fidelity_unjudged(root) -> None:
    made = planted.plan(root)
    undefined = {cell: row | {"radius_empirical_bernstein": None} for cell, row in planted.rows(made).items()}
    planted.fill(root, made, undefined)
    assert verdict(root)["verdict"] == "KILLED"  # each a miss
    result = verdict(root, "claim-2")
    assert result["verdict"] == "NOT_EVALUATED" and "none of its cells counts" in result["reasons"][0]
    assert result["strata"][0]["estimate"] is None


@pytest.mark.parametrize("claim", prereg.IDS)
def test_without_rows_every_claim_says_what_is_missing(root, claim) -> None:
    registry = prereg.load(root)
    cells = registry.grids[registry.claim(claim).grid].profiles["laptop"].cells
    result = verdict(root, claim)
    assert (result["verdict"], result["missing"], result["strata"]) == ("NOT_EVALUATED", cells, [])
    assert f"{cells:,} of {cells:,} cells missing" in result["reasons"]
    assert result["population"] is None and text.sentence(result) == "NOT_EVALUATED on laptop: no rows"


# ---------------------------------------------------------------- registration


def test_a_changed_threshold_is_refused_by_name_and_accepted_when_restored(root) -> None:
    made = planted.plan(root)
    planted.fill(root, made, planted.rows(made, 1.0))
    path = root / "prereg" / "claims.yaml"
    before = path.read_text()
    path.write_text(before.replace('bound: high, op: "<", value: 0.95', 'bound: high, op: "<", value: 0.94', 1))
    with pytest.raises(UserError, match=r"claims\.yaml.*claim-1"):
        verdict(root)
    path.write_text(before)
    assert verdict(root)["verdict"] == "SUPPORTED"


def test_a_changed_interval_module_is_refused(root) -> None:
    path = root / "analysis" / "intervals.py"
    path.write_text(path.read_text() + "\n# wider\n")
    with pytest.raises(UserError, match=r"intervals\.py.*claim-1"):
        verdict(root)


def test_rows_of_another_design_are_refused_unless_a_deviation_names_it(root) -> None:
    made = planted.plan(root, design="e" * 64)
    planted.fill(root, made, planted.rows(made, 1.0))
    with pytest.raises(UserError, match="another design"):
        verdict(root)
    entry = f"\n## 2026-02-01 claim-1 grid {'e' * 64}\nA cosmetic change of a comment.\n"
    with (root / "prereg" / "DEVIATIONS.md").open("a") as file:
        file.write(entry)
    result = verdict(root)
    assert result["verdict"] == "SUPPORTED" and result["deviations"][0]["digest"] == "e" * 64
    assert text.sentence(result).endswith("made-up rows, with deviations")


# ---------------------------------------------------------------- the result


@pytest.fixture(scope="module")
def whole(registered, tmp_path_factory):
    root = shutil.copytree(registered, tmp_path_factory.mktemp("whole") / "study")
    made = planted.plan(root)
    planted.fill(root, made, planted.rows(made, 0.97, 0.5))
    return root


def test_the_json_has_the_stable_keys_digests_and_no_nan(whole) -> None:
    result = verdict(whole)
    stored = json.loads((whole / OUT / "claim-1.json").read_text(), parse_constant=pytest.fail)
    assert stored == result
    keys = "id verdict population profile design judging strata missing failed rows deviations"
    assert set(keys.split()) <= set(stored)
    stratum_keys = "name estimate low high n clusters supported_if killed_if paper"
    assert all(set(stratum_keys.split()) <= set(stratum) for stratum in stored["strata"])
    digests = prereg.digests(prereg.load(whole), "claim-1", whole)
    assert (stored["design"], stored["judging"]) == (digests.design, digests.judging)
    assert stored["strata"][0] | {"paper": 0.969, "supported_if": "low(coverage) >= 0.95"} == stored["strata"][0]
    assert stored["store"] == "runs/store"  # no folder of one machine


def test_same_rows_same_bytes_and_another_seed_moves_only_bounds(whole) -> None:
    def written(**over):
        judged("claim-2", root=whole, rules=replace(RULES, **over))
        return (whole / OUT / "claim-2.json").read_bytes()

    assert written() == written()
    one, other = json.loads(written())["strata"], json.loads(written(seed=8))["strata"]
    assert [s["estimate"] for s in one] == [s["estimate"] for s in other]
    assert all(a["low"] != b["low"] for a, b in zip(one, other, strict=True))


def test_the_order_of_units_changes_nothing(registered, whole, tmp_path) -> None:
    root = shutil.copytree(registered, tmp_path / "study")
    made = planted.plan(root)
    planted.fill(root, made, planted.rows(made, 0.97, 0.5), units=list(reversed(made.units)))
    assert verdict(root) == verdict(whole)


@pytest.mark.parametrize("claim", ["claim-1", "claim-2", "extension-6", "claim-7", "extension-2"])
def test_the_printed_verdict_fits_and_says_everything(whole, claim) -> None:
    result = verdict(whole, claim)
    said = text.render(result)
    assert max(map(len, said.splitlines())) <= 100
    assert text.sentence(result) in said and result["next"].split("   ")[0] in " ".join(said.split())
    assert result["design"][:12] in said and result["judging"][:12] in said and result["store"] in said
    for stratum in result["strata"]:
        of = stratum["measures"][next(iter(stratum["measures"]))]
        line = f"{stratum['n']:,} cells, {stratum['clusters']} documents"
        assert line in said and f"{of['low']:.4f} to {of['high']:.4f}" in said
    for reason in result["reasons"]:
        assert reason in " ".join(said.split())
    assert " ".join(result["paper"].split()) in " ".join(said.split())


def test_the_paper_stands_beside(whole) -> None:
    line = next(line for line in text.render(verdict(whole)).splitlines() if line.strip().startswith("coverage  "))
    assert line.endswith("0.9690")


def test_notes_on_the_population_are_printed(root) -> None:
    note = "3 of 28 documents differ from the registered texts"
    made = planted.plan(root, population_notes=[note])
    planted.fill(root, made, planted.rows(made, 1.0))
    assert note in text.render(verdict(root))


def test_a_folder_that_cannot_be_written_is_named(whole, root) -> None:
    (root / OUT).parent.mkdir(exist_ok=True)
    (root / OUT).write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cannot write .*claim-1\.json"):
        verdict(root)


def test_judging_imports_no_torch_and_nothing_slow(whole) -> None:
    code = (
        "import sys, pathlib; from analysis.judge import judged; import analysis.text, analysis.tables, analysis.figures\n"
        "judged('claim-1', root=pathlib.Path(sys.argv[1])); judged('claim-2', root=pathlib.Path(sys.argv[1]))\n"
        "heavy = ('torch', 'transformers', 'datasets', 'hydra', 'omegaconf', 'sklearn', 'matplotlib')\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in heavy or name == 'scipy.stats'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(whole)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- rows that no run has written


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("err", float("nan"), "expected a finite number"),
        ("radius_empirical_bernstein", float("inf"), "expected a finite number"),
        ("status", "fine", "expected one of ok, failed"),
    ],
)
def test_a_value_that_no_row_may_have_is_refused_by_file_column_and_cell(root, column, value, expected) -> None:
    made = planted.plan(root)
    store = planted.fill(root, made, planted.rows(made, 1.0))
    path = store.unit_files()[3].path
    table = pq.read_table(path)
    values = [value, *table[column].to_pylist()[1:]]
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, table.schema.field(column), pa.array(values)), path)
    with pytest.raises(UserError, match=expected) as error:
        verdict(root, "claim-2")
    assert column in str(error.value) and str(path) in str(error.value)
    assert table["cell"][0].as_py() in str(error.value)


# ---------------------------------------------------------------- a plan that is less than what was registered


def cut(root, made, first, **header):
    """The stored plan with the cells of its first documents alone."""
    keep = pa.array(made.cells["document"].unique().to_pylist()[:first])
    cells = made.cells.filter(pc.is_in(made.cells["document"], value_set=keep))
    Store(root / "runs" / "store").write_plan(Plan({**made.header, **header}, cells))


def test_a_plan_that_was_cut_with_its_header_is_no_verdict_and_says_what_it_lacks(root) -> None:
    made = planted.plan(root, documents=24, heads=((0, 0),), steps=2)  # 144 cells, registered are 108
    planted.fill(root, made, planted.rows(made, 1.0))
    assert verdict(root)["verdict"] == "INCONCLUSIVE"
    cut(root, made, 17, documents={"n": 17, "registered_matching": None})
    result = verdict(root)
    assert result["verdict"] == "NOT_EVALUATED" and (result["missing"], result["planned"]) == (6, 108)
    assert result["reasons"][:2] == [
        "the stored plan lacks 6 of the 108 registered cells",
        "6 of 108 cells missing",
    ]


@pytest.mark.parametrize(
    ("over", "lacks"), [({"model": "mine"}, True), ({"data": "d"}, True), ({"args": "a=1"}, False)]
)
def test_a_request_keeps_the_registered_size_unless_it_has_args(root, over, lacks) -> None:
    request = planted.REQUEST | over
    made = planted.plan(root, documents=3, request=request)
    planted.fill(root, made, planted.rows(made, 1.0))
    result = verdict(root, request=request)
    assert any("registered cells" in reason for reason in result["reasons"]) == lacks
    assert result["missing"] == (54 if lacks else 0)


def test_one_model_in_place_of_four_is_a_quarter_of_the_cells(root) -> None:
    request = planted.REQUEST | {"model": "mine"}
    cells = prereg.load(root).grids["replay"].profiles["paper"].cells
    assert verdict(root, profile="paper", request=request)["missing"] == cells // 4
    assert verdict(root, profile="paper")["missing"] == cells


def test_cells_that_do_not_exist_by_nature_are_not_missing(root) -> None:
    for absent, lacks in ({"cells": 60, "registered": 54}, 0), ({"cells": 60, "registered": 53}, 1):
        made = planted.plan(root, documents=3, absent=absent)  # 54 cells, registered are 108
        planted.fill(root, made, planted.rows(made, 1.0))
        result = verdict(root)
        assert (result["missing"], result["planned"]) == (lacks, 54 + lacks)
        assert any("the stored plan lacks 1 of the 55" in reason for reason in result["reasons"]) == bool(lacks)


def test_seconds_are_no_part_of_the_rows_digest() -> None:
    rows = pd.DataFrame({"cell": ["a", "b"], "score": [1.0, 0.0]})
    timed = [rows.assign(wall_s=seconds) for seconds in ((1.0, 2.0), (3.0, 4.0))]
    assert {digest(rows), *map(digest, timed)} == {digest(rows)}
    assert digest(rows.assign(score=[1.0, 0.5])) != digest(rows)


def test_a_plan_that_was_cut_below_its_header_is_refused_by_file(root) -> None:
    made = planted.plan(root)
    store = planted.fill(root, made, planted.rows(made, 1.0))
    cut(root, made, 24)
    with pytest.raises(UserError, match="24 documents, its header says 28") as error:
        verdict(root)
    assert str(store.plan_files()[0]) in str(error.value)
