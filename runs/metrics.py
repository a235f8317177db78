"""LongBench's scores: `official` as the reference computes them, quirks included, and `corrected` beside it. No torch."""

import difflib
import importlib.metadata
import platform
import re
import string
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import rapidfuzz
import rouge

from runs.errors import UserError

METRIC_VERSION = "longbench-v1/1"
METRIC_OF = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), "qa_f1"
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "rouge-l"),
    **dict.fromkeys(("lcc", "repobench-p"), "code_sim"),
    "trec": "classification",
    "passage_count": "count",
    "passage_retrieval_en": "retrieval",
}
FIRST_LINE = frozenset({"trec", "triviaqa", "samsum"})
# Python's limit of 1000, under which the reference runs, and the two frames that our thread has more than its script
# has above rouge: measured, both give up one sentence between 989 and 990 words that match nothing.
REFERENCE_LIMIT = 1000 + 2
UNLIMITED = 1_000_000
ROUGE_RAISES = (RecursionError, ValueError, AssertionError)
_limit_lock = threading.Lock()


@dataclass(frozen=True)
class Score:
    """The score of one row, the best over its answers, both in 0..1; where the reference's scorer raised, its name."""

    official: float
    corrected: float
    scorer_exception: bool = False
    exception_name: str | None = None


def backends() -> dict[str, str]:
    """What computes the scores, and its version: it belongs in the provenance of every score."""
    packages = {name: importlib.metadata.version(name) for name in ("rouge", "rapidfuzz")}
    return {"metrics": METRIC_VERSION, **packages, "difflib": f"Python {platform.python_version()}"}


def score(task: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> Score:
    """Official and corrected score of a prediction, max over answers, in 0..1 (Bai et al. 2024, LongBench v1).

    official: qa_f1, the F1 of normalised words; rouge-l of the package rouge; classification, 1 / classes found where
    the gold is one; retrieval and count, the share of integers that equal the gold; code_sim, difflib's ratio in whole
    percent. trec, triviaqa and samsum are cut to their first line. Where rouge raises, 0.0 and `scorer_exception`.
    corrected differs in this, and only in this:
        first line      the first that is not blank, and without its carriage return
        qa_f1           an answer of nothing but articles or punctuation is compared as it stands
        rouge-l         without recursion limit; blank sentences are no word; a text without sentences scores 0
        classification  every class that is only a part of the gold's name is dropped
        retrieval, count  integers are compared by value (07 is 7)
        code_sim        blank lines, fences and whole-line comments are skipped, but no line that merely holds a "#",
                        "//" or backtick; rapidfuzz's ratio, not rounded
    Raises UserError for an unknown task, or a prediction, answers or classes of the wrong form.
    """
    check(task, prediction, answers, all_classes)
    official_text = fixed_text = prediction
    if task in FIRST_LINE:
        official_text = prediction.lstrip("\n").split("\n")[0]
        fixed_text = prediction.lstrip().split("\n")[0].rstrip("\r")
    official, fixed = METRICS[METRIC_OF[task]]
    classes, values, raised = all_classes or (), [0.0], None
    for answer in answers:
        try:
            values.append(official(official_text, answer, classes))
        except ROUGE_RAISES as error:
            raised = raised or type(error).__name__
    corrected = max(fixed(fixed_text, answer, classes) for answer in answers)
    return Score(max(values), corrected, raised is not None, raised)


def contains(prediction: str, answers: Sequence[str]) -> float:
    """Share of the reference values found in the prediction, in 0..1: whole values, whatever their case.

    12 is neither in 123 nor in 12.5. Raises UserError where there is no reference value, or an empty one.
    """
    _check_texts(prediction, answers)
    if not all(answer.strip() for answer in answers):
        raise UserError("answers: an empty reference value; expected texts that can be found")
    patterns = (rf"(?<!\w)(?<!\d\.){re.escape(answer.strip().lower())}(?!\w|\.\d)" for answer in answers)
    return sum(bool(re.search(pattern, prediction.lower())) for pattern in patterns) / len(answers)


def check(task: str, prediction: Any, answers: Any, all_classes: Any) -> None:
    """Raises UserError where `score` cannot take these: unknown task, no text, no answers, none of the task's form."""
    if task not in METRIC_OF:
        raise UserError(f"task {task!r}: expected one of {', '.join(METRIC_OF)}")
    _check_texts(prediction, answers)
    if METRIC_OF[task] == "classification" and not _is_texts(all_classes):
        raise UserError(f"all_classes: {_shown(all_classes)}; {task} needs the list of its class names")
    if METRIC_OF[task] == "retrieval" and not all(re.search(r"Paragraph (\d+)", answer) for answer in answers):
        raise UserError(f"answers: {_shown(answers)}; {task} needs answers such as 'Paragraph 7'")
    if METRIC_OF[task] == "count" and not all(re.fullmatch(r"\s*\d+\s*", answer) for answer in answers):
        raise UserError(f"answers: {_shown(answers)}; {task} needs whole numbers as texts")


def _check_texts(prediction: Any, answers: Any) -> None:
    if not isinstance(prediction, str):
        raise UserError(f"pred: {_shown(prediction)}; expected a text (it may be empty)")
    if not _is_texts(answers):
        raise UserError(f"answers: {_shown(answers)}; expected a list of at least one text")


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(text, str) for text in value)


