"""LoCoMo's file (Maharana et al. 2024), checked: messages session by session, and the questions on them. No torch."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from runs.data import text_sha256
from runs.errors import UserError
from runs.sources import is_folder, user_path

T = TypeVar("T", str, list, dict, int)
Places = dict[tuple[int, int | None], int]
CATEGORIES = {
    1: "multi_hop",
    2: "temporal",
    3: "open_domain",
    4: "single_hop",
    5: "adversarial",
}  # not the paper's order
WRONG_LABELS = "wrong_labels.json"  # beside the data, where one is given: a list of [sample_id, question]
_SESSION = re.compile(r"session_([1-9]\d{0,5})")
_EVIDENCE = re.compile(r"D:?(\d{1,6}):(\d{1,6})")  # of the published file: several in one text, and one "D:11:26"
_KINDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number"}


@dataclass(frozen=True)
class Line:
    """One message as it is fed, its image's caption included; the first of a session has the date in front of it."""

    session: int
    text: str


@dataclass(frozen=True)
class Asked:
    """One question. category: by name; answer: the reference, empty for adversarial ones, which have none.

    evidence: positions of the lines it rests on, of which the file does not always know. wrong_label: as in Question.
    """

    category: str
    question: str
    answer: str
    evidence: tuple[int, ...]
    wrong_label: bool | None


@dataclass(frozen=True)
class Dialogue:
    """One conversation of the file. questions: each once, though the file asks some twice."""

    name: str
    lines: tuple[Line, ...]
    questions: tuple[Asked, ...]

    @property
    def document(self) -> str:
        """SHA-256 of its whole text, whatever part of it a model has room for."""
        return text_sha256("".join(line.text for line in self.lines))

    @property
    def sessions(self) -> list[list[int]]:
        """Positions of the lines of each session, in order."""
        return [list(own) for _, own in groupby(range(len(self.lines)), lambda i: self.lines[i].session)]


def locomo_files(source: str) -> list[Path]:
    """The JSON files of DATA=: a file, or those of a folder but the list of wrong labels. UserError if none is there."""
    path = user_path(source, "DATA")
    files = sorted(p for p in path.glob("*.json") if p.name != WRONG_LABELS) if is_folder(path) else [path]
    if not files or not all(p.is_file() for p in files):
        raise UserError(f"DATA={source[:200]}: no such file, or a folder without one; expected LoCoMo's JSON")
    return files


def label_files(source: str) -> list[Path]:
    """The list of wrong labels beside the data of DATA=, where there is one."""
    path = locomo_files(source)[0].parent / WRONG_LABELS
    return [path] if path.is_file() else []


def load(source: str) -> list[Dialogue]:
    """The conversations of DATA=, in the order of the file.

    Raises UserError naming file, conversation and key for what is missing, empty, of another type, or there twice.
    """
    wrong = {pair for path in label_files(source) for pair in _pairs(path)} if label_files(source) else None
    found = [
        _dialogue(raw, f"{path}, conversation {number}", wrong)
        for path in locomo_files(source)
        for number, raw in enumerate(_filled(_json(path), str(path)), 1)
    ]
    for what, known in (("id", [one.name for one in found]), ("text", [one.document for one in found])):
        if twice := [one.name for one, same in zip(found, known, strict=True) if known.count(same) > 1]:
            raise UserError(f"DATA={source}: {twice[-1]!r} has the {what} of another conversation; expected each once")
    if lost := sorted((wrong or set()) - {(one.name, asked.question) for one in found for asked in one.questions}):
        raise UserError(f"{WRONG_LABELS}: {lost[0]!r} is no question of DATA={source}; expected [sample_id, question]")
    return found


def _dialogue(raw: Any, where: str, wrong: set[tuple[str, str]] | None) -> Dialogue:
    name, (lines, places) = _text(raw, "sample_id", where), _lines(_get(raw, "conversation", dict, where), where)
    labels = None if wrong is None else {question for of, question in wrong if of == name}
    asked: dict[tuple[str, str, str], Asked] = {}
    for i, one in enumerate(_filled(_get(raw, "qa", list, where), f"{where}: qa"), 1):
        question = _asked(one, f"{where}, question {i}", places, labels)
        asked.setdefault((question.category, question.question, question.answer), question)
    return Dialogue(name, tuple(lines), tuple(asked.values()))


