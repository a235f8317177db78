"""make readme and make claims; and README itself must hold what the published verdicts say."""

import json
from pathlib import Path

import pytest
from conftest import ROOT

from analysis.tables import BEGIN, END
from scripts import claims, readme


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README of its own, beside published verdicts of its own."""
    (tmp_path / "analysis" / "published").mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"# kvcert\n{BEGIN}\n{END}\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    return tmp_path


def test_readme_is_not_stale() -> None:
    assert readme.main(["--check"]) == 0, "make readme"


def test_check_finds_a_stale_table_and_writes_nothing(copy, capsys) -> None:
    before = (copy / "README.md").read_text()
    assert readme.main(["--check"]) == 1 and "stale" in capsys.readouterr().out
    assert (copy / "README.md").read_text() == before
    assert readme.main([]) == 0 and readme.main(["--check"]) == 0
    assert "**NOT_EVALUATED** not run yet" in (copy / "README.md").read_text()


def write(folder, **over):
    (folder / "analysis" / "out").mkdir(parents=True)
    result = {
        "verdict": "KILLED",
        "profile": "laptop",
        "population": "a model",
        "deviations": [],
        "design": "1",
        "judging": "2",
    }
    (folder / "analysis" / "out" / "claim-1.json").write_text(json.dumps(result | over))


def test_claims_lists_all_with_what_they_ask(copy, capsys) -> None:
    write(copy)
    assert claims.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13
    assert " ".join(lines[0].split()) == "claim-1 Coverage KILLED on laptop: a model"
    assert "not judged yet: make claim-2" in lines[1]


def test_claims_tells_a_verdict_of_other_digests(copy, capsys) -> None:
    write(copy)
    (copy / "prereg").mkdir()
    locked = {"design": "1", "judging": "other", "grid": "3", "parts": {}}
    lock = {"version": 1, "date": "2026-01-01", "claims": {"claim-1": locked}, "history": []}
    (copy / "prereg" / "LOCK").write_text(json.dumps(lock))
    claims.main([])
    assert "judged with other digests than the locked ones: make claim-1" in capsys.readouterr().out.splitlines()[0]


def test_the_root_is_the_repositorys() -> None:
    assert readme.ROOT == claims.ROOT == ROOT
