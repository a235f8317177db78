"""LoCoMo's scores, as its own evaluation computes them (Maharana et al. 2024, task_eval). No torch."""

import importlib.metadata
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from runs.errors import UserError
from runs.locomo_rows import CATEGORIES

METRIC_VERSION = "locomo/1"
UNANSWERABLE = ("no information available", "not mentioned")  # either makes an answer to an adversarial question right
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def backends() -> dict[str, str]:
    """What computes the scores, and its version: another stemmer gives other numbers."""
    return {"metrics": METRIC_VERSION, "nltk": importlib.metadata.version("nltk")}


def score(category: str, prediction: str, answer: str) -> float:
    """Score of a prediction, from 0 to 1.

    F1 of the stemmed words as multisets. multi_hop: prediction and reference are split at commas; the mean over the
    reference's parts of the best F1 with a part of the prediction. open_domain: only what stands before the reference's
    first ";". adversarial: whether the prediction says that there is no answer; the reference plays no part.
    Raises UserError for another category.
    """
    if category not in CATEGORIES.values():
        raise UserError(f"category {category!r}; expected one of {', '.join(CATEGORIES.values())}")
    if category == "adversarial":
        return float(any(phrase in prediction.lower() for phrase in UNANSWERABLE))
    if category == "multi_hop":
        found = [words(part) for part in prediction.split(",")]
        best = [max(_f1(part, words(gold)) for part in found) for gold in answer.split(",")]
        return sum(best) / len(best)
    return _f1(words(prediction), words(answer.split(";")[0] if category == "open_domain" else answer))


def words(text: str) -> list[str]:
    """Stems of the words of a text: lower case, without punctuation, and without a, an, the, and."""
    plain = re.sub(r"\b(a|an|the|and)\b", " ", text.lower().translate(_PUNCTUATION))
    return [_stem(word) for word in plain.split()]


@cache
def _stem(word: str) -> str:
    stem: str = _stemmer().stem(word)
    return stem


@cache
def _stemmer() -> Any:
    # Seconds, and needed only where a score is. Porter's own algorithm stems 151 of the 5,932 words of the file otherwise.
    from nltk.stem import PorterStemmer

    return PorterStemmer()


def _f1(found: Sequence[str], gold: Sequence[str]) -> float:
    """2 * common / (found + gold), of multisets."""
    common = (Counter(found) & Counter(gold)).total()
    return 2 * common / (len(found) + len(gold)) if common else 0.0