def _lines(talk: Mapping[str, Any], where: str) -> tuple[list[Line], Places]:
    """The messages in order, and where evidence finds them: by its two numbers, or that of the session alone."""
    numbers = sorted(int(found[1]) for key in talk if (found := _SESSION.fullmatch(key)))
    if not numbers:
        raise UserError(f"{where}: no session; expected keys such as session_1 and session_1_date_time")
    lines: list[Line] = []
    places: Places = {}
    for number in numbers:
        key = f"session_{number}"
        before = f"\n[{_text(talk, f'{key}_date_time', where)}]\n"
        for i, message in enumerate(_filled(_get(talk, key, list, where), f"{where}: {key}"), 1):
            at = f"{where}: {key}, message {i}"
            place = _EVIDENCE.fullmatch(named := _text(message, "dia_id", at))
            if place is None or (int(place[1]), int(place[2])) in places:
                raise UserError(f"{at}: dia_id is {named[:40]!r}; expected one such as 'D1:3', each once")
            places[int(place[1]), int(place[2])] = places[number, None] = len(lines)
            lines.append(Line(number, before + _message(message, at)))
            before = ""
    return lines, places


def _message(raw: Any, where: str) -> str:
    image = f" [image: {_text(raw, 'blip_caption', where).strip()}]" if "blip_caption" in raw else ""
    return f"{_text(raw, 'speaker', where).strip()}: {_text(raw, 'text', where).strip()}{image}\n"


def _asked(raw: Any, where: str, places: Places, labels: Collection[str] | None) -> Asked:
    number = _get(raw, "category", int, where)
    if number not in CATEGORIES:
        raise UserError(f"{where}: category {number}; expected 1 to 5")
    answer = ""
    if CATEGORIES[number] != "adversarial":
        answer = str(raw["answer"]) if type(raw.get("answer")) is int else _text(raw, "answer", where)
    texts = _get(raw, "evidence", list, where)
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: evidence is {_shown(texts)}; expected texts such as 'D1:3'")
    named = [(int(session), int(line)) for text in texts for session, line in _EVIDENCE.findall(text)]
    # a message that is not there: the session it should be in, as far as there is one
    known = [places.get((session, line), places.get((session, None))) for session, line in named]
    evidence, question = tuple(place for place in known if place is not None), _text(raw, "question", where).strip()
    return Asked(CATEGORIES[number], question, answer, evidence, None if labels is None else question in labels)


def _pairs(path: Path) -> list[tuple[str, str]]:
    raw = _json(path)
    good = isinstance(raw, list) and all(isinstance(one, list) and len(one) == 2 for one in raw)
    if not good or not all(isinstance(text, str) for one in raw for text in one):
        raise UserError(f"{path}: {_shown(raw)}; expected a list of [sample_id, question], both texts")
    return [(name, question.strip()) for name, question in raw]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
        raise UserError(f"{path}: cannot be read as JSON ({str(error)[:200]}); expected LoCoMo's file") from error


def _get(raw: Any, key: str, kind: type[T], where: str) -> T:
    if not isinstance(raw, dict) or key not in raw:
        what = f"key {key!r} is missing" if isinstance(raw, dict) else _shown(raw)
        raise UserError(f"{where}: {what}; expected LoCoMo's form, with {_KINDS[kind]} {key!r}")
    if type(raw[key]) is not kind:  # not isinstance: true is no number here
        raise UserError(f"{where}: {key} is {_shown(raw[key])}; expected {_KINDS[kind]}")
    return raw[key]


def _text(raw: Any, key: str, where: str) -> str:
    text = _get(raw, key, str, where)
    if not text.strip() or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{where}: {key} is {_shown(text)}; expected a text that is not blank, of whole characters")
    return text


def _filled(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {_shown(value)}; expected a list with at least one entry, as LoCoMo's file has it")
    return value


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"
