"""LongBench's scores against published ones, and each rule by its effect. pytest tests/runs/test_metrics.py"""

import difflib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs.data import TASKS
from runs.errors import UserError
from runs.metrics import METRIC_OF, METRIC_VERSION, Score, backends, contains, score

SLOW = {"gov_report": pytest.mark.slow}  # rouge takes 0.1 s a row
ORACLE = "longbench_preds/llama3-8b-instruct"


def official(task: str, prediction: str, *answers: str, classes: tuple[str, ...] = ()) -> float:
    return score(task, prediction, answers, classes).official


def corrected(task: str, prediction: str, *answers: str, classes: tuple[str, ...] = ()) -> float:
    return score(task, prediction, answers, classes).corrected


@pytest.mark.parametrize("task", [pytest.param(task, marks=SLOW.get(task, ())) for task in TASKS])
def test_the_published_scores_of_a_model_come_out(shared_data: Callable[[str], Path], task: str) -> None:
    folder = shared_data(ORACLE)
    rows = [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]
    scores = [score(task, row["pred"], row["answers"], row["all_classes"]) for row in rows]
    published = json.loads((folder / "result.json").read_text())[task]
    assert abs(round(100 * sum(one.official for one in scores) / len(scores), 2) - published) <= 0.01
    assert all(0 <= one.corrected <= 1 for one in scores)


def test_every_task_of_the_study_has_a_metric() -> None:
    assert METRIC_OF.keys() == set(TASKS)


def test_no_torch_is_imported() -> None:
    code = "import sys, runs.metrics, scripts.score; sys.exit(any(n in sys.modules for n in ('torch', 'datasets')))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@given(st.text(max_size=60), st.lists(st.text(max_size=30), min_size=1, max_size=3), st.sampled_from(TASKS))
def test_any_text_has_a_score_between_0_and_1(prediction: str, answers: list[str], task: str) -> None:
    answers = {"passage_retrieval_en": ["Paragraph 3"], "passage_count": ["3"]}.get(task, answers)
    found = score(task, prediction, answers, answers)
    assert 0 <= found.official <= 1 and 0 <= found.corrected <= 1
    assert found.scorer_exception == (found.exception_name is not None)


# ---------------------------------------------------------------- words


def test_f1_of_words_by_hand() -> None:
    # found {cat, sat, on, mat}, gold {cat, on, on, mat}: 3 in common of 4 and 4
    assert official("qasper", "The cat sat, on a mat!", "cat on on mat") == pytest.approx(0.75)
    assert official("qasper", "Athena", "Then") == 0  # articles are dropped as whole words only
    assert official("qasper", "U.S.A.", "usa") == 1
    assert official("qasper", "x", "y", "x", "z") == 1  # the best over the answers


def test_texts_that_read_like_missing_values_are_texts() -> None:
    for text in ("None", "NA", "null", "nan"):
        assert score("qasper", text, [text]) == Score(1.0, 1.0)
    assert score("qasper", "", ["None"]) == Score(0.0, 0.0)
    assert official("trec", "NA", "NA", classes=("NA", "None")) == 1


def test_an_answer_of_articles_can_be_met_when_corrected() -> None:
    assert score("hotpotqa", "A", ["The A"]) == Score(0.0, pytest.approx(2 / 3))
    assert score("hotpotqa", "B", ["A"]) == Score(0.0, 0.0)
    assert score("hotpotqa", "?!", ["?!"]) == Score(0.0, 1.0)


# ---------------------------------------------------------------- first line


@pytest.mark.parametrize("task", ["triviaqa", "samsum"])
def test_what_follows_the_first_line_does_not_count(task: str) -> None:
    assert official(task, "\n\nParis\nLondon", "Paris") == pytest.approx(1) == official(task, "Paris", "Paris")
    assert official(task, "London\nParis", "Paris") == 0


def test_first_line_of_trec_and_of_no_other_task() -> None:
    assert official("trec", "Date\nFood", "Date", classes=("Date", "Food")) == 1
    assert official("hotpotqa", "London\nParis", "Paris") == pytest.approx(2 / 3)
    assert official("qmsum", "London\nParis", "Paris") > 0.5


def test_a_first_line_of_blanks_is_skipped_when_corrected() -> None:
    assert score("triviaqa", " \nParis\nLondon", ["Paris"]) == Score(0.0, 1.0)
    assert corrected("trec", "Date\r\nFood", "Date", classes=("Date", "Date\r", "Food")) == 1


# ---------------------------------------------------------------- rouge


def test_rouge_of_one_sentence_by_hand() -> None:
    # longest common subsequence of 3 words out of 4 and 6
    assert official("qmsum", "a b c d", "a x b y c z") == pytest.approx(2 * 3 / (4 + 6), abs=1e-6)


@pytest.mark.parametrize("empty", ["", ".", "..."])
def test_a_text_without_sentences_is_an_exception_and_counted(empty: str) -> None:
    assert score("gov_report", empty, ["a b"]) == Score(0.0, 0.0, True, "ValueError")
    assert score("gov_report", "a b", [empty]) == Score(0.0, 0.0, True, "ValueError")
    found = score("gov_report", "a b", [empty, "a b"])
    assert (found.scorer_exception, found.official) == (True, pytest.approx(1))


def deep(frames: int, call: Callable[[], Score]) -> Score:
    return deep(frames - 1, call) if frames else call()


