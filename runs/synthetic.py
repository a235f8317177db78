"""Synthetic tasks of any length in the model's own tokens: facts planted in real text, and questions on them. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from runs.chat import Prompt, prompt_of
from runs.data import Tokenizer, text_sha256
from runs.errors import UserError
from runs.examples import Example, Request
from runs.filler import filler_words, plant, shuffled
from runs.planning import shown

NAMES = """Alice Boris Clara Dmitri Elena Felix Greta Hassan Ingrid Jonas Karin Leon Maria Nadia Oscar Paula Quentin Rosa
Stefan Tamara Ursula Viktor Wanda Xavier Yusuf Zelda Amir Bianca Carlos Dora Emil Fatima Gustav Helga Igor Julia"""
PLACES = """kitchen garden cellar harbour museum bakery library chapel stable theatre hospital lighthouse castle tower
barn workshop gallery windmill monastery orchard"""
WORDS = """walnut falcon lantern saffron marble copper velvet thistle pepper salmon amber cactus dolphin ginger hammer
ivory jasmine lemon maple nutmeg olive panda quartz raven sparrow tiger umbrella violin willow zebra banana candle
carpet cherry coral daisy feather guitar honey kettle ladder mango needle onion pearl pillow potato rabbit ribbon rocket
saddle silver spider teapot tulip turtle whistle"""
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are
TRIES = 50  # stretches of filler that are tried before a length is refused


@dataclass(frozen=True)
class Quiz:
    """What is planted, in this order, and what is asked: (kind, question, answers)."""

    facts: Sequence[str]
    questions: Sequence[tuple[str, str, tuple[str, ...]]]
    max_new_tokens: int = 16


def make(task: str, tokenizer: Tokenizer, ctx_tokens: int, count: int, seed: int) -> list[Example]:
    """`count` examples of a synthetic task, each context as long as ctx_tokens allows, chat prefix included.

    Example i is a function of (task, tokenizer, ctx_tokens, seed, i). Raises UserError for a task that is not of TASKS,
    where no context of ctx_tokens holds the facts, and for more examples than the text has sentences to begin with.
    """
    if task not in TASKS:
        raise UserError(f"task {task!r}: expected one of {', '.join(TASKS)}")
    prompt, start, examples = prompt_of(tokenizer), 0, []
    rng = Random(f"{task} {ctx_tokens} {seed}")
    lines, shift = shuffled(rng), rng.random()
    if count > len(lines):  # two of them would begin with the same sentence
        raise UserError(
            f"task {task}: {count} documents; its text has {len(lines)} sentences, expected at most so many"
        )
    for i in shown(range(count), f"{task} at {ctx_tokens} tokens"):
        quiz = TASKS[task](Random(f"{task} {ctx_tokens} {seed} {i}"))
        spread = [(shift + (i + k) * GOLDEN) % 1 for k in range(len(quiz.facts))]
        facts = [((k + spread[k]) / len(spread), fact) for k, fact in enumerate(quiz.facts)]
        body, start = _body(task, prompt, facts, (lines, start), ctx_tokens)
        examples.append(_example(task, prompt, quiz, body, ctx_tokens))
    return examples


def _body(
    task: str, prompt: Prompt, facts: Sequence[tuple[float, str]], filler: tuple[list[str], int], limit: int
) -> tuple[str, int]:
    """The body of a context of at most `limit` tokens, and where in the filler the next one starts."""
    lines, start = filler
    lengths = []
    for first in range(start, start + TRIES):
        at = first % len(lines)
        body, used, length = plant(prompt, INTRO, facts, lines[at:] + lines[:at], limit)
        if length <= limit:
            return body, at + used
        lengths.append(length)
    raise UserError(f"task {task}: {limit} tokens are too few for its facts; expected {min(lengths)} or more")


def _example(task: str, prompt: Prompt, quiz: Quiz, body: str, ctx_tokens: int) -> Example:
    return Example(
        task=task,
        document=text_sha256(prompt.head + body),
        ctx_tokens=ctx_tokens,
        context=prompt.context(body),
        requests=tuple(Request(kind, prompt.request(text), answers) for kind, text, answers in quiz.questions),
        metric="contains",
        max_new_tokens=quiz.max_new_tokens,
        newline_stops=True,
    )


def pick(rng: Random, words: str, count: int) -> list[str]:
    """Different words, none of which the filler has."""
    return rng.sample([word for word in words.split() if word.lower() not in filler_words()], count)


@cache
def free_numbers(digits: int) -> list[int]:
    """Numbers of so many digits, none of which the filler has, nor their successors."""
    return [n for n in range(10 ** (digits - 1), 10**digits - 1) if not {str(n), str(n + 1)} & filler_words()]


INTRO = "Read this text and remember the facts in it."
SHORT = "Answer with the value only."
# The wordings are those that a 135M model answers best, of some tried on seeds from 1000 on; SHORT where it helps. Answers
# are words or two digits where they can be: of five digits some are lost in any eviction.


def _planted_facts(rng: Random) -> Quiz:
    (a, b, c, d, e), (place,), (word,) = pick(rng, NAMES, 5), pick(rng, PLACES, 1), pick(rng, WORDS, 1)
    locker, total = rng.sample([n for n in free_numbers(2) if 2 <= n % 10 <= 8], 2)  # no round number, nor the next one
    total += total == locker + 1  # an answer stands for one thing only
    (code,) = rng.sample(free_numbers(3), 1)
    facts = [
        f"The password of {a} is {word}.",
        f"The locker number of {b} is {locker}.",
        f"{c} works in the {place}.",
        f"The code of the {place} is {code}.",
        f"The score of {d} is {total // 10 * 10}.",
        f"The score of {e} is {total % 10}.",
    ]
    questions = [
        ("lookup", f"What is the password of {a}? {SHORT}", (word,)),
        ("lookup", f"What is the locker number of {b}? {SHORT}", (str(locker),)),
        ("two_hop", f"{c} works in a place. What is the code of that place?", (str(code),)),
        ("plus_one", f"What is the next number after the locker number of {b}?", (str(locker + 1),)),
        ("reverse", f"Whose password is {word}? {SHORT}", (a,)),
        ("sum", f"What is the total score of {d} and {e}?", (str(total),)),
    ]
    return Quiz(rng.sample(facts, len(facts)), questions, max_new_tokens=20)  # a sum is spelled out before it is given


def _single_needle(rng: Random) -> Quiz:
    return _needles(rng, "single_needle", 1)


def _multi_key_needle(rng: Random) -> Quiz:
    return _needles(rng, "multi_key_needle", 4)


def _needles(rng: Random, kind: str, count: int) -> Quiz:
    keys, values = pick(rng, NAMES, count), pick(rng, WORDS, count)
    facts = [f"The magic word for {key} is {value}." for key, value in zip(keys, values, strict=True)]
    asked = rng.randrange(count)
    return Quiz(facts, [(kind, f"What is the magic word for {keys[asked]}? {SHORT}", (values[asked],))])


def _key_value_retrieval(rng: Random) -> Quiz:
    keys, values = pick(rng, WORDS, 4), rng.sample(free_numbers(2), 4)
    pairs = ", ".join(f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True))
    asked = rng.randrange(4)
    question = f'What is the value of "{keys[asked]}"? {SHORT}'
    return Quiz([f"JSON data: {{{pairs}}}."], [("key_value_retrieval", question, (str(values[asked]),))])


def _variable_tracking(rng: Random) -> Quiz:
    (a, b, c), (value,) = pick(rng, WORDS, 3), rng.sample(free_numbers(2), 1)
    facts = [f"The number of {a} is {value}.", f"The number of {b} is the number of {a}."]
    facts += [f"The number of {c} is the number of {b}."]
    return Quiz(facts, [("variable_tracking", f"What is the number of {c}?", (str(value),))])


TASKS: dict[str, Callable[[Random], Quiz]] = {
    "planted_facts": _planted_facts,
    "single_needle": _single_needle,
    "multi_key_needle": _multi_key_needle,
    "key_value_retrieval": _key_value_retrieval,
    "variable_tracking": _variable_tracking,
}
