"""The paper: no number is typed in it, it follows what was found, and equal rows give equal bytes."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from analysis import figures, latex
from analysis.study import Study, study
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
    first = paper.build(folder).read_bytes()
    shutil.rmtree(folder / "build")
    assert paper.build(folder).read_bytes() == first
    text = read(folder / "build" / "main.pdf")
    assert "synthetic rows" in text and "not evaluated" in text and "LOCK version" in text
    assert "??" not in text


def test_what_stops_latex_is_named(folder: Path) -> None:
    (folder / "tables" / "verdicts.tex").unlink()
    with pytest.raises(LookupError, match=r"LaTeX stopped.*tables/verdicts"):
        paper.build(folder)


def test_without_latex_everything_else_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper.figures, "main", lambda _: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert paper.main([]) == 1
    said = capsys.readouterr().err
    assert paper.DEBIAN in said and said.count("\n") == 1
