"""LoCoMo's scores: by hand, against a second implementation, and by properties. pytest tests/runs/test_locomo_metrics.py"""

import importlib.metadata
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.stem import PorterStemmer

from runs.errors import UserError
from runs.locomo_metrics import METRIC_VERSION, backends, score, words
from runs.locomo_rows import CATEGORIES, Asked, load

HAND = [
    # 2 * common / (words of the prediction + words of the reference)
    ("single_hop", "The garden fences, and a hammer!", "garden fence", 4 / 5),  # garden fenc hammer / garden fenc
    ("single_hop", "by rowing", "rows", 2 / 3),
    ("single_hop", "a dog and a dog", "dog", 2 / 3),  # as multisets: the second dog is one too many
    ("single_hop", "dog", "a dog and a dog", 2 / 3),
    ("single_hop", "families", "family", 1.0),
    ("single_hop", "dying", "die", 1.0),  # Porter's own algorithm leaves "dy"
    ("single_hop", "$1,200", "1200", 1.0),
    ("single_hop", "Band", "b", 0.0),  # "and" is dropped as a word, not out of one
    ("single_hop", "band and hand", "hand band", 1.0),
    ("single_hop", "", "dog", 0.0),
    ("single_hop", "The.", "the", 0.0),  # nothing is left of either
    ("single_hop", "red; blue", "red; green", 1 / 2),  # only open_domain is cut at ";"
    ("single_hop", "red, blue", "red, green", 1 / 2),  # and only multi_hop at ","
    ("temporal", "3 March 2021", "3 March, 2021", 1.0),
    ("temporal", "March", "3 March, 2021", 2 / 4),
    ("open_domain", "Maybe not", "maybe not; although he enjoys rowing, he would rather paint", 1.0),
    ("open_domain", "rowing", "maybe not; although he enjoys rowing", 0.0),
    ("open_domain", "not; maybe", "maybe not", 1.0),  # the prediction is not cut
    ("multi_hop", "rowing, painting", "painting, a lake", 1 / 2),
    ("multi_hop", "lake", "lake, hills, marsh", 1 / 3),
    ("multi_hop", "the hill lake", "lake, hills", (2 / 3 + 2 / 3) / 2),
    ("multi_hop", "lake, hill", "lake", 1.0),  # a part of the prediction too many costs nothing
    ("multi_hop", "red; blue", "red; blue", 1.0),
    ("multi_hop", "dog", "dog,", 1 / 2),  # the part behind the last comma has no words, and nothing matches it
    ("adversarial", "It is Not Mentioned in the conversation.", "", 1.0),
    ("adversarial", "NO INFORMATION AVAILABLE", "", 1.0),
    ("adversarial", "There is no information.", "", 0.0),
    ("adversarial", "not  mentioned", "", 0.0),
    ("adversarial", "", "", 0.0),
]


@pytest.mark.parametrize(("category", "prediction", "answer", "expected"), HAND)
def test_scores_by_hand(category: str, prediction: str, answer: str, expected: float) -> None:
    assert score(category, prediction, answer) == pytest.approx(expected, abs=1e-12)


def test_words_are_stemmed_and_articles_go() -> None:
    assert words("An apple, the Theory's AND a band's e-mail") == ["appl", "theori", "band", "email"]
    assert words("The sky\tis\nskies and as") == ["sky", "is", "sky", "as"]


class Reference:
    """The same rules once more, from their description: lists instead of counters, one letter after another."""

    stemmer = PorterStemmer()

    def normal(self, text: str) -> list[str]:
        kept = "".join("" if letter in string.punctuation else letter for letter in text.lower())
        # a word's border is where \w begins or ends, so that articles stand alone between other characters too
        parts = [part for part in re.split(r"(\W+)", kept) if part]
        text = "".join(" " if part in ("a", "an", "the", "and") else part for part in parts)
        return [self.stemmer.stem(word) for word in text.split()]

    def f1(self, one: Sequence[str], other: Sequence[str]) -> float:
        left, common = list(other), 0
        for word in one:
            if word in left:
                left.remove(word)
                common += 1
        if common == 0:
            return 0.0
        precision, recall = common / len(one), common / len(other)
        return 2 * precision * recall / (precision + recall)

    def score(self, category: int, prediction: str, answer: str) -> float:
        if category == 5:
            said = prediction.lower()
            return 1.0 if said.find("no information available") >= 0 or said.find("not mentioned") >= 0 else 0.0
        if category == 1:
            parts = [self.normal(part) for part in prediction.split(",")]
            wanted = [self.normal(part) for part in answer.split(",")]
            return sum(max(self.f1(part, gold) for part in parts) for gold in wanted) / len(wanted)
        if category == 3 and ";" in answer:
            answer = answer[: answer.index(";")]
        return self.f1(self.normal(prediction), self.normal(answer))


def predictions(asked: Sequence[Asked], i: int) -> list[str]:
    """What a model may say: right, half right, another question's answer, with a comma more, nothing."""
    own, other = asked[i].answer or "Not mentioned.", asked[(i * 7 + 3) % len(asked)].answer
    half = " ".join(own.split()[: 1 + len(own.split()) // 2])
    return [own, half, other, f"{other}, {half}", f"{own.upper()}; {other}", f"It was {own}", ""]


def test_a_second_implementation_gives_the_same_scores(shared_data: Callable[[str], Path]) -> None:
    """Of seven predictions to each real question, 13,825 in all; the references are the published ones."""
    reference, compared, seen = Reference(), 0, set()
    numbers = {category: number for number, category in CATEGORIES.items()}
    for talk in load(str(shared_data("locomo"))):
        for i, asked in enumerate(talk.questions):
            for said in predictions(talk.questions, i):
                found = score(asked.category, said, asked.answer)
                assert found == pytest.approx(reference.score(numbers[asked.category], said, asked.answer), abs=1e-12)
                compared += 1
                seen.add((asked.category, 0 < found < 1))
    assert compared == 7 * 1975
    assert seen >= {(category, True) for category in CATEGORIES.values() if category != "adversarial"}


def test_a_right_answer_scores_1(shared_data: Callable[[str], Path]) -> None:
    for talk in load(str(shared_data("locomo"))):
        for asked in talk.questions:
            if asked.category not in ("adversarial", "open_domain") and not asked.answer.rstrip().endswith(","):
                assert score(asked.category, asked.answer, asked.answer) == pytest.approx(1.0), asked


@given(st.text(max_size=40), st.text(max_size=40), st.sampled_from(list(CATEGORIES.values())))
def test_any_text_has_a_score_between_0_and_1(prediction: str, answer: str, category: str) -> None:
    found = score(category, prediction, answer)
    assert 0 <= found <= 1
    assert found == pytest.approx(Reference().score(list(CATEGORIES.values()).index(category) + 1, prediction, answer))


def test_a_category_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="category 'multi hop'; expected one of multi_hop, temporal, open_domain"):
        score("multi hop", "x", "x")


def test_the_stemmer_is_recorded() -> None:
    assert backends() == {"metrics": METRIC_VERSION, "nltk": importlib.metadata.version("nltk")}
