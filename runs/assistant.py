"""Dialogues of thirty turns: facts stated at known ages among small talk, and a question on each at the end. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from runs.chat import Turns, turns_of
from runs.conversations import Conversation, Question
from runs.data import text_sha256
from runs.errors import UserError
from runs.examples import Ids
from runs.filler import most, shuffled
from runs.grid import Part
from runs.models import load_tokenizer
from runs.synthetic import NAMES, PLACES, WORDS, free_numbers, pick

TURNS, BAND = 30, 5  # a fact of age 1 stands in the last turn; ages 1-5, 6-10, ..., 26-30 are the bands
BANDS = TURNS // BAND
TASK, CALIBRATION = "assistant", "assistant_calibration"
MAX_NEW_TOKENS = 12
SHORT = "Answer with the value only."


@dataclass(frozen=True)
class Said:
    """One thing a user says, and what is asked after it: nothing where question is empty."""

    text: str
    reply: str
    question: str = ""
    answer: str = ""
    kind: str = ""


def conversations(part: Part) -> list[Conversation]:
    """The dialogues of a part, then those for calibration, which have one question each: an age band in turn."""
    grid, turns = part.config.assistant, turns_of(load_tokenizer(part.source))
    size = (grid.facts, grid.ctx_tokens, grid.text_seed)
    made = [dialogue(TASK, turns, *size, i) for i in range(grid.dialogues)]
    return [*made, *(one_question(dialogue(CALIBRATION, turns, *size, i), i) for i in range(grid.calibration))]


def one_question(whole: Conversation, number: int) -> Conversation:
    """A dialogue with one of its questions: of band `number` modulo 6, each place within the band in its turn."""
    bands = sorted(whole.questions, key=lambda question: question.age or 0)
    each = len(bands) // BANDS
    chosen = bands[number % BANDS * each + number // BANDS % each]
    return Conversation(**{**vars(whole), "questions": (chosen,)})


def dialogue(task: str, turns: Turns, facts: int, ctx_tokens: int, seed: int, number: int) -> Conversation:
    """Dialogue `number` of a task: as long as ctx_tokens allows, a function of its arguments alone.

    Raises UserError where ctx_tokens do not hold thirty turns.
    """
    rng = Random(f"{task} {facts} {ctx_tokens} {seed} {number}")
    planted = facts_of(rng, facts)
    ages = sorted(age for band in range(BANDS) for age in _ages(rng, band, facts // BANDS))
    stated = dict(zip(ages, planted, strict=True))
    others = near_misses(rng, planted, (TURNS - facts) // 3)
    lines = shuffled(rng)
    said, fed = _fitted(turns, stated, others, lines, ctx_tokens, task)
    asked = tuple(
        Question(one.kind, turns.question(one.question), (one.answer,), age=age) for age, one in stated.items()
    )
    text = "\n".join(f"{one.text}\n{one.reply}" for one in said)
    return Conversation(task, text_sha256(text), fed, asked, "contains", MAX_NEW_TOKENS)


def _ages(rng: Random, band: int, count: int) -> list[int]:
    """Different ages of a band."""
    return rng.sample(range(BAND * band + 1, BAND * (band + 1) + 1), count)


def facts_of(rng: Random, count: int) -> list[Said]:
    """Facts of three kinds in random order, no name and no value twice."""
    names, words, places = pick(rng, NAMES, count), pick(rng, WORDS, count), pick(rng, PLACES, -(-count // 3))
    numbers = rng.sample(free_numbers(2), count)
    made = []
    for i, name in enumerate(names):
        kind = ("password", "locker", "place")[i % 3]
        if kind == "password":
            fact, question, value = (
                f"The password of {name} is {words[i]}.",
                f"What is the password of {name}?",
                words[i],
            )
        elif kind == "locker":
            value = str(numbers[i])
            fact, question = f"The locker number of {name} is {value}.", f"What is the locker number of {name}?"
        else:
            value = places[i // 3]
            fact, question = f"{name} works in the {value}.", f"Where does {name} work?"
        made.append(Said(fact, "Noted.", f"{question} {SHORT}", value, kind))
    return rng.sample(made, count)


def near_misses(rng: Random, planted: Sequence[Said], count: int) -> list[Said]:
    """Statements that have a fact's key and no value: nothing asked can be answered from them."""
    names = [one.question.removesuffix(f" {SHORT}").rstrip("?").split()[-1] for one in planted if one.kind != "place"]
    forms = ("{} will call again tomorrow.", "{} asked for a new password.", "{} could not find the locker.")
    rng.shuffle(names)
    return [Said(forms[i % len(forms)].format(names[i % len(names)]), "I see.") for i in range(count)]


def _fitted(
    turns: Turns, stated: dict[int, Said], others: Sequence[Said], lines: Sequence[str], limit: int, task: str
) -> tuple[list[Said], tuple[Ids, ...]]:
    """The longest dialogue of at most `limit` tokens: what is said, and the tokens of its turns.

    Small talk is sentences of filler, in the turns that state nothing (in all replies where each turn states a fact).
    """
    free = [age for age in range(TURNS, 0, -1) if age not in stated]
    step = len(free) // max(len(others), 1) or 1
    placed = dict(zip(free[::step], others, strict=False))
    slots = [age for age in free if age not in placed] or list(range(TURNS, 0, -1))

    def lengthened(count: int) -> tuple[list[Said], tuple[Ids, ...]]:
        said = []
        for age in range(TURNS, 0, -1):
            one = stated.get(age) or placed.get(age)
            if age in slots:
                k = slots.index(age)
                talk = [lines[i % len(lines)] for i in range(k * count // len(slots), (k + 1) * count // len(slots))]
                one = (
                    Said(one.text, " ".join([one.reply, *talk]))
                    if one
                    else Said(talk[0], " ".join(talk[1:]) or "I see.")
                )
            assert one is not None
            said.append(one)
        return said, tuple(turns.turn(one.text, one.reply, i == 0) for i, one in enumerate(said))

    least = len(slots)
    count = most(lambda n: sum(map(len, lengthened(n)[1])) <= limit, least, limit)
    said, fed = lengthened(count)
    if (length := sum(map(len, fed))) > limit:
        raise UserError(f"task {task}: {limit} tokens are too few for {TURNS} turns; expected {length} or more")
    return said, fed
