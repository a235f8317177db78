"""docs/models.md is what the tables of cert.hf.families say."""

import pytest

from cert.hf.families import REFUSED, TESTED
from scripts import models


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--check"]) == 0, "run: python -m scripts.models"
    assert "up to date" in capsys.readouterr().out
    text = models.PATH.read_text()
    assert all(f"| `{name}` |" in text for name in TESTED | REFUSED.keys())
    assert set(models.MODELS) <= TESTED and not TESTED & REFUSED.keys()


def test_a_stale_page_is_seen_and_written_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PATH", tmp_path / "models.md")
    assert models.main(["--check"]) == 1
    assert models.main([]) == 0 == models.main(["--check"])
    models.PATH.write_text(models.PATH.read_text().replace("Pythia", "Python"))
    assert models.main(["--check"]) == 1
