"""make freeze and make verify as a user sees them: what is printed, the exit code, and what is written."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from runs import prereg
from runs.errors import UserError
from runs.registry import CLAIMS, IDS, ROOT
from scripts import freeze, verify


class FakeStore:
    """Published units by the metadata beside their rows."""

    metas: tuple[dict, ...] = ()

    def __init__(self, root: Path) -> None:
        self.root = root

    def unit_files(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(path=i) for i in range(len(self.metas))]

    def meta(self, path: int) -> dict:
        return self.metas[path]


def unit(design: str, registered: bool = True, profile: str = "laptop") -> dict:
    return {"design": design, "plan": {"registered": registered, "profile": profile}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("prereg", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / prereg.LOCK).unlink(missing_ok=True)
    (tmp_path / prereg.DEVIATIONS).write_text("# Deviations\n")
    manifest = tmp_path / "prereg/manifests/pydoc_topics.json"
    manifest.parent.mkdir(exist_ok=True)
    manifest.write_text('{"documents": []}\n')
    for path in (*prereg.JUDGING, *re.findall(r"(?:analysis|cert)/[\w/]+\.py", (ROOT / CLAIMS).read_text())):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"# {path}\n")
    monkeypatch.setattr(freeze, "ROOT", tmp_path)
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    return tmp_path


def edit(root: Path, old: str, new: str) -> None:
    text = (root / CLAIMS).read_text()
    assert old in text
    (root / CLAIMS).write_text(text.replace(old, new, 1))


def test_freeze_then_nothing_changed_then_a_new_version(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert freeze.main([]) == 0
    assert "version 1" in (said := capsys.readouterr().out) and all(claim in said for claim in IDS)
    before = (root / prereg.LOCK).read_bytes()
    assert freeze.main([]) == 0
    assert "nothing changed" in capsys.readouterr().out
    assert (root / prereg.LOCK).read_bytes() == before
    edit(root, "title: Damage", "title: Any damage")
    assert freeze.main([]) == 0
    said = capsys.readouterr().out
    assert "version 2" in said and "claim-4" in said and "claim-1" not in said


def test_verify_prints_a_line_a_claim(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freeze.main([])
    capsys.readouterr()
    assert verify.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:-1] == [f"{claim} ok" for claim in IDS] and "version 1" in said[-1] and "holds" in said[-1]


def test_verify_names_file_and_claim_and_exits_2_until_restored(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freeze.main([])
    edit(root, 'bound: low, op: ">=", value: 0.95', 'bound: low, op: ">=", value: 0.96')
    capsys.readouterr()
    assert verify.main([]) == 2
    said = capsys.readouterr().out.splitlines()
    wrong = [line for line in said if line.startswith("MISMATCH")]
    assert len(wrong) == 1 and CLAIMS in wrong[0] and "claim-1" in wrong[0]
    assert "claim-2 ok" in said and "claim-1 ok" not in said and "DIFFERS" in said[-1]
    edit(root, 'bound: low, op: ">=", value: 0.96', 'bound: low, op: ">=", value: 0.95')
    assert verify.main([]) == 0


def test_with_rows_freeze_prints_the_entry_and_appending_it_makes_verify_pass(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze.main([])
    grid = prereg.read_lock(root).claims["claim-1"].grid
    monkeypatch.setattr(freeze, "Store", FakeStore)
    monkeypatch.setattr(FakeStore, "metas", (unit(grid),))
    edit(root, "title: Coverage", "title: Covering")
    before = (root / prereg.LOCK).read_bytes()
    capsys.readouterr()
    with pytest.raises(UserError, match=r"claim-1 .*DEVIATIONS\.md"):
        freeze.main([])
    assert (root / prereg.LOCK).read_bytes() == before
    (entry,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("## ")]
    with (root / prereg.DEVIATIONS).open("a") as file:
        file.write(f"\n{entry}\n\nThe title only.\n")
    assert freeze.main([]) == 0
    assert verify.main([]) == 0
    assert "claim-1 ok, with deviations" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "meta", [unit("0" * 64), unit("", registered=False), unit("", profile="smoke")], ids=["design", "request", "smoke"]
)
def test_other_rows_do_not_stop_a_new_version(root: Path, monkeypatch: pytest.MonkeyPatch, meta: dict) -> None:
    freeze.main([])
    grid = prereg.read_lock(root).claims["claim-1"].grid
    monkeypatch.setattr(freeze, "Store", FakeStore)
    monkeypatch.setattr(FakeStore, "metas", ({**meta, "design": meta["design"] or grid},))
    edit(root, "title: Coverage", "title: Covering")
    assert freeze.main([]) == 0
    assert prereg.read_lock(root).version == 2


def test_verify_without_a_lock_is_one_line(root: Path) -> None:
    with pytest.raises(UserError, match="make freeze"):
        verify.main([])
