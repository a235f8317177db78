"""Where rows come from: code, packages, machine."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import provenance
from runs.provenance import collect, git_state, versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _fresh():
    git_state.cache_clear()


@pytest.fixture
def repo(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("store/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "Add code")
    return tmp_path


def git(root, *arguments):
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_clean_checkout(repo):
    assert git_state(repo) == {"revision": git(repo, "rev-parse", "HEAD"), "dirty": False}


def test_ignored_files_do_not_make_it_dirty(repo):
    (repo / "store").mkdir()
    (repo / "store" / "rows").write_text("x")
    assert git_state(repo)["dirty"] is False


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_changed_and_untracked_files_make_it_dirty(repo, name):
    (repo / name).write_text("x = 2\n")
    assert git_state(repo) == {"revision": git(repo, "rev-parse", "HEAD"), "dirty": True}


def test_what_was_imported_is_what_counts(repo):
    before = git_state(repo)
    (repo / "code.py").write_text("x = 3\n")
    assert git_state(repo) == before


def test_variables_of_a_git_hook_point_nowhere_else(repo, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert git_state(repo)["dirty"] is False


def test_no_repository_is_said_with_the_reason(tmp_path):
    state = git_state(tmp_path)
    assert (state["revision"], state["dirty"]) == (None, None)
    assert "not a git repository" in state["reason"]


def test_a_folder_inside_another_repository_has_no_revision(repo):
    (repo / "inner").mkdir()
    state = git_state(repo / "inner")
    assert state == {"revision": None, "dirty": None, "reason": "the code lies in no repository of its own"}


def test_a_repository_without_a_commit_is_said(tmp_path):
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path)["revision"] is None


def test_without_git_the_reason_is_said(repo, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    state = git_state(repo)
    assert state["revision"] is None
    assert "git" in state["reason"]


def test_versions_are_those_installed_and_null_where_absent():
    assert versions(["numpy", "no-such-distribution"]) == {
        "numpy": importlib.metadata.version("numpy"),
        "no-such-distribution": None,
    }


def test_what_is_collected_is_json_and_says_what_was_passed(repo):
    config = {"profile": "smoke", "budgets": (0.125, 0.5)}
    found = collect(config, "cpu", 1, repo)
    assert json.loads(json.dumps(found)) == found | {"config": {"profile": "smoke", "budgets": [0.125, 0.5]}}
    assert (found["device"], found["threads"], found["cpus"]) == ("cpu", 1, os.cpu_count())
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["host"] and found["platform"]
    assert found["git"]["dirty"] is False


def test_every_package_is_one_this_project_depends_on():
    names = {name.lower() for name in provenance.PACKAGES}
    assert names <= {line.split("==")[0].lower() for line in (ROOT / "requirements.lock").read_text().splitlines()}


def test_no_package_is_imported():
    code = "import sys; from runs.provenance import collect; collect({}, 'cpu', 1); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
