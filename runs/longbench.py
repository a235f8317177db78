"""LongBench v1's protocol up to the token ids: templates, truncation, chat wrapper, split, stop ids (Bai et al. 2024)."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from runs import data
from runs.chat import render
from runs.data import Tokenizer
from runs.errors import UserError
from runs.metrics import FIRST_LINE, METRIC_OF

_TEMPLATES = Path(__file__).parent / "templates"  # THUDM/LongBench 2e00731, MIT, byte for byte
PROMPTS: dict[str, str] = json.loads((_TEMPLATES / "dataset2prompt.json").read_text(encoding="utf-8"))
MAX_GEN: dict[str, int] = json.loads((_TEMPLATES / "dataset2maxlen.json").read_text(encoding="utf-8"))
UNWRAPPED = frozenset({"trec", "triviaqa", "samsum", "lcc", "repobench-p"})
# Tasks without agnostic arms: what precedes the end of their context already holds all that is asked.
NO_SPLIT = dict.fromkeys(
    ("gov_report", "multi_news", "passage_count"), "the template states the whole task before the context"
) | {"lcc": "what is asked, the code to go on with, is the end of the context itself"}
JOINED = "context and input are joined in this row"


@dataclass(frozen=True)
class Task:
    """One row of the protocol's table; `no_split` says why a task has no question apart from its context."""

    metric: str
    max_gen: int
    first_line: bool
    chat: bool
    newline_stops: bool
    no_split: str | None


TASKS = {
    task: Task(
        METRIC_OF[task], MAX_GEN[task], task in FIRST_LINE, task not in UNWRAPPED, task == "samsum", NO_SPLIT.get(task)
    )
    for task in data.TASKS
}


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model gets it: the first `split` of its ids hold nothing from behind the context.

    split is None where there is no such part, and `reason` says why; wrapped: whether the chat template was applied.
    """

    task: str
    ids: tuple[int, ...]
    split: int | None
    reason: str | None
    truncated: bool
    wrapped: bool


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding of a task: at most max_gen new tokens, until one of `stop` after the first min_new."""

    max_gen: int
    stop: tuple[int, ...]
    min_new: int

    def cut(self, ids: Sequence[int]) -> list[int]:
        """The new tokens before the first stop id, which may be the very first (none of the first min_new stops)."""
        ends = (i for i, token in enumerate(ids) if i >= self.min_new and token in self.stop)
        return list(ids[: min(next(ends, self.max_gen), self.max_gen)])


def prompt(task: str, row: Mapping[str, Any]) -> str:
    """The official template filled with a row's `context` and `input`. Raises UserError for another task, or no text."""
    if task not in TASKS:
        raise UserError(f"task {task!r}: expected one of {', '.join(TASKS)}")
    for field in ("context", "input"):
        if not isinstance(row.get(field), str):
            raise UserError(f"{task}: a row without text in {field!r}; expected LongBench's fields context and input")
    return PROMPTS[task].format(**row)


def truncate(tokenizer: Tokenizer, text: str, limit: int) -> tuple[str, bool]:
    """The text, its middle cut out where it has more than `limit` tokens, special ones counted; and whether it was.

    The first and the last int(limit / 2) tokens, each decoded without special tokens, joined with nothing.
    """
    head, tail = _halves(tokenizer, text, limit)
    return head + (tail or ""), tail is not None


def check_limit(limit: int, positions: int, model: str) -> None:
    """Raises UserError, naming the model, for a context limit that is above its positions or leaves no token a half."""
    if not 2 <= limit <= positions:
        raise UserError(f"context limit {limit}: {model} has {positions} positions; expected 2 to {positions} tokens")


def build(tokenizer: Tokenizer, task: str, row: Mapping[str, Any], limit: int, positions: int) -> Prompt:
    """The prompt of a row: template, truncation to `limit` tokens, chat wrapper, ids with one BOS, split.

    The chat wrapper (where the task has one and the tokenizer too) comes after the truncation and adds to the length.
    Raises UserError where ids and new tokens together exceed the model's `positions`.
    """
    text = prompt(task, row)
    (head, tail), end = _halves(tokenizer, text, limit), PROMPTS[task].index("{context}") + len(row["context"])
    at: int | None = end if tail is None else _end_of_context(tokenizer, text, end, (head, tail))
    text, wrapped = head + (tail or ""), TASKS[task].chat and bool(getattr(tokenizer, "chat_template", None))
    if wrapped:
        text, at = _wrap(tokenizer, text, at)
    ids = _ids(tokenizer, text)
    if (over := len(ids) + MAX_GEN[task] - positions) > 0:
        raise UserError(
            f"{task}: {len(ids)} tokens of prompt and {MAX_GEN[task]} new ones exceed the model's {positions} positions; "
            f"expected a context limit of at most {min(limit, len(ids)) - over}"
        )
    split, reason = None, TASKS[task].no_split or (None if row["input"] else JOINED)
    if reason is None:
        split, reason = _split(tokenizer, text, at, ids)
    return Prompt(task, tuple(ids), split, reason, tail is not None, wrapped)


