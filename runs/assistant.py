"""Dialogues of thirty turns: facts stated at known ages among small talk, and a question on each at the end. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from runs.chat import Turns, turns_of
from runs.conversations import Conversation, Question
from runs.data import text_sha256
from runs.errors import UserError
from runs.examples import Ids
from runs.filler import most, shuffled
from runs.grid import Part
from runs.models import load_tokenizer
from runs.synthetic import NAMES, TRIES, WORDS, free_numbers, pick

TURNS, BAND = 30, 5  # a fact of age 1 stands in the last turn; ages 1-5, 6-10, ..., 26-30 are the bands
BANDS = TURNS // BAND
TASK, CALIBRATION = "assistant", "assistant_calibration"
MAX_NEW_TOKENS = 8
# Of each kind: the fact, the question, where the answer to it begins, something that is near it and answers nothing. The
# wordings are those of some tried, on seeds from 1000 on, that a 135M model recalls best with its whole cache.
KINDS = {
    "locker": (
        "The locker number of {name} is {value}.",
        "What is the locker number of {name}?",
        "The locker number of {name} is",
        "{name} forgot the locker number again.",
    ),
    "room": ("{name} is in room {value}.", "In which room is {name}?", "{name} is in room", "{name} left the room."),
    "password": (
        'The password of {name} is "{value}".',
        "What is the password of {name}?",
        'The password of {name} is "',
        "{name} asked for a new password.",
    ),
}


@dataclass(frozen=True)
class Fact:
    """A value that belongs to a name, once in a dialogue."""

    kind: str
    name: str
    value: str

    def said(self, form: int) -> str:
        """The fact (0), its question (1), where an answer begins (2), or what is near it (3), in words."""
        return KINDS[self.kind][form].format(name=self.name, value=self.value)


def conversations(part: Part) -> list[Conversation]:
    """The dialogues of a part, then those for calibration, which have one question each."""
    grid, turns = part.config.assistant, turns_of(load_tokenizer(part.source))
    size = (grid.facts, grid.ctx_tokens, grid.text_seed)
    made = [dialogue(TASK, turns, *size, i) for i in range(grid.dialogues)]
    return [*made, *(one_question(dialogue(CALIBRATION, turns, *size, i), i) for i in range(grid.calibration))]


def one_question(whole: Conversation, number: int) -> Conversation:
    """A dialogue with one of its questions: the age bands in turn, and in each band its questions in turn."""
    each = len(whole.questions) // BANDS  # they stand in order of age
    return replace(whole, questions=(whole.questions[number % BANDS * each + number // BANDS % each],))


def dialogue(task: str, turns: Turns, facts: int, ctx_tokens: int, seed: int, number: int) -> Conversation:
    """Dialogue `number` of a task: as long as ctx_tokens allows, a function of its arguments alone.

    Raises UserError where ctx_tokens do not hold thirty turns.
    """
    rng = Random(f"{task} {facts} {ctx_tokens} {seed} {number}")
    ages = [age for band in range(BANDS) for age in sorted(rng.sample(_band(band), facts // BANDS))]
    stated = dict(zip(ages, facts_of(rng, facts), strict=True))
    said = {age: (fact.said(0), fact.said(0)) for age, fact in stated.items()}  # the reply repeats it
    silent = [age for age in range(1, TURNS + 1) if age not in stated]
    for age in rng.sample(silent, len(silent) // 3):
        said[age] = (rng.choice(list(stated.values())).said(3), "I see.")
    text, fed = _filled(turns, said, shuffled(rng), ctx_tokens)
    if (length := sum(map(len, fed))) > ctx_tokens:
        raise UserError(f"task {task}: {ctx_tokens} tokens are too few for {TURNS} turns; expected {length} or more")
    asked = (
        Question(fact.kind, turns.question(fact.said(1), fact.said(2)), (fact.value,), age=age)
        for age, fact in stated.items()
    )
    return Conversation(task, text_sha256(text), fed, tuple(asked), "contains", MAX_NEW_TOKENS)


def _band(number: int) -> range:
    """The ages of a band, the youngest first."""
    return range(BAND * number + 1, BAND * (number + 1) + 1)


def facts_of(rng: Random, count: int) -> list[Fact]:
    """Facts of all kinds, as many of each, in random order; no name and no value twice."""
    names, words, numbers = pick(rng, NAMES, count), pick(rng, WORDS, count), rng.sample(free_numbers(2), count)
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(count)]
    made = [
        Fact(kind, name, word if kind == "password" else str(number))
        for kind, name, word, number in zip(kinds, names, words, numbers, strict=True)
    ]
    return rng.sample(made, count)


def _filled(
    turns: Turns, said: dict[int, tuple[str, str]], lines: Sequence[str], limit: int
) -> tuple[str, tuple[Ids, ...]]:
    """The longest dialogue of at most `limit` tokens, as text and as tokens of its turns; the shortest where none is.

    Small talk is sentences of filler: in turns where nothing is said yet, or behind all replies where there is no such
    turn. Where the first sentences are too long the next ones are tried.
    """
    slots = [age for age in range(TURNS, 0, -1) if age not in said] or list(range(TURNS, 0, -1))
    known = [said.get(age, ("", "")) for age in range(TURNS, 0, -1)]
    at = {TURNS - age: k for k, age in enumerate(slots)}

    def spoken(start: int, count: int) -> list[tuple[str, str]]:
        pairs = list(known)
        for i, k in at.items():
            places = range(start + k * count // len(slots), start + (k + 1) * count // len(slots))
            user, *more = [known[i][0], known[i][1]] if known[i][0] else [lines[places[0] % len(lines)]]
            talk = [lines[place % len(lines)] for place in (places if known[i][0] else places[1:])]
            pairs[i] = (user, " ".join([*more, *talk]) or "I see.")
        return pairs

    def tokens(pairs: Sequence[tuple[str, str]]) -> tuple[Ids, ...]:
        return tuple(turns.turn(user, reply, i == 0) for i, (user, reply) in enumerate(pairs))

    def length(start: int, count: int) -> int:
        return sum(map(len, tokens(spoken(start, count))))

    starts = range(TRIES)
    start = next(
        (s for s in starts if length(s, len(slots)) <= limit), min(starts, key=lambda s: length(s, len(slots)))
    )
    pairs = spoken(start, most(lambda count: length(start, count) <= limit, len(slots), limit))
    return "\n".join(f"{user}\n{reply}" for user, reply in pairs), tokens(pairs)
