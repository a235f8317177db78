"""make readme and make claims; and README itself must hold what the published verdicts say."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import ROOT

from analysis.tables import BEGIN, END
from runs import prereg
from runs.errors import UserError
from scripts import claims, readme


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README of its own, beside published verdicts of its own."""
    (tmp_path / "analysis" / "published").mkdir(parents=True)
    for folder in ("prereg", "configs", "analysis", "cert"):
        ignored = shutil.ignore_patterns("__pycache__", "out", "published", "LOCK")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored, dirs_exist_ok=True)
    prereg.freeze(tmp_path, lambda _: False, "2026-01-01")
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
    locked = prereg.read_lock(folder).claims["claim-1"]
    (folder / "analysis" / "out").mkdir(parents=True)
    result = {
        "id": "claim-1",
        "verdict": "KILLED",
        "profile": "laptop",
        "population": "a model",
        "deviations": [],
        "strata": [],
        "design": locked.design,
        "judging": locked.judging,
    }
    (folder / "analysis" / "out" / "claim-1.json").write_text(json.dumps(result | over))


def test_claims_lists_all_with_what_they_ask(copy, capsys) -> None:
    write(copy)
    assert claims.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14 and lines[-1].startswith("published verdicts: README.md and analysis/published")
    assert " ".join(lines[0].split()) == "claim-1 Coverage KILLED on laptop: a model"
    assert lines[1].endswith("not judged here yet: make claim-2")
    assert lines[9].endswith("not judged here yet: make extension-3 DATA=...")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_readme_that_cannot_be_read_is_one_line(copy, content) -> None:
    (copy / "README.md").unlink()
    if content:
        (copy / "README.md").write_bytes(content)
    with pytest.raises(UserError, match=r"README\.md: cannot be read"):
        readme.main([])


def first_line(capsys) -> str:
    assert claims.main([]) == 0
    return capsys.readouterr().out.splitlines()[0]


def test_claims_tells_a_verdict_of_other_digests(copy, capsys) -> None:
    write(copy, judging="other")
    assert "judged with other digests than the accepted ones: make claim-1" in first_line(capsys)


def test_claims_accepts_what_a_deviation_declares(copy, capsys) -> None:
    path = copy / "analysis" / "estimands" / "coverage.py"
    path.write_text(path.read_text() + "# a comment\n")
    now = prereg.digests(prereg.load(copy), "claim-1", copy).judging
    write(copy, judging=now)
    assert "has changed since: make verify" in first_line(capsys)
    with (copy / "prereg" / "DEVIATIONS.md").open("a") as file:
        file.write(f"\n## 2026-01-02 claim-1 judging {now}\nA comment.\n")
    assert first_line(capsys).endswith("KILLED on laptop: a model")


@pytest.mark.parametrize("text", ["null", "[1]", "{}", '{"verdict": "KILLED"}'])
def test_a_file_that_is_no_verdict_is_one_line(copy, text) -> None:
    write(copy)
    for folder, command in (("out", claims.main), ("published", readme.main)):
        (copy / "analysis" / folder / "claim-1.json").write_text(text)
        with pytest.raises(UserError, match=r"claim-1\.json: .*expected the JSON that judging writes"):
            command([])


def test_the_root_is_the_repositorys() -> None:
    assert readme.ROOT == claims.ROOT == ROOT