def _split(tokenizer: Tokenizer, text: str, at: int | None, ids: list[int]) -> tuple[int | None, str | None]:
    """How many of the text's ids hold only what comes before character `at`, or None and why that is unknown."""
    if at is None:
        return None, "the tokenizer or its chat template rewrites the text, so the context's end is unknown"
    # Both texts begin alike, so their ids do, up to a token across the end: that one belongs to the question.
    pairs = zip(ids, _ids(tokenizer, text[:at]), strict=False)
    alike = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return (alike, None) if alike < len(ids) else (None, "the truncation left no token of the question")


def stop_ids(tokenizer: Any, generation_config: Any) -> tuple[int, ...]:
    """Every id that ends an answer: all of the generation config's (Llama-3 has two) and the tokenizer's own."""
    found: set[int] = set()
    for eos in (getattr(generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        found |= set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    return tuple(sorted(found))


def decoding(task: str, tokenizer: Tokenizer, generation_config: Any) -> Decoding:
    """How the answer to a task is decoded; samsum also ends at a newline, after at least one new token."""
    stop, newline = stop_ids(tokenizer, generation_config), TASKS[task].newline_stops
    if newline:
        stop = tuple(sorted({*stop, tokenizer.encode("\n", add_special_tokens=False)[-1]}))
    return Decoding(MAX_GEN[task], stop, int(newline))


def census(prompts: Iterable[Prompt]) -> dict[str, dict[str, Any]]:
    """By task: n, the share truncated, and how many have no split for which reason."""
    by_task: dict[str, list[Prompt]] = {}
    for one in prompts:
        by_task.setdefault(one.task, []).append(one)
    return {
        task: {
            "n": len(some),
            "truncated": sum(one.truncated for one in some) / len(some),
            "no_split": dict(Counter(one.reason for one in some if one.split is None)),
        }
        for task, some in by_task.items()
    }


def _halves(tokenizer: Tokenizer, text: str, limit: int) -> tuple[str, str | None]:
    """(text, None) where it fits, else the texts of its first and last int(limit / 2) tokens."""
    if limit < 2:
        raise UserError(f"context limit {limit}: expected at least 2 tokens")
    ids, half = tokenizer.encode(text, add_special_tokens=True), int(limit / 2)
    if len(ids) <= limit:
        return text, None
    head, tail = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[len(ids) - half :]))
    return head, tail


def _end_of_context(tokenizer: Tokenizer, text: str, end: int, halves: tuple[str, str]) -> int | None:
    """Where the context of text[:end] ends in the two halves of the text; None where decoding changed what is sought."""
    head, tail = halves
    for again in (str, partial(_again, tokenizer)):
        context, asked = again(text[:end]), again(text[end:])
        if tail.endswith(asked):  # the rule: the cut lies in the context
            return len(head) + len(tail) - len(asked)
        if head.startswith(context):
            return len(context)
        if context.startswith(head.rstrip("\ufffd")) and asked.endswith(tail.lstrip("\ufffd")):
            return len(head)  # the cut took the context's end and the question's beginning
    return None


def _again(tokenizer: Tokenizer, text: str) -> str:
    """The text as this tokenizer gives it back: some put spaces right, or lower the case."""
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True)


def _wrap(tokenizer: Any, text: str, at: int | None) -> tuple[str, int | None]:
    """The text inside the chat template, and where character `at` of it is there; templates may strip its end."""
    whole = render(tokenizer, text)
    core = text.rstrip()
    start = whole.find(core)
    return whole, None if at is None or start < 0 else start + min(at, len(core))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids, after what this tokenizer puts in front of a text unless the text brings it; nothing is put behind."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    plain, full = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    front = full[: full.index(plain[0])]
    return ids if ids[: len(front)] == front else front + ids
