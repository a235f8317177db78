"""AUCs of two classes against scikit-learn, closed forms and loops; DeLong's variance; what is in no pair."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from analysis.compared import CELL, certified, compared, counted, flagged
from analysis.delong import delong
from analysis.estimands import Cells
from analysis.requests import Records

DRAWS = (400, 1)


def answers(score, positive, document, budget=0.25, logprob=None):
    """Answers whose certificate is the score."""
    frame = pd.DataFrame({"certificate": score, "positive": positive, "document": document, "budget": budget})
    frame = frame.assign(model="m", task="t", cert_steps=4, cert_flagged=False)
    return frame.assign(logprob=-1.0 if logprob is None else logprob)


def two(frame, use=None, draws=DRAWS, within=CELL):
    keep = np.ones(len(frame), bool) if use is None else use
    return compared(Cells("all", frame, "document"), frame["positive"].to_numpy(bool), keep, draws, within)


def normal(rng, n, delta, clusters, share=0.4):
    positive = rng.random(n) < share
    return answers(delta * positive + rng.normal(size=n), positive, np.arange(n) % clusters)


# ---------------------------------------------------------------- the AUC


def test_a_normal_shift_gives_its_closed_form() -> None:
    """Phi(delta / sqrt 2); -logprob without a shift gives 1/2, and the difference is that of the two."""
    rng = np.random.default_rng(1)
    frame = normal(rng, 6000, 1.0, 60).assign(logprob=rng.normal(size=6000))
    found = two(frame)
    truth = stats.norm.cdf(1 / np.sqrt(2))
    assert found.auc("certificate").value == pytest.approx(truth, abs=0.02)
    assert found.auc("logprob").value == pytest.approx(0.5, abs=0.02)
    low, high = found.auc("certificate").at(0.95)
    assert low < truth < high < low + 0.05
    gap = found.difference("certificate", "logprob")
    assert gap.value == pytest.approx(found.auc("certificate").value - found.auc("logprob").value)
    assert gap.at(0.95)[0] > 0.2


def test_cells_are_weighed_by_their_pairs_and_pooling_misleads() -> None:
    """Simpson: two budgets, one fails more and has larger certificates; within each the certificate says nothing."""
    rng = np.random.default_rng(2)
    budget = np.repeat([0.1, 0.5], 600)
    positive = rng.random(1200) < np.where(budget == 0.1, 0.8, 0.2)
    frame = answers(3.0 * (budget == 0.1) + rng.normal(size=1200), positive, np.arange(1200) % 40, budget)
    within, pooled = two(frame), two(frame, within=())
    assert pooled.auc("certificate").value == pytest.approx(roc_auc_score(positive, frame["certificate"]))
    assert pooled.auc("certificate").at(0.95)[0] > 0.7
    low, high = within.auc("certificate").at(0.95)
    assert low < 0.5 < high
    parts = [(roc_auc_score(of["positive"], of["certificate"]), of["positive"].sum() * (~of["positive"]).sum())
             for _, of in frame.groupby("budget")]  # fmt: skip
    assert within.auc("certificate").value == pytest.approx(
        np.average([a for a, _ in parts], weights=[w for _, w in parts])
    )


def test_cells_of_one_class_weigh_nothing_and_are_counted() -> None:
    rng = np.random.default_rng(3)
    frame = normal(rng, 300, 0.5, 30)
    one_class = answers(rng.normal(size=90), True, "elsewhere", np.repeat([0.5, 0.1, 0.3], 30))
    use = np.concatenate([np.ones(300, bool), np.repeat([True, True, False], 30)])  # the last has no answer of a class
    both = two(pd.concat([frame, one_class], ignore_index=True), use)
    assert both.without_pair == 3 and len(both.cells) == 300 and len(both.cells.tasks) == 30
    assert both.auc("certificate").value == two(frame).auc("certificate").value
    assert both.count("failures", "successes") == two(frame).count("failures", "successes")
    nothing = two(one_class)
    assert nothing.auc("certificate").value is None and nothing.difference("certificate", "logprob").value is None
    assert (
        nothing.delong("certificate").value is None and nothing.auc("certificate").reason == "no cell has both classes"
    )
    assert nothing.count("failures", "successes") == {"failures": 0, "successes": 0} and nothing.without_pair == 3


def test_flagged_answers_tie_for_the_highest_rank_and_unknown_ones_are_in_no_pair() -> None:
    rng = np.random.default_rng(4)
    frame = normal(rng, 200, 0.7, 20)
    frame.loc[:9, "cert_flagged"] = True
    frame.loc[10:29, "cert_steps"] = 0
    use = certified(found := Records(Cells("all", frame, "document"), 0, "answers"))
    assert use.sum() == 180 and flagged(found) == 10
    score = np.where(frame["cert_flagged"], 1e9, frame["certificate"])
    expected = roc_auc_score(frame["positive"][use], score[use])
    assert two(frame, use).auc("certificate").value == pytest.approx(expected)
    assert two(frame).auc("certificate").value == pytest.approx(expected)  # NaN scores drop out of that signal's pairs
    assert counted(found, two(frame, use)) == {"failed answers": 0, "no certificate": 20, "cells without a pair": 0}


def test_duplicated_documents_widen_what_answers_alone_would_narrow() -> None:
    """Each answer ten times over: the clustered interval stays, DeLong's shrinks by the root of ten."""
    frame = normal(np.random.default_rng(5), 120, 0.6, 120)
    tenfold = pd.concat([frame] * 10, ignore_index=True)
    once, often = two(frame), two(tenfold)
    assert often.auc("certificate").at(0.95) == pytest.approx(once.auc("certificate").at(0.95), abs=1e-9)
    width = [high - low for low, high in (x.delong("certificate").at(0.95) for x in (once, often))]
    assert width[0] / width[1] == pytest.approx(np.sqrt(10), rel=0.03)
    low, high = often.auc("certificate").at(0.95)
    assert high - low > 2.5 * width[1]


