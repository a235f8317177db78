"""LoCoMo's conversations as a model reads them: session after session, then a question."""

import hashlib
from collections.abc import Sequence

from runs.chat import prompt_of
from runs.conversations import Conversation, Question
from runs.data import Tokenizer
from runs.errors import UserError
from runs.examples import Ids
from runs.grid import Part
from runs.locomo_metrics import UNANSWERABLE
from runs.locomo_rows import CATEGORIES, Asked, Dialogue, load
from runs.longbench import check_limit
from runs.models import load_tokenizer, shape

INTRO = "Below is a conversation between two people over many days. Each session begins with its date.\n"
# What LoCoMo's own evaluation asks for, in our words: a short phrase, a date where the question is about time, and for
# adversarial questions a way out.
ASK = "That was the whole conversation. Now answer a question about it, in a few words.\nQuestion: "
HINTS = {
    "temporal": " Use the dates of the conversation to give an approximate date.",
    "adversarial": " If the conversation does not say, answer: Not mentioned in the conversation.",
}
MAX_NEW_TOKENS = 32


def conversations(part: Part) -> list[Conversation]:
    """Those of a part, from the first of the file. Raises UserError for a limit above the model's positions."""
    grid, positions = part.config.locomo, shape(part.source).positions
    limit = grid.ctx_tokens or positions
    check_limit(limit, positions, part.model)
    tokenizer, found = load_tokenizer(part.source), load(str(part.data))[: grid.conversations]
    return [conversation(tokenizer, one, limit, grid.questions, grid.text_seed) for one in found]


def conversation(
    tokenizer: Tokenizer, dialogue: Dialogue, limit: int, questions: int | None, seed: int
) -> Conversation:
    """A dialogue in at most `limit` tokens, the longest of its questions and an answer included; a turn is a session.

    Where not all sessions fit, the most recent ones that do. A session longer than what there is room for is cut between
    messages into turns, the last of them the fullest. questions: how many are sampled, None for all.
    Raises UserError where the last message alone has no room.
    """
    prompt = prompt_of(tokenizer)
    every = {
        asked: prompt.request(f"{ASK}{asked.question}{HINTS.get(asked.category, '')}") for asked in dialogue.questions
    }
    head, lines = prompt.context(INTRO), [_ids(tokenizer, line.text) for line in dialogue.lines]
    room = limit - len(head) - max(map(len, every.values())) - MAX_NEW_TOKENS
    turns = [turn for session in dialogue.sessions for turn in _cut(session, lines, room)]
    first = _first(turns, lines, room)
    if first == len(turns):
        raise UserError(
            f"LoCoMo conversation {dialogue.name}: its last message has {len(lines[-1])} tokens; there is room for "
            f"{max(room, 0)} of {limit}; expected a longer limit"
        )
    fed = [tuple(token for line in turn for token in lines[line]) for turn in turns[first:]]
    return Conversation(
        task="locomo",
        document=dialogue.document,
        turns=((*head, *fed[0]), *fed[1:]),
        questions=tuple(_question(asked, every[asked], turns) for asked in sample(dialogue.questions, questions, seed)),
        metric="locomo",
        max_new_tokens=MAX_NEW_TOKENS,
        left_out=first,
    )


def sample(questions: Sequence[Asked], size: int | None, seed: int) -> list[Asked]:
    """At most `size` questions, the categories in turn, those of a category by SHA-256 of seed and wording; None: all.

    A larger sample of the same seed begins with the smaller one.
    """

    def shuffled(category: str) -> list[Asked]:
        own = [asked for asked in questions if asked.category == category]
        return sorted(
            own, key=lambda asked: hashlib.sha256(f"{seed} {asked.question} {asked.answer}".encode()).digest()
        )

    queues = [shuffled(category) for category in CATEGORIES.values()]
    turns = [queue[turn] for turn in range(len(questions)) for queue in queues if turn < len(queue)]
    return turns[:size]


def _question(asked: Asked, ids: Ids, turns: Sequence[Sequence[int]]) -> Question:
    """Its age is that of its oldest evidence: whoever answers needs all of it."""
    ages = [len(turns) - next(i for i, turn in enumerate(turns) if line in turn) for line in asked.evidence]
    answers = (asked.answer,) if asked.answer else UNANSWERABLE
    return Question(asked.category, ids, answers, age=max(ages, default=None), wrong_label=asked.wrong_label)


def _ids(tokenizer: Tokenizer, text: str) -> Ids:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _cut(session: Sequence[int], lines: Sequence[Ids], room: int) -> list[list[int]]:
    """The lines of a session in turns of at most `room` tokens, filled from the end; a longer line is a turn of its own."""
    turns: list[list[int]] = []
    left = 0
    for line in reversed(session):
        if not turns or len(lines[line]) > left:
            turns.insert(0, [])
            left = room
        turns[0].insert(0, line)
        left -= len(lines[line])
    return turns


def _first(turns: Sequence[Sequence[int]], lines: Sequence[Ids], room: int) -> int:
    """The first of the last turns that have room together."""
    first = len(turns)
    while first and (room := room - sum(len(lines[line]) for line in turns[first - 1])) >= 0:
        first -= 1
    return first
