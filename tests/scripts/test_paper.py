"""The paper: no number is typed in it, it follows what was found, and equal rows give equal bytes."""

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

from analysis import figures, latex
from analysis.study import Study, study
from runs.errors import UserError
from scripts import paper

SOURCES = ("main.tex", "refs.bib", "latexmkrc")
TEXT = (ROOT / "paper" / "main.tex").read_text()
NAMED = re.compile(r"\\(kv|known|range|judged|whether|shown|listed|every|kvend)(?:\[[\d.]+\])?\{([^}]*)\}")


@pytest.fixture(scope="module")
def small() -> Study:
    return study("smoke", store=ROOT / "tests" / "store_small")


@pytest.fixture(scope="module")
def made(small: Study) -> dict[str, bytes]:
    return {**{f"figures/{name}": image for name, image in figures.files(small)}, **dict(latex.files(small))}


@pytest.fixture
def folder(made: dict[str, bytes], tmp_path: Path) -> Path:
    """A copy of paper/ with all that it names, from the small store."""
    if not (shutil.which("latexmk") and shutil.which("pdflatex")):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no LaTeX here: {paper.DEBIAN}")
    for name in SOURCES:
        shutil.copy(ROOT / "paper" / name, tmp_path)
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def read(pdf: Path) -> str:
    if not shutil.which("pdftotext"):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            "no pdftotext here: apt-get install poppler-utils"
        )
    done = subprocess.run(["pdftotext", "-layout", str(pdf), "-"], capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def test_no_number_is_typed() -> None:
    """Digits stand in mathematics, in commands and keys, and in the source's own number; nowhere in a sentence."""
    body = TEXT[TEXT.index(r"\begin{document}") :]
    body = re.sub(r"%.*", "", body)
    body = re.sub(r"\\\[.*?\\\]|\$[^$]*\$", "", body, flags=re.DOTALL)
    body = NAMED.sub("", body)
    body = re.sub(r"\\(?:cite[pt]?|ref|label|input|bibliography\w*)\{[^}]*\}", "", body)
    assert not re.findall(r".*\d.*", body)


def test_every_key_exists_or_waits_for_rows(small: Study, made: dict[str, bytes]) -> None:
    """A misspelt key would print "not evaluated" for ever: each names a claim, and what its rules or its measures are."""
    written = "".join(content.decode() for name, content in made.items() if name.startswith("numbers/"))
    known = set(re.findall(r"\\kvset\{([^}]+)\}", written))
    for path in (ROOT / "analysis" / "published").glob("*.json"):  # some rows have what others lack: a second draw
        known |= latex.of_claim(json.loads(path.read_text()), path.stem).keys()
    lacking = {claim for claim, found in small.judged.items() if not found.result["beside"]}
    for command, key in NAMED.findall(TEXT[TEXT.index(r"\title{") :]):
        if command in ("shown", "listed", "every") or key.split(".")[0] in lacking:
            continue
        wanted = {"range": f"{key}.lowest", "judged": f"{key}.sentence"}.get(command, key)
        assert wanted in known, f"\\{command}{{{key}}}"


def test_equal_rows_give_equal_bytes_and_what_is_absent_says_so(folder: Path) -> None:
    """Also where two are at it, and a third was killed while LaTeX wrote what it reads again."""
    (folder / "build").mkdir()
    (folder / "build" / "main.aux").write_text(r"\@writefile{toc}{")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: paper.build(folder).read_bytes(), range(2))
    assert first == second
    assert {path.name for path in (folder / "build").iterdir()} == {"main.aux", "main.pdf"}
    text = read(folder / "build" / "main.pdf")
    assert "synthetic rows" in text and "not evaluated" in text and "LOCK version" in text
    assert "??" not in text


def test_what_stops_latex_is_named(folder: Path) -> None:
    (folder / "tables" / "verdicts.tex").unlink()
    (folder / "build").mkdir()
    (folder / "build" / "main.pdf").write_text("of other rows")
    with pytest.raises(LookupError, match=r"LaTeX stopped.*tables/verdicts.*build/main\.log"):
        paper.build(folder)
    assert [path.name for path in (folder / "build").iterdir()] == ["main.log"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot write .*build/main\.pdf.*expected"):
        paper.build(tmp_path)


def test_where_the_log_names_no_error_the_line_still_says_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("latexmk", "pdflatex"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 12\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LookupError, match="latexmk says 12 and the log names no error"):
        paper.build(tmp_path)


def test_without_latex_everything_else_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper.figures, "main", lambda _: 0)
    monkeypatch.setattr(paper, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert paper.main([]) == 1
    said = capsys.readouterr().err
    assert paper.DEBIAN in said and said.count("\n") == 1