# ---------------------------------------------------------------- DeLong


def test_delong_is_its_definition_in_loops() -> None:
    rng = np.random.default_rng(6)
    positive, cell = rng.random(60) < 0.5, np.repeat([0, 1], 30)
    scores = np.round(rng.normal(size=(2, 60)) + 0.5 * positive, 1)  # with ties
    value, covariance = delong(list(scores), positive, cell)
    weights, parts = [], []
    for c in (0, 1):
        up, down = np.flatnonzero(positive & (cell == c)), np.flatnonzero(~positive & (cell == c))

        def beats(s, i, j):
            return float(s[i] > s[j]) + 0.5 * float(s[i] == s[j])

        v10 = np.array([[np.mean([beats(s, i, j) for j in down]) for i in up] for s in scores])
        v01 = np.array([[np.mean([beats(s, i, j) for i in up]) for j in down] for s in scores])
        parts.append((v10.mean(1), np.cov(v10) / len(up) + np.cov(v01) / len(down)))
        weights.append(len(up) * len(down))
        assert v10.mean(1)[0] == pytest.approx(roc_auc_score(positive[cell == c], scores[0][cell == c]))
    share = np.array(weights) / np.sum(weights)
    assert value == pytest.approx(share @ [v for v, _ in parts])
    assert covariance == pytest.approx(sum(s**2 * c for s, (_, c) in zip(share, parts, strict=True)))


def test_delong_and_the_clustered_interval_agree_where_answers_are_independent() -> None:
    frame = normal(np.random.default_rng(7), 800, 0.5, 800).assign(logprob=np.random.default_rng(8).normal(size=800))
    found = two(frame, draws=(1000, 1))
    for one, other in (
        (found.auc("certificate"), found.delong("certificate")),
        (found.difference("certificate", "logprob"), found.delong("certificate", "logprob")),
    ):
        assert one.value == pytest.approx(other.value)
        widths = [high - low for low, high in (one.at(0.95), other.at(0.95))]
        assert widths[0] == pytest.approx(widths[1], rel=0.08)


def test_one_of_a_class_has_no_variance_of_its_own() -> None:
    value, covariance = delong([np.array([3.0, 1, 2, 4])], np.array([True, False, False, False]), np.zeros(4, int))
    assert value[0] == pytest.approx(2 / 3) and covariance[0, 0] == pytest.approx(np.var([1, 1, 0], ddof=1) / 3)


def test_errors_are_as_rare_as_promised_with_clustered_answers() -> None:
    """The judged difference at its null, 300 studies of 30 documents: 2.5 % on each side, by a binomial bound."""
    studies, wrong = 300, np.zeros(2, int)
    for study in range(studies):
        rng = np.random.default_rng([9, study])
        document = np.repeat(np.arange(30), 8)
        positive = rng.random(240) < rng.beta(2, 2, 30)[document]
        shared = rng.normal(size=(2, 30))[:, document]
        one, other = 0.8 * positive + shared + rng.normal(size=(2, 240))
        low, high = two(answers(one, positive, document, logprob=-other), draws=(200, study)).difference(
            "certificate", "logprob"
        ).at(0.95)  # fmt: skip
        wrong += low > 0, high < 0
    assert wrong.max() <= stats.binom.ppf(0.999, studies, 0.025) and wrong.sum() >= 3, wrong
