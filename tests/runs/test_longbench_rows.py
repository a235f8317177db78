"""LongBench's rows from folders and hub copies, and samples of them. pytest tests/runs/test_longbench_rows.py"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from runs import longbench_rows
from runs.data import TASKS
from runs.errors import UserError
from runs.longbench import PROMPTS
from runs.longbench_rows import OFFICIAL_ROWS, dataset_rows, load_rows, sample

ROW = {"context": "Anna lives in Rome.", "input": "Where?", "answers": ["Rome"], "all_classes": None}
HUB = f"someone/LongBench@{'a' * 40}"


def write(folder: Path, task: str, *rows: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_all_real_rows_are_read_and_counted(shared_data: Callable[[str], Path]) -> None:
    rows = load_rows(str(shared_data("longbench")))
    assert tuple(rows) == TASKS and sum(map(len, rows.values())) == 187
    assert all(row["task"] == task and row["answers"] for task, some in rows.items() for row in some)
    assert len({row["id"] for some in rows.values() for row in some}) == 187
    assert sum(OFFICIAL_ROWS.values()) == 3750


def test_a_folder_may_hold_some_tasks_and_some_are_chosen(tmp_path: Path) -> None:
    source = write(tmp_path, "qasper", ROW, ROW | {"input": "Who?"})
    write(tmp_path, "hotpotqa", ROW)
    assert {task: len(rows) for task, rows in load_rows(source).items()} == {"qasper": 2, "hotpotqa": 1}
    assert list(load_rows(source, ["hotpotqa"])) == ["hotpotqa"]
    with pytest.raises(UserError, match=r"has none of trec; expected files such as trec.jsonl"):
        load_rows(source, ["trec"])
    with pytest.raises(UserError, match="no such folder"):
        load_rows(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no such folder"):
        load_rows("someone/LongBench@main")  # no commit


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("qasper", {"input": None}, "expected texts in the fields 'context' and 'input'"),
        ("qasper", {"answers": "Rome"}, "answers: found str 'Rome'; expected a list"),
        ("qasper", {"answers": []}, "answers: found list"),
        ("hotpotqa", {"all_classes": 5}, "all_classes is '5'; expected a list of texts, or null"),
        ("hotpotqa", {"all_classes": "AB"}, "all_classes is 'AB'"),
        ("trec", {}, "all_classes: found NoneType"),
        ("passage_retrieval_en", {}, "needs answers such as 'Paragraph 7'"),
        ("qasper", {"input": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, task: str, change: dict[str, Any], said: str) -> None:
    whole = ROW | {"answers": ["Paragraph 7"], "all_classes": ["Paragraph 7"]}
    source = write(tmp_path, task, whole, ROW | change)
    with pytest.raises(UserError, match=rf"{task}.jsonl, row 2: .*") as caught:
        load_rows(source)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("task", TASKS)
def test_a_mirror_with_the_template_in_its_contexts_is_refused(tmp_path: Path, task: str) -> None:
    before, after = PROMPTS[task].split("{context}")
    row = ROW | {"answers": ["Paragraph 7"] if task == "passage_retrieval_en" else ["7"], "all_classes": ["7"]}
    load_rows(write(tmp_path, task, row))
    doubled = [before + row["context"], "\n" + before.strip()]
    doubled += [row["context"] + after.split("{input}")[0]] if len(after.split("{input}")[0].strip()) > 25 else []
    for context in doubled:
        with pytest.raises(UserError, match="row 1: 'context' holds the template's own text"):
            load_rows(write(tmp_path, task, row | {"context": context}))


# ---------------------------------------------------------------- hub copies


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return tmp_path / "copy"


def test_a_copy_in_folders_and_one_with_configurations(hub: Path) -> None:
    write(hub / "qasper", "test", ROW)
    assert [row["context"] for row in dataset_rows(str(hub), "qasper", None)] == [ROW["context"]]
    files = "  data_files:\n  - split: test\n    path: elsewhere/test.jsonl\n"
    write(hub / "elsewhere", "test", ROW | {"context": "Bob."})
    (hub / "README.md").write_text(f"---\nconfigs:\n- config_name: trec\n{files}---\n")
    assert [row["context"] for row in dataset_rows(str(hub), "trec", None)] == ["Bob."]


def test_a_copy_of_another_format_or_none_is_refused(hub: Path) -> None:
    (hub / "qasper").mkdir(parents=True)
    (hub / "qasper" / "test.txt").write_text("line\n")
    with pytest.raises(UserError, match=r"qasper is read by Text.*; expected parquet or JSON"):
        dataset_rows(str(hub), "qasper", None)
    with pytest.raises(UserError, match="cannot load trec at None: "):
        dataset_rows(str(hub), "trec", None)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(UserError, match=f"someone/LongBench: cannot load trec at {'a' * 40}: "):
        load_rows(HUB, ["trec"])


def test_a_copy_that_runs_code_is_refused(hub: Path) -> None:
    hub.mkdir()
    (hub / "copy.py").write_text("raise SystemExit('this must not run')\n")
    with pytest.raises(UserError, match="cannot load qasper"):
        dataset_rows(str(hub), "qasper", None)


def test_a_hub_copy_must_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows(name: str, task: str, revision: str) -> list[dict[str, Any]]:
        asked.append((name, task, revision))
        return [ROW] * (150 if task == "multifieldqa_en" else 199)

    monkeypatch.setattr(longbench_rows, "dataset_rows", rows)
    assert len(load_rows(HUB, ["multifieldqa_en"])["multifieldqa_en"]) == 150
    assert asked == [("someone/LongBench", "multifieldqa_en", "a" * 40)]
    with pytest.raises(UserError, match="qasper has 199 rows; expected the original's 200"):
        load_rows(HUB, ["qasper"])


# ---------------------------------------------------------------- samples


def test_a_sample_is_stratified_nested_and_named_by_content(shared_data: Callable[[str], Path]) -> None:
    rows = load_rows(str(shared_data("longbench")))
    small, large = sample(rows, 32, 0), sample(rows, 40, 0)
    assert small.size == 32 and [row["task"] for row in small.rows] == [*TASKS, *TASKS]
    assert large.rows[:32] == small.rows and large.digest != small.digest
    assert sample(rows, 10_000, 0).size == 187  # all there is, and it says so
    shuffled = {task: list(reversed(rows[task])) for task in reversed(TASKS)}
    assert sample(shuffled, 32, 0) == small
    assert {row["id"] for row in sample(rows, 32, 1).rows} != {row["id"] for row in small.rows}
    doubled = {task: some + some for task, some in rows.items()}
    assert sample(doubled, 10_000, 0) == sample(rows, 10_000, 0)


def test_nothing_to_draw_is_refused() -> None:
    for rows, size in (({}, 3), ({"qasper": []}, 3), ({"qasper": [ROW | {"id": "x"}]}, 0)):
        with pytest.raises(UserError, match=f"a sample of {size} out of the"):
            sample(rows, size, 0)
