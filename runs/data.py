"""Documents: where their text comes from, how it is cut, and the hash that identifies each."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runs.errors import UserError
from runs.sources import is_folder

TASKS = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)


class Tokenizer(Protocol):
    """What the study needs of a tokenizer; those of transformers have it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""


@dataclass(frozen=True)
class Document:
    """A context of exactly ctx_tokens tokens; `sha256` of its text is its identity and its cluster."""

    example: str
    task: str
    sha256: str
    ids: tuple[int, ...]


def pydoc_corpus() -> str:
    """The text of CPython's pydoc topics, in order of their names, each paragraph once.

    Topics quote each other's sections; a paragraph that was seen before (white space aside) is dropped, so that no two
    documents share text.
    """
    from pydoc_data import topics  # half a megabyte of text, needed only here

    seen: set[str] = set()
    kept = []
    for name in sorted(topics.topics):
        for paragraph in re.split(r"\n\s*\n", topics.topics[name]):
            plain = " ".join(paragraph.split())
            if plain and plain not in seen:
                seen.add(plain)
                kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)


def text_sha256(text: str) -> str:
    """SHA-256 of the UTF-8 bytes, hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def pydoc_documents(tokenizer: Tokenizer, ctx_tokens: int, count: int) -> list[Document]:
    """`count` documents of ctx_tokens consecutive tokens, evenly spread over the corpus, none overlapping.

    Of the N whole slices those at floor(i * N / count). Raises UserError where N < count.
    """
    ids = tokenizer.encode(pydoc_corpus(), add_special_tokens=False)
    slices = len(ids) // ctx_tokens
    if slices < count:
        raise UserError(
            f"pydoc topics give {slices} documents of {ctx_tokens} tokens: expected {count}; lower documents"
        )
    starts = [i * slices // count * ctx_tokens for i in range(count)]
    return [_document(tokenizer, "pydoc_topics", ids[start : start + ctx_tokens]) for start in starts]


def longbench_documents(
    folder: Path, tokenizer: Tokenizer, ctx_tokens: int, count: int, part: tuple[int, int] = (0, 1)
) -> list[Document]:
    """`count` contexts from LongBench rows, the tasks in turn: the first ctx_tokens tokens of each, no context twice.

    part (i, of): only contexts whose hash is i modulo `of`, so that several models get disjoint documents.
    Raises UserError naming file and line for a broken row, and where fewer contexts are long enough.
    """
    queues = [_contexts(path, tokenizer, ctx_tokens, part) for path in longbench_files(folder)]
    found: dict[str, Document] = {}
    while queues and len(found) < count:
        for queue in list(queues):
            document = next((d for d in queue if d.sha256 not in found), None)
            if document is None:
                queues.remove(queue)
            elif len(found) < count:
                found[document.sha256] = document
    if len(found) < count:
        raise UserError(f"{folder}: {len(found)} distinct contexts of {ctx_tokens} tokens or more: expected {count}")
    return list(found.values())


def longbench_files(folder: Path) -> list[Path]:
    """The .jsonl files of the 16 English tasks in a folder, in the benchmark's order. UserError if none is there."""
    if not is_folder(folder):
        raise UserError(f"DATA={str(folder)[:200]}: no such folder; expected a folder with LongBench .jsonl files")
    files = [folder / f"{task}.jsonl" for task in TASKS if (folder / f"{task}.jsonl").is_file()]
    if not files:
        raise UserError(f"DATA={folder}: none of the 16 tasks is there; expected files such as qasper.jsonl")
    return files


def longbench_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one task file. UserError naming file and line where a line is no JSON object with a context."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
        raise UserError(f"{path}, line {number}: broken JSON ({error}); expected one object a line") from error
    if not isinstance(row, dict) or not isinstance(row.get("context"), str):
        raise UserError(f"{path}, line {number}: expected an object with a text field 'context'")
    if any("\ud800" <= letter <= "\udfff" for letter in row["context"]):
        raise UserError(f"{path}, line {number}: 'context' holds half of a surrogate pair; expected Unicode text")
    return row


def _contexts(path: Path, tokenizer: Tokenizer, ctx_tokens: int, part: tuple[int, int]) -> Iterator[Document]:
    for row in list(longbench_rows(path)):  # the whole file is checked before the first document is used
        text = row["context"]
        if int(text_sha256(text)[:8], 16) % part[1] != part[0]:
            continue
        ids = tokenizer.encode(text[: 20 * ctx_tokens], add_special_tokens=False)[:ctx_tokens]
        if len(ids) == ctx_tokens:
            yield _document(tokenizer, path.stem, ids)


def _document(tokenizer: Tokenizer, task: str, ids: list[int]) -> Document:
    digest = text_sha256(tokenizer.decode(ids, skip_special_tokens=False))
    return Document(f"{task}-{digest[:16]}", task, digest, tuple(ids))
