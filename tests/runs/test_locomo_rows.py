"""LoCoMo's file: every real conversation is read, every broken one named. pytest tests/runs/test_locomo_rows.py"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_locomo import conversation, write

from runs.errors import UserError
from runs.locomo_rows import CATEGORIES, WRONG_LABELS, label_files, load, locomo_files


def test_the_published_file_is_read_whole(shared_data: Callable[[str], Path]) -> None:
    made = load(str(shared_data("locomo")))
    assert [one.name for one in made] == [f"conv-{n}" for n in (26, 30, 41, 42, 43, 44, 47, 48, 49, 50)]
    assert [len(one.sessions) for one in made] == [19, 19, 32, 29, 29, 28, 31, 30, 25, 30]
    raw = json.loads((shared_data("locomo") / "locomo10.json").read_text(encoding="utf-8"))
    for one, mine in zip(raw, made, strict=True):
        talk, text = one["conversation"], "".join(line.text for line in mine.lines)
        said = [m for key in talk if re.fullmatch(r"session_\d+", key) for m in talk[key]]
        assert len(mine.lines) == len(said)
        assert text.count("[image: ") == sum("blip_caption" in message for message in said)
        assert all(message["text"].strip() in text for message in said)
        assert all(text.count(f"[{talk[f'session_{n}_date_time']}]\n") >= 1 for n in range(1, len(mine.sessions) + 1))
    asked = [asked for one in made for asked in one.questions]
    assert Counter(one["category"] for talk in raw for one in talk["qa"]).total() == 1986
    # eleven stand twice in conv-48, word for word
    found = {"multi_hop": 282, "temporal": 321, "open_domain": 96, "single_hop": 830, "adversarial": 446}
    assert Counter(one.category for one in asked) == found
    assert all((one.category == "adversarial") == (one.answer == "") for one in asked)
    assert sum(not one.evidence for one in asked) == 4  # none given, or only "D"


def test_sessions_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    talk = conversation(0, sessions=6)
    said = talk["conversation"]
    for key in ("session_2", "session_2_date_time"):
        said[key.replace("2", "10")] = said.pop(key)  # behind session_9 in number, behind session_1 as text
    for i, message in enumerate(said["session_10"], 1):
        message["dia_id"] = f"D10:{i}"
    said["session_30_date_time"] = "as in the published file: a date without a session"
    (one,) = load(write(tmp_path, talk))
    assert [line.session for line in one.lines] == [1, 1, 3, 3, 4, 4, 5, 5, 6, 6, 10, 10]
    assert one.sessions == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert one.lines[10].text == "\n[2:05 pm on 2 May, 2023]\nAda: Today I found two old maps, 0.\n"
    assert one.lines[11].text == "Ben: Today I found two old maps, 1.\n"


def test_a_caption_stands_behind_its_message_as_the_file_has_it(tmp_path: Path) -> None:
    talk = conversation(0)
    talk["conversation"]["session_1"][1] |= {
        "blip_caption": "a photo of a Kite , red",
        "query": "kite",
        "text": "Look!\n\n",
    }
    (one,) = load(write(tmp_path, talk))
    assert one.lines[1].text == "Ben: Look! [image: a photo of a Kite , red]\n"


@pytest.mark.parametrize(
    ("evidence", "lines"),
    [
        (["D1:2"], (1,)),
        (["D3:1", "D1:1"], (4, 0)),
        (["D2:1; D3:2"], (2, 5)),
        (["D2:1 D3:2"], (2, 5)),
        (["D:2:01"], (2,)),
        (["D2:77"], (3,)),  # a message that is not there, of a session that is: its last
        (["D9:1"], ()),
        (["D", ""], ()),
        ([], ()),
    ],
)
def test_evidence_is_read_as_the_published_file_writes_it(tmp_path: Path, evidence: list[str], lines: tuple) -> None:
    talk = conversation(0)
    talk["qa"][0]["evidence"] = evidence
    (one,) = load(write(tmp_path, talk))
    assert one.questions[0].evidence == lines


def test_answers_are_texts_whole_numbers_included(tmp_path: Path) -> None:
    talk = conversation(0)
    talk["qa"][0]["answer"] = 2022
    talk["qa"][4]["answer"] = "No"  # two adversarial questions have one; it plays no part
    (one,) = load(write(tmp_path, talk))
    assert [asked.answer for asked in one.questions] == ["2022", "two old maps", "a tin whistle", "a red kite", ""]
    assert [asked.category for asked in one.questions] == list(CATEGORIES.values())


def test_a_question_that_stands_twice_is_one(tmp_path: Path) -> None:
    talk = conversation(0)
    talk["qa"] += [talk["qa"][0] | {"evidence": []}, talk["qa"][0] | {"answer": "another"}]
    (one,) = load(write(tmp_path, talk))
    assert len(one.questions) == 6 and one.questions[0].evidence == (0,) and one.questions[5].answer == "another"


def test_a_text_is_known_by_its_digest(tmp_path: Path) -> None:
    one, other = load(write(tmp_path, conversation(0), conversation(1)))
    (again,) = load(write(tmp_path, conversation(0) | {"sample_id": "renamed"}))
    assert one.document == again.document != other.document
    changed = conversation(0)
    changed["conversation"]["session_3"][1]["text"] += "!"
    assert load(write(tmp_path, changed))[0].document != one.document


# ---------------------------------------------------------------- wrong labels


def test_wrong_labels_are_told_where_a_list_stands_beside_the_data(tmp_path: Path) -> None:
    source = write(tmp_path, conversation(0), conversation(1))
    assert label_files(source) == []
    assert {asked.wrong_label for one in load(source) for asked in one.questions} == {None}
    (tmp_path / WRONG_LABELS).write_text(json.dumps([["talk-1", "What did Cleo find on day 2?"]]))
    for typed in (source, str(tmp_path)):  # in a folder it is no conversation
        assert label_files(typed) == [tmp_path / WRONG_LABELS] and len(locomo_files(typed)) == 1
        labels = [asked.wrong_label for one in load(typed) for asked in one.questions]
        assert labels == [False] * 6 + [True] + [False] * 3


@pytest.mark.parametrize(
    "listed",
    [{}, [["talk-1"]], [["talk-1", 3]], "x", [["talk-1", "What?"]], [["nobody", "What did Ada find on day 1?"]]],
)
def test_a_list_that_names_no_question_is_refused(tmp_path: Path, listed: Any) -> None:
    source = write(tmp_path, conversation(0))
    (tmp_path / WRONG_LABELS).write_text(json.dumps(listed))
    with pytest.raises(UserError, match=r"^[^\n]*wrong_labels.json[^\n]*expected (a list of )?\[sample_id, question\]"):
        load(source)


# ---------------------------------------------------------------- mistakes


def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    talk = conversation(1)
    change(talk)
    return talk


def message(**changed: Any) -> Callable[[dict[str, Any]], None]:
    def change(talk: dict[str, Any]) -> None:
        found = talk["conversation"]["session_2"][1]
        for key, value in changed.items():
            if value is None:
                del found[key]
            else:
                found[key] = value

    return change


def question(**changed: Any) -> Callable[[dict[str, Any]], None]:
    def change(talk: dict[str, Any]) -> None:
        for key, value in changed.items():
            if value is None:
                del talk["qa"][1][key]
            else:
                talk["qa"][1][key] = value

    return change


BROKEN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda t: t.pop("conversation"), "key 'conversation' is missing"),
    (lambda t: t.pop("sample_id"), "key 'sample_id' is missing"),
    (lambda t: t.pop("qa"), "key 'qa' is missing"),
    (lambda t: t.update(sample_id=7), "sample_id is int 7; expected a text"),
    (lambda t: t.update(conversation=[]), "conversation is list []; expected an object"),
    (lambda t: t.update(conversation={}), "no session; expected keys such as session_1"),
    (lambda t: t.update(qa=[]), "qa: list []; expected a list with at least one entry"),
    (lambda t: t.update(qa=[3]), "question 1: int 3; expected LoCoMo's form"),
    (lambda t: t["conversation"].pop("session_2_date_time"), "key 'session_2_date_time' is missing"),
    (lambda t: t["conversation"].update(session_2=[]), "session_2: list []"),
    (lambda t: t["conversation"].update(session_2={"a": 1}), "session_2 is dict {'a': 1}; expected a list"),
    (lambda t: t["conversation"].update(session_2=["hello"]), "session_2, message 1: str 'hello'"),
    (message(text=None), "session_2, message 2: key 'text' is missing"),
    (message(speaker=None), "session_2, message 2: key 'speaker' is missing"),
    (message(dia_id=None), "session_2, message 2: key 'dia_id' is missing"),
    (message(text=" \n"), "text is str ' \\n'; expected a text that is not blank"),
    (message(text="half \ud800"), "of whole characters"),
    (message(text=5), "text is int 5; expected a text"),
    (message(blip_caption=["a"]), "blip_caption is list ['a']; expected a text"),
    (message(dia_id="2:2"), "dia_id is '2:2'; expected one such as 'D1:3', each once"),
    (message(dia_id="D2:1"), "dia_id is 'D2:1'; expected one such as 'D1:3', each once"),
    (question(category=0), "question 2: category 0; expected 1 to 5"),
    (question(category=6), "question 2: category 6; expected 1 to 5"),
    (question(category=True), "category is bool True; expected a whole number"),
    (question(category="2"), "category is str '2'; expected a whole number"),
    (question(category=2.0), "category is float 2.0; expected a whole number"),
    (question(category=None), "question 2: key 'category' is missing"),
    (question(question=None), "question 2: key 'question' is missing"),
    (question(answer=None), "question 2: key 'answer' is missing"),
    (question(answer=True), "answer is bool True; expected a text"),
    (question(answer=""), "answer is str ''"),
    (question(evidence=None), "question 2: key 'evidence' is missing"),
    (question(evidence="D1:1"), "evidence is str 'D1:1'; expected a list"),
    (question(evidence=["D1:1", 3]), "evidence is list ['D1:1', 3]; expected texts such as 'D1:3'"),
]


@pytest.mark.parametrize(("change", "said"), BROKEN, ids=[said for _, said in BROKEN])
def test_what_is_broken_is_named_in_one_line(tmp_path: Path, change: Callable, said: str) -> None:
    source = write(tmp_path, conversation(0), broken(change))
    with pytest.raises(UserError, match=r"^[^\n]*locomo.json, conversation 2[:,][^\n]*$") as caught:
        load(source)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1,",
        "null",
        "3",
        "[]",
        '{"data": []}',
        '["x"]',
        "[[]]",
        "[" * 100_000,
        "[1" + "0" * 5000 + "]",
        "\ufeff[]",
    ],
)
def test_what_is_not_locomo_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "locomo.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"^[^\n]*locomo.json[^\n]*expected [^\n]*LoCoMo[^\n]*$"):
        load(str(tmp_path))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "locomo.json").write_bytes(b"\xff\xfe[]")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        load(str(tmp_path))


@pytest.mark.parametrize("typed", ["nowhere", "nowhere/locomo.json", "x" * 5000, "~nobody-at-all/x", "a\0b"])
def test_a_path_that_is_not_there_is_named(tmp_path: Path, typed: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$"):
        load(str(tmp_path / typed) if typed.startswith("n") else typed)
    with pytest.raises(UserError, match="no such file, or a folder without one"):
        load(str(tmp_path))


def test_a_conversation_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'talk-0' has the id of another conversation"):
        load(write(tmp_path, conversation(0), conversation(1) | {"sample_id": "talk-0"}))
    with pytest.raises(UserError, match="'renamed' has the text of another conversation"):
        load(write(tmp_path, conversation(0), conversation(0) | {"sample_id": "renamed"}))
    write(tmp_path, conversation(1), name="more.json")  # likewise in another file of the folder
    with pytest.raises(UserError, match="'talk-1' has the id of another conversation"):
        load(write(tmp_path, conversation(0), conversation(1)).removesuffix("/locomo.json"))


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, runs.locomo_rows, runs.locomo_metrics; sys.exit('torch' in sys.modules or 'nltk' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
