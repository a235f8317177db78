"""Making a plan: silent while it is quick, with progress once it is not."""

import pytest

from runs import planning


@pytest.mark.parametrize("slow", [False, True])
def test_progress_is_shown_of_what_takes_long_alone(slow: bool, monkeypatch, capsys) -> None:
    if slow:
        monkeypatch.setattr(planning, "PATIENCE", 0.0)
    assert list(planning.shown(["a", "b"], "poems at 9 tokens")) == ["a", "b"]
    out, said = capsys.readouterr()
    assert out == "" and ("planning poems at 9 tokens" in said) == slow and (said == "") == (not slow)
