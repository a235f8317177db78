"""The notebooks: stripped of outputs, and executed on the small store as Jupyter would, from their own folder."""

import json
import os
from pathlib import Path

import nbformat
import pytest
import small_store
from conftest import ROOT
from nbclient import NotebookClient

from analysis.look import opened
from runs.errors import UserError

FOLDER = ROOT / "analysis" / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_six() -> None:
    names = ["coverage_and_fidelity", "accuracy_and_damage", "prediction_and_attribution", "recomputation_gains"]
    names += ["assistant_and_conversations", "architectures"]
    assert [path.stem for path in BOOKS] == [f"{k}_{name}" for k, name in enumerate(names, 1)]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_it_holds_no_output_and_little_code(path: Path) -> None:
    book = json.loads(path.read_text())
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None and cell["metadata"] == {} for cell in code)
    assert max(len(cell["source"]) for cell in code) <= 5, "load, call, look: what computes stands in a module"


def test_a_store_that_is_not_there_is_named(monkeypatch, tmp_path: Path) -> None:
    """As by the commands: a name that was mistyped is not a study without rows."""
    monkeypatch.setenv("STORE", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"STORE=.*nowhere"):
        opened("claim-1")


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_it_runs_and_says_that_its_rows_are_made_up(path: Path, tmp_path: Path, monkeypatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PROFILE", "smoke")
    monkeypatch.setenv("STORE", os.path.relpath(small_store.FOLDER, ROOT))
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
    shown = [out["data"]["text/html"] for cell in book.cells for out in cell.get("outputs", []) if "data" in out]
    calls = [cell for cell in book.cells if cell.cell_type == "code"][2:]
    assert len(shown) == len(calls)
    assert all("synthetic rows" in html for html in shown)
