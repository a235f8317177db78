"""The example runs, and the page about the library shows what it prints."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from tiny_folder import tiny_folder

EXAMPLE = ROOT / "examples/certify_generation.py"


def test_the_example_runs_and_the_page_shows_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["certify_generation", str(tiny_folder(tmp_path))])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/library.md").read_text()
    shown = re.search(r"examples\.certify_generation.*?```text\n(.*?)```", page, re.DOTALL)[1].splitlines()
    assert [line[:12] for line in printed] == [line[:12] for line in shown]
    assert len(EXAMPLE.read_text().splitlines()) <= 36


def test_without_a_model_the_example_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["certify_generation"])
    with pytest.raises(SystemExit, match=r"python -m examples\.certify_generation MODEL"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_code_of_the_page_is_python_that_names_what_exists() -> None:
    from cert.hf import Session

    source = (ROOT / "cert/hf/session.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    for block in blocks:
        compile(block, "docs/library.md", "exec")
        for name in re.findall(r"session\.(\w+)", block):
            assert hasattr(Session, name) or f"self.{name}" in source, name