def _shown(value: Any) -> str:
    return f"found {type(value).__name__} {str(value)[:60]!r}"


def _words(text: str, articles: bool = False) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return (plain if articles else re.sub(r"\b(a|an|the)\b", " ", plain)).split()


def _overlap_f1(found: Sequence[str], gold: Sequence[str]) -> float:
    """2 * common / (found + gold) as multisets of words."""
    common = sum((Counter(found) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _qa_f1(prediction: str, gold: str, _: Sequence[str]) -> float:
    return _overlap_f1(_words(prediction), _words(gold))


def _qa_f1_fixed(prediction: str, gold: str, _: Sequence[str]) -> float:
    if _words(gold):
        return _overlap_f1(_words(prediction), _words(gold))
    if _words(gold, articles=True):
        return _overlap_f1(_words(prediction, articles=True), _words(gold, articles=True))
    return float(prediction.strip() == gold.strip())


@contextmanager
def _recursion_limit(limit: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _rouge_within(limit: int, prediction: str, gold: str) -> float:
    with _recursion_limit(limit):
        found = rouge.Rouge(metrics=["rouge-l"]).get_scores([prediction], [gold], avg=True)
    return float(found["rouge-l"]["f"])


@lru_cache(maxsize=8)  # the corrected score of most texts is the official one; a failure is not kept
def _rouge(prediction: str, gold: str, limit: int = REFERENCE_LIMIT) -> float:
    """In a thread, whose stack is new: whether rouge runs out of it must not depend on how deep the caller is."""
    with _limit_lock, ThreadPoolExecutor(1) as fresh:
        return fresh.submit(_rouge_within, limit, prediction, gold).result()


def _rouge_l(prediction: str, gold: str, _: Sequence[str]) -> float:
    return _rouge(prediction, gold)


def _rouge_l_fixed(prediction: str, gold: str, _: Sequence[str]) -> float:
    found, wanted = _without_blanks(prediction), _without_blanks(gold)
    if not (found and wanted):
        return 0.0
    try:
        return _rouge(found, wanted)
    except RecursionError:
        return _rouge(found, wanted, UNLIMITED)


def _without_blanks(text: str) -> str:
    """The text without its blank sentences: rouge takes one (a space after the last period) for the word ""."""
    sentences = [sentence for sentence in text.split(".") if sentence]
    filled = [sentence for sentence in sentences if sentence.strip()]
    return text if filled == sentences and filled else ".".join(filled)


def _classification(prediction: str, gold: str, classes: Sequence[str]) -> float:
    found = [name for name in classes if name in prediction]
    for name in found:  # the reference removes from the list it walks, and so skips the one after
        if name in gold and name != gold:
            found.remove(name)
    return 1 / len(found) if gold in found else 0.0


def _classification_fixed(prediction: str, gold: str, classes: Sequence[str]) -> float:
    found = [name for name in classes if name in prediction and (name == gold or name not in gold)]
    return 1 / len(found) if gold in found else 0.0


def _integer(gold: str) -> str:
    return re.findall(r"Paragraph (\d+)", gold)[0] if "Paragraph" in gold else gold


def _share(prediction: str, gold: str, _: Sequence[str]) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(_integer(gold)) / len(numbers) if numbers else 0.0


def _share_fixed(prediction: str, gold: str, _: Sequence[str]) -> float:
    numbers = [number.lstrip("0") for number in re.findall(r"\d+", prediction)]
    return numbers.count(_integer(gold).strip().lstrip("0")) / len(numbers) if numbers else 0.0


def _code_sim(prediction: str, gold: str, _: Sequence[str]) -> float:
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, gold).ratio()) / 100


def _code_sim_fixed(prediction: str, gold: str, _: Sequence[str]) -> float:
    code = (line.rstrip("\r") for line in prediction.split("\n"))
    line = next((line for line in code if line.strip() and not line.lstrip().startswith(("```", "#", "//"))), "")
    return rapidfuzz.fuzz.ratio(line, gold) / 100


Metric = Callable[[str, str, Sequence[str]], float]
METRICS: dict[str, tuple[Metric, Metric]] = {  # (official, corrected)
    "qa_f1": (_qa_f1, _qa_f1_fixed),
    "rouge-l": (_rouge_l, _rouge_l_fixed),
    "classification": (_classification, _classification_fixed),
    "retrieval": (_share, _share_fixed),
    "count": (_share, _share_fixed),
    "code_sim": (_code_sim, _code_sim_fixed),
}
