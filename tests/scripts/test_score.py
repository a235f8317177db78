"""python -m scripts.score as its users see it. pytest tests/scripts/test_score.py"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runs.registry import ROOT
from scripts import _cli, score

GOOD = {"pred": "Rome", "answers": ["Rome"], "all_classes": None, "length": 3}


def write(folder: Path, name: str, *rows: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    code = _cli.run(lambda: score.main([str(word) for word in argv]))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_published_scores_come_out_of_the_command(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    """Some quick tasks; tests/runs/test_metrics.py has all sixteen."""
    folder = shared_data("longbench_preds/llama3-8b-instruct")
    published = json.loads((folder / "result.json").read_text())
    tasks = ("2wikimqa", "lcc", "passage_count", "qmsum", "samsum", "trec")
    for task in tasks:
        (tmp_path / f"{task}.jsonl").symlink_to(folder / f"{task}.jsonl")
    (tmp_path / "result.json").write_text("{}")  # the official script writes one beside the predictions
    command = [sys.executable, "-m", "scripts.score", str(tmp_path), "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert list(found) == list(tasks)
    for task in tasks:
        assert found[task].keys() == {"official", "corrected", "n", "scorer_exceptions"}
        assert abs(found[task]["official"] - published[task]) <= 0.01 and found[task]["scorer_exceptions"] == 0
    assert found["lcc"]["n"] == 500 and found["lcc"]["corrected"] > found["lcc"]["official"]


def test_means_in_percent_and_exceptions_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "qasper.jsonl", GOOD, GOOD, GOOD | {"pred": "None"})
    write(tmp_path, "qmsum.jsonl", GOOD | {"pred": ""}, GOOD)
    code, out, err = run(capsys, tmp_path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "qasper": {"official": 66.67, "corrected": 66.67, "n": 3, "scorer_exceptions": 0},
        "qmsum": {"official": 50.0, "corrected": 50.0, "n": 2, "scorer_exceptions": 1},
    }
    code, out, _ = run(capsys, tmp_path)
    lines = out.splitlines()
    assert code == 0 and lines[1].split() == ["qasper", "66.67", "66.67", "3", "0"]
    assert lines[-1].startswith("scored by metrics longbench-v1/1, rouge 1.0.1, rapidfuzz ")


def test_classes_may_be_missing_where_none_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"pred": "Rome\nfoo", "answers": ["Rome"]}
    code, out, _ = run(capsys, write(tmp_path, "triviaqa.jsonl", row), "--json")
    assert code == 0 and json.loads(out)["triviaqa"]["official"] == 100
    code, _, err = run(capsys, write(tmp_path, "trec.jsonl", row))
    assert code == 2 and "trec.jsonl:1: all_classes: found NoneType" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"pred": "x", "answers": ["x"', "broken JSON"),
        ("[" * 100_000, "broken JSON"),
        ('"text"', "expected an object with pred and answers"),
        ('{"answers": ["x"]}', "expected an object with pred and answers"),
        ('{"pred": "x"}', "expected an object with pred and answers"),
        ('{"pred": null, "answers": ["x"]}', "pred: found NoneType 'None'; expected a text"),
        ('{"pred": ["x"], "answers": ["x"]}', "pred: found list"),
        ('{"pred": "x", "answers": "x"}', "answers: found str 'x'; expected a list of at least one text"),
        ('{"pred": "x", "answers": []}', "answers: found list"),
        ('{"pred": "x", "answers": [1]}', "answers: found list"),
        ('{"pred": "x", "answers": {"a": "x"}}', "answers: found dict"),
        ('{"pred": NaN, "answers": ["x"]}', "pred: found float"),
        ('{"pred": "x", "answers": ["x"]} {}', "broken JSON (Extra data"),
        ('{"pred": "x", "answers": ["x"], "length": ' + "9" * 5000 + "}", "broken JSON"),
        (
            json.dumps({"pred": "x" * 100_001, "answers": ["x"]}),
            "pred: 100,001 characters; expected an answer of at most",
        ),
        ("[{}]", "expected an object with pred and answers"),
        ("\0", "broken JSON"),
        ("\ufeff{}", "broken JSON"),
    ],
)
def test_a_bad_line_is_one_line_with_file_and_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    (tmp_path / "qasper.jsonl").write_text(json.dumps(GOOD) + "\n\n" + line)
    code, out, err = run(capsys, tmp_path, "--json")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"error: {tmp_path / 'qasper.jsonl'}:3: ") and said in err


def test_folders_that_cannot_be_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(folder: Path) -> str:
        code, out, err = run(capsys, folder)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
        return err

    assert "no such folder" in said(tmp_path / "nowhere") and "no such file" in said(tmp_path / ("x" * 300))
    assert "no .jsonl file" in said(write(tmp_path / "a", "result.json"))
    assert "qasper.jsonl: no predictions" in said(write(tmp_path / "b", "qasper.jsonl"))
    write(tmp_path / "c", "Qasper.jsonl", GOOD)
    write(tmp_path / "c", "qasper.jsonl", GOOD)
    assert "no such tasks: Qasper.jsonl, other.jsonl; the 16" in said(write(tmp_path / "c", "other.jsonl", GOOD))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "qasper.jsonl").write_bytes(b'{"pred": "\xff"}')
    assert "cannot be read as UTF-8" in said(tmp_path / "d")
    (tmp_path / "e" / "qasper.jsonl").mkdir(parents=True)
    for name in "fgh":
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "f" / "qasper.jsonl")
    (tmp_path / "g" / "qasper.jsonl").symlink_to("nowhere")
    (tmp_path / "h" / "qasper.jsonl").symlink_to("qasper.jsonl")
    for name in "efgh":
        assert "cannot be read: no regular file" in said(tmp_path / name)
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "qasper.jsonl").write_bytes(json.dumps(GOOD).encode("utf-16"))
    assert "cannot be read as UTF-8" in said(tmp_path / "i")


def test_what_editors_and_other_systems_do_to_a_file_changes_no_score(tmp_path: Path, capsys) -> None:
    """A byte order mark, line ends of Windows, blank lines, none at the end."""
    line = json.dumps(GOOD | {"pred": "Rom\u00e8", "answers": ["Rom\u00e8"]}, ensure_ascii=False)
    (tmp_path / "qasper.jsonl").write_bytes(f"\ufeff{line}\r\n\r\n  \r\n{line}".encode())
    code, out, err = run(capsys, tmp_path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["qasper"] == {"official": 100.0, "corrected": 100.0, "n": 2, "scorer_exceptions": 0}


def test_the_chinese_tasks_of_a_whole_run_are_left_out_and_named(tmp_path: Path, capsys) -> None:
    for task in ("qasper", "dureader", "lsht"):
        write(tmp_path, f"{task}.jsonl", GOOD)
    code, out, err = run(capsys, tmp_path, "--json")
    assert code == 0 and list(json.loads(out)) == ["qasper"]
    assert err == "left out: dureader, lsht; only the 16 English tasks are scored\n"
    (tmp_path / "qasper.jsonl").unlink()
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "") and "no .jsonl file" in err


def test_a_table_that_would_fill_the_memory_is_refused_before_rouge_begins_it(tmp_path: Path, capsys) -> None:
    """rouge keeps a cell for each pair of words: what the limit of characters lets pass can be billions."""
    row = {"pred": "a " * 40_000, "answers": ["x", "b " * 2_000], "all_classes": None}
    code, _, said = run(capsys, write(tmp_path / "rouge", "gov_report.jsonl", row))
    assert (
        code == 2 and "gov_report.jsonl:1: pred: 40,000 words, an answer 2,000; expected a product of at most" in said
    )
    assert run(capsys, write(tmp_path / "other", "qasper.jsonl", row))[0] == 0