@pytest.mark.parametrize("limit", [1000, 50_000])
@pytest.mark.parametrize("frames", [0, 600])
def test_long_text_without_periods_fails_where_the_reference_fails(frames: int, limit: int) -> None:
    """989 words in one sentence pass, 990 do not: measured on the reference's three frames above rouge."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        passes, fails = (deep(frames, lambda n=n: score("gov_report", "a " * n, ["b a"])) for n in (989, 990))
        assert sys.getrecursionlimit() == limit
    finally:
        sys.setrecursionlimit(before)
    assert not passes.scorer_exception and passes.official == passes.corrected
    assert (fails.official, fails.exception_name) == (0.0, "RecursionError")
    assert fails.corrected == pytest.approx(2 / 3)  # one distinct word of one, one of two


def test_a_space_after_the_last_period_is_no_word_when_corrected() -> None:
    found = score("samsum", "a b. ", ["a b."])
    assert found.official == pytest.approx(0.8) and found.corrected == pytest.approx(1)


# ---------------------------------------------------------------- classes and numbers


def test_classes_are_dropped_while_the_list_is_walked() -> None:
    classes = ("Lasting time", "time", "time of somethin", "Lasting time of somethin")
    found = score("trec", "Lasting time of somethin", ["Lasting time of somethin"], classes)
    assert found == Score(1 / 2, 1.0)  # the first goes, so the second is skipped, then the third goes
    assert official("trec", "Date or Food", "Date", classes=("Date", "Food")) == 1 / 2
    assert official("trec", "Food", "Date", classes=("Date", "Food")) == 0


def test_shares_of_integers() -> None:
    assert official("passage_count", "5, or 7, or 5", "5") == pytest.approx(2 / 3)
    assert official("passage_count", "five", "5") == 0
    assert official("passage_retrieval_en", "Paragraph 12, not 1", "Paragraph 12") == 1 / 2
    assert official("passage_retrieval_en", "12", "Paragraph 1") == 0
    assert score("passage_retrieval_en", "Paragraph 07", ["Paragraph 7"]) == Score(0.0, 1.0)
    assert score("passage_count", "0", ["00"]) == Score(0.0, 1.0)


# ---------------------------------------------------------------- code


def test_similarity_of_code_is_difflibs_in_whole_percent() -> None:
    assert score("lcc", "xaby zab", ["zab xaby"]) == Score(0.50, 0.625)  # the two algorithms differ here
    assert official("lcc", "abcd", "bcda x abcd") == 0.53  # 53.33 %
    assert official("lcc", "", "x") == 0 and official("lcc", "x = 1", "x = 1") == 1


def test_an_installed_levenshtein_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("Levenshtein")
    fake.ratio = fake.StringMatcher = lambda *_: 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "Levenshtein", fake)
    expected = round(100 * difflib.SequenceMatcher(None, "xaby zab", "zab xaby").ratio()) / 100
    assert official("lcc", "xaby zab", "zab xaby") == expected == 0.5


def test_the_line_of_code_that_counts() -> None:
    assert official("lcc", "\n```python\n# so\nx = 1\ny = 2", "x = 1") == 1
    assert official("lcc", 'open("http://a")\nx = 1', "x = 1") == 1  # any "//" disqualifies
    assert corrected("lcc", 'open("http://a")\nx = 1', 'open("http://a")') == 1
    assert corrected("repobench-p", "```\n\n   \n// no\n  # no\r\nx = 1\r\ny", "x = 1") == 1
    assert official("lcc", "  \nx = 1", "x = 1") == 0.57  # a line of two blanks is a line
    assert score("lcc", "# only\n`this`", ["x"]) == Score(0.0, 0.0)


# ---------------------------------------------------------------- values


def test_reference_values_are_found_whole() -> None:
    assert contains("The number is 12.", ["12"]) == 1 == contains("12, 13", ["12"])
    assert contains("123 or 312 or x12", ["12"]) == 0 == contains("it is 12.5 or 3.12", ["12"])
    assert contains("ALICE and bob", ["alice", "Bob", "Carol"]) == pytest.approx(2 / 3)
    assert contains("a+b is (x)", ["a+b", "(x)"]) == 1 and contains("aab", ["a+b"]) == 0
    assert contains("None", ["None"]) == 1 and contains("", ["None"]) == 0


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dureader", "x", ["x"], None), "task 'dureader': expected one of narrativeqa"),
        (("qasper", None, ["x"], None), "pred: found NoneType 'None'; expected a text"),
        (("qasper", 3, ["x"], None), "pred: found int '3'"),
        (("qasper", "x", "yes", None), "answers: found str 'yes'; expected a list"),
        (("qasper", "x", [], None), "answers: found list"),
        (("qasper", "x", ["a", None], None), "answers: found list"),
        (("trec", "x", ["x"], None), "all_classes: found NoneType 'None'; trec needs"),
        (("trec", "x", ["x"], "['x']"), "all_classes: found str"),
        (("passage_retrieval_en", "x", ["7"], None), "needs answers such as 'Paragraph 7'"),
        (("passage_count", "x", ["seven"], None), "needs whole numbers"),
    ],
)
def test_rows_of_the_wrong_form_are_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        score(*arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize("answers", [[], [""], ["a", " "], "a"])
def test_values_that_cannot_be_sought_are_refused(answers: list[str]) -> None:
    with pytest.raises(UserError, match="answers: "):
        contains("a", answers)


def test_backends_are_named() -> None:
    found = backends()
    assert found["metrics"] == METRIC_VERSION and found["difflib"] == f"Python {sys.version.split()[0]}"
    assert all(found[name] == importlib.metadata.version(name) for name in ("rouge", "rapidfuzz"))
