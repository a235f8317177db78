"""README's verdict table from published verdicts."""

import json

import pytest

from analysis.tables import BEGIN, END, replaced, verdicts
from runs import prereg
from runs.errors import UserError

REGISTRY = prereg.load()
STRATUM = {"name": "budget 25 %", "measures": {"coverage": {"estimate": 0.97, "low": 0.96, "high": 0.98}}}
RESULT = {
    "id": "claim-1", "verdict": "SUPPORTED", "profile": "laptop", "population": "a model; some texts", "deviations": [],
    "strata": [STRATUM], "design": "1", "judging": "2",
}  # fmt: skip


def test_every_claim_has_a_row_and_what_is_not_published_was_not_run(tmp_path) -> None:
    (tmp_path / "claim-1.json").write_text(json.dumps(RESULT))
    rows = verdicts(REGISTRY, tmp_path).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {claim}" for claim in prereg.IDS]
    assert "**SUPPORTED** on laptop: a model; some texts" in rows[0]
    assert "budget 25 %: coverage 0.970 [0.960, 0.980]" in rows[0]
    assert all("**NOT_EVALUATED** not run yet" in row for row in rows[1:])
    assert all(row.count("|") == 6 for row in rows)


def test_a_model_is_named_once_and_the_measures_of_a_stratum_share_a_line(tmp_path) -> None:
    two = {"coverage": STRATUM["measures"]["coverage"], "worst_head": {"estimate": 0.9, "low": None, "high": 1}}
    strata = [{"name": "a model, budget 25 %", "measures": two}]
    (tmp_path / "claim-1.json").write_text(json.dumps(RESULT | {"strata": strata}))
    assert "| budget 25 %: coverage 0.970 [0.960, 0.980], worst head 0.900 [undefined, 1.000] |" in verdicts(
        REGISTRY, tmp_path
    )


def test_a_name_leaves_no_cell_of_the_table(tmp_path) -> None:
    evil = f"a | b\n{END} <script>"
    (tmp_path / "claim-1.json").write_text(
        json.dumps(RESULT | {"population": evil, "strata": [STRATUM | {"name": evil}]})
    )
    row = verdicts(REGISTRY, tmp_path).splitlines()[2]
    assert row.count(" | ") == 4 and row.count(r"a \| b &lt;!-- verdicts:end --> &lt;script>") == 2


def test_strata_without_rows_are_counted_and_not_listed(tmp_path) -> None:
    empty = {"name": "another", "measures": {}}
    (tmp_path / "claim-1.json").write_text(json.dumps(RESULT | {"strata": [STRATUM, empty, empty]}))
    assert "[0.960, 0.980]<br>without rows: 2 of 3 strata |" in verdicts(REGISTRY, tmp_path)


def test_deviations_are_told(tmp_path) -> None:
    (tmp_path / "claim-1.json").write_text(json.dumps(RESULT | {"deviations": [{"date": "2026-01-01"}]}))
    assert "some texts, with deviations" in verdicts(REGISTRY, tmp_path)


def test_a_damaged_verdict_is_named(tmp_path) -> None:
    (tmp_path / "claim-1.json").write_text('{"verdict": "SUPP')
    with pytest.raises(UserError, match=r"claim-1\.json"):
        verdicts(REGISTRY, tmp_path)


def test_only_the_text_between_the_marks_changes() -> None:
    readme = f"# title\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(readme, "new") == f"# title\n{BEGIN}\nnew\n{END}\nafter\n"
    assert replaced(replaced(readme, "new"), "new") == replaced(readme, "new")


@pytest.mark.parametrize("text", ["no marks", f"{BEGIN} only", f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_missing_or_doubled_marks_are_refused(text) -> None:
    with pytest.raises(UserError, match="README"):
        replaced(text, "new")


@pytest.mark.parametrize("text", ["", "null", "[1]", "[]", "7", '"x"', "{}", '{"verdict": "KILLED"}', "[" * 100_000])
def test_a_file_that_is_no_verdict_is_named_in_one_line(tmp_path, text) -> None:
    (tmp_path / "claim-2.json").write_text(text)
    with pytest.raises(UserError, match=r"claim-2\.json: .*expected the JSON that judging writes"):
        verdicts(REGISTRY, tmp_path)


@pytest.mark.parametrize(
    "over",
    [{"population": 1}, {"deviations": None}, {"strata": None}, {"strata": [1]}, {"strata": [{"name": "a"}]},
     {"strata": [{"name": "a", "measures": {"m": {"estimate": "x", "low": 0, "high": 1}}}]}, {"id": "claim-2"},
     {"strata": [{"name": "a", "measures": {"m": {"estimate": 10**400, "low": 0, "high": 1}}}]}, {"verdict": "SUPORTED"},
     {"strata": [{"name": "a", "measures": {"m": {"estimate": float("inf"), "low": 0, "high": 1}}}]}, {"verdict": ""}],
)  # fmt: skip
def test_a_verdict_of_another_form_is_named_in_one_line(tmp_path, over) -> None:
    (tmp_path / "claim-1.json").write_text(json.dumps(RESULT | over))
    with pytest.raises(UserError, match=r"claim-1\.json: .*expected"):
        verdicts(REGISTRY, tmp_path)
