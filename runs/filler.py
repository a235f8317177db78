"""Facts planted in real text: sentences of CPython's documentation, as many as a length in tokens takes. No torch."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, islice
from random import Random

from runs.chat import Prompt
from runs.data import pydoc_corpus

# Whole sentences without markup; some characters are left out since a tokenizer may read a special token there.
SENTENCE = re.compile(r"[A-Z“\"'][^<>|\\]{20,240}[.:]")
BLOCK = 40  # sentences that stay together when the corpus is shuffled
AFTER = 40  # tokens of filler after the last fact: the last 32 of a context are never evicted


@cache
def sentences() -> tuple[str, ...]:
    """The filler, in the corpus's order."""
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", pydoc_corpus()))
    parts = (s for p in paragraphs for s in re.split(r"(?<=[.!?]) (?=[A-Z])", p))
    return tuple(s for s in parts if SENTENCE.fullmatch(s))


@cache
def filler_words() -> frozenset[str]:
    """All words and numbers of the filler, in lower case: no answer may be one of them."""
    return frozenset(re.findall(r"\w+", " ".join(sentences()).lower()))


def shuffled(rng: Random) -> list[str]:
    """The filler in blocks of consecutive sentences, the blocks in random order."""
    starts = list(range(0, len(sentences()), BLOCK))
    rng.shuffle(starts)
    return [line for start in starts for line in sentences()[start : start + BLOCK]]


def body(intro: str, facts: Sequence[tuple[float, str]], lines: Sequence[str], last: int) -> str:
    """The intro, then the lines, with each fact (depth, text) after 1 + floor(depth * last) of them, depth in [0, 1)."""
    parts = [intro]
    for done, line in enumerate(lines, 1):
        parts += [line, *(text for depth, text in facts if 1 + int(depth * last) == done)]
    return " ".join(parts)


def plant(
    prompt: Prompt, intro: str, facts: Sequence[tuple[float, str]], lines: Sequence[str], ctx_tokens: int
) -> tuple[str, int, int]:
    """The body of the longest context of at most ctx_tokens tokens, its number of lines, and its length in tokens.

    At least one line goes before each fact and AFTER tokens of lines after the last. Where not even the shortest fits,
    the body is that one and its length says so. Lines begin anew where they do not suffice.
    """

    def lengthened(count: int) -> tuple[str, int]:
        taken = list(islice(cycle(lines), count))
        text = body(intro, facts, taken, count - _after(prompt, taken))
        return text, len(prompt.context(text))

    least = next(n for n in range(2, AFTER + 2) if _after(prompt, lines[:n]) < n)
    count = most(lambda n: lengthened(n)[1] <= ctx_tokens, least, ctx_tokens)
    text, length = lengthened(count)
    return text, count, length


def _after(prompt: Prompt, lines: Sequence[str]) -> int:
    """How many of the last lines make AFTER tokens; each counts for one at least, so that any tokenizer comes to an end."""
    tokens = 0
    for count, line in enumerate(reversed(lines), 1):
        tokens += max(1, len(prompt.tokenizer.encode(f" {line}", add_special_tokens=False)))
        if tokens >= AFTER:
            return count
    return len(lines)


def most(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number from least to most that fits, if larger ones fit less: by doubling, then by halving steps."""
    found, step = least, 1
    while found + step <= most and fits(found + step):
        found, step = found + step, 2 * step
    while step := step // 2:
        if found + step <= most and fits(found + step):
            found += step
    return found
