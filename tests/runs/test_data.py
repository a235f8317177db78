"""Documents: no overlap, no double, broken input named by file and line."""

import json
from pathlib import Path

import pytest

from runs.data import TASKS, longbench_documents, longbench_rows, pydoc_corpus, pydoc_documents
from runs.errors import UserError
from runs.models import ByteTokenizer

BYTES = ByteTokenizer()


def test_the_corpus_holds_no_paragraph_twice() -> None:
    paragraphs = [" ".join(p.split()) for p in pydoc_corpus().split("\n\n") if p.strip()]
    assert len(paragraphs) > 1000 and len(set(paragraphs)) == len(paragraphs)


def test_documents_are_disjoint_slices_spread_over_the_corpus() -> None:
    corpus = pydoc_corpus().encode()
    found = pydoc_documents(BYTES, 1000, 40)
    starts = [corpus.index(bytes(d.ids)) for d in found]
    slices = len(corpus) // 1000
    assert starts == [i * slices // 40 * 1000 for i in range(40)]
    assert len({d.sha256 for d in found}) == 40 and all(len(d.ids) == 1000 for d in found)
    assert [d.sha256 for d in pydoc_documents(BYTES, 1000, 40)] == [d.sha256 for d in found]
    with pytest.raises(UserError, match="expected 40"):
        pydoc_documents(BYTES, 100_000, 40)


def write(folder: Path, task: str, contexts: list[str]) -> None:
    rows = [json.dumps({"context": c, "input": "?", "answers": ["x"]}, ensure_ascii=False) for c in contexts]
    (folder / f"{task}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def test_longbench_takes_the_tasks_in_turn_and_no_context_twice(tmp_path: Path) -> None:
    write(tmp_path, "qasper", ["a" * 60, "b" * 60, "a" * 60, "short"])
    write(tmp_path, "trec", ["a" * 60, "c" * 60, "d" * 60])
    found = longbench_documents(tmp_path, BYTES, 50, 4)
    assert [(d.task, bytes(d.ids[:1])) for d in found] == [
        ("qasper", b"a"), ("trec", b"c"), ("qasper", b"b"), ("trec", b"d")
    ]  # fmt: skip
    with pytest.raises(UserError, match="4 distinct contexts of 50 tokens or more: expected 5"):
        longbench_documents(tmp_path, BYTES, 50, 5)


def test_shares_of_several_models_are_disjoint(tmp_path: Path) -> None:
    write(tmp_path, "qasper", [chr(97 + i) * 60 for i in range(26)])
    shares = [{d.sha256 for d in longbench_documents(tmp_path, BYTES, 50, 4, (i, 3))} for i in range(3)]
    assert all(len(s) == 4 for s in shares) and len(set.union(*shares)) == 12


BROKEN = ['{"context": "x"', '["context"]', '{"context": 3}', '{"input": "no context"}', '{"context": "\\ud800 half"}']
BROKEN += ["[" * 200_000, '{"context": "x", "n": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    write(tmp_path, "trec", ["fine"])
    with (tmp_path / "trec.jsonl").open("a") as file:
        file.write("\n" + broken + "\n")
    with pytest.raises(UserError, match=r"trec\.jsonl, line 3: "):
        list(longbench_rows(tmp_path / "trec.jsonl"))


def test_folders_without_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        longbench_documents(tmp_path / "nowhere", BYTES, 5, 1)
    with pytest.raises(UserError, match="none of the 16 tasks"):
        longbench_documents(tmp_path, BYTES, 5, 1)
    (tmp_path / "trec.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        longbench_documents(tmp_path, BYTES, 5, 1)


def test_real_rows_give_documents_of_every_task(shared_data) -> None:
    found = longbench_documents(shared_data("longbench"), BYTES, 2000, 56)
    assert {d.task for d in found} == set(TASKS) and len({d.sha256 for d in found}) == 56
