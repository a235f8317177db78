"""Answers to records: which are paired, which are left out, what a signal says, and whose fault a failure is."""

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import planted_tasks as planted
import pytest
from conftest import ROOT

from analysis.estimands import Cells
from analysis.intervals import resample
from analysis.requests import arm, blame, disagreement, mean_over_tasks, records, signal, with_threshold
from analysis.weighted import task_mean
from runs import prereg

REGISTRY = prereg.load()


def claim(name):
    """A claim as judging hands it to an estimand."""
    of = REGISTRY.claim(name)
    return replace(of, params={**asdict(REGISTRY.rules), **of.params})


def rows(change=None, arms=planted.ARMS, **how):
    return planted.frame(planted.world(planted.plan(ROOT, documents=4, requests=2, arms=arms, **how), change=change))


def cells(frame, name="all"):
    return Cells(name, frame, "document")


def paired(frame, **over):
    own = arm(frame, "poisson", "agnostic", [0.1, 0.25])
    return records(cells(frame), own, full=arm(frame, "full", "full"), again=arm(frame, "full", "full", draw=1), **over)


# ---------------------------------------------------------------- pairs


def test_an_answer_meets_the_same_requests_full_answer() -> None:
    frame = rows()
    found = paired(frame).cells.rows
    assert len(found) == 4 * 2 * 2 and set(found["budget"]) == {0.1, 0.25} and set(found["policy"]) == {"poisson"}
    for row in found.to_dict("records"):
        same = (
            (frame["document"] == row["document"]) & (frame["request"] == row["request"]) & (frame["policy"] == "full")
        )
        assert row["official_full"] == frame[same & (frame["draw"] == 0)]["official"].item()
        assert row["official_again"] == frame[same & (frame["draw"] == 1)]["official"].item()
        assert row["logprob_full"] == frame[same & (frame["draw"] == 0)]["logprob"].item()


def test_requests_of_two_examples_on_one_document_are_not_mixed() -> None:
    """Several LongBench rows share a context: their documents are equal, their examples are not."""
    frame = rows()
    frame["document"] = "one"
    assert len(paired(frame).cells) == 16
    assert paired(frame).cells.tasks == ["facts"]  # one cluster


def test_a_second_draw_is_another_arm() -> None:
    frame = rows(arms=planted.SECOND)
    assert len(arm(frame, "poisson", "agnostic", [0.25])) == len(arm(frame, "poisson", "agnostic", [0.25], draw=1)) == 8
    assert len(paired(frame).cells) == 16 and np.isnan(paired(frame).cells["official_again"]).all()


@pytest.mark.parametrize("which", ["full", "full again", "poisson agnostic 0.1"])
def test_a_pair_with_a_failed_member_is_left_out_and_counted(which) -> None:
    frame = rows()
    frame.loc[(frame["arm"] == which) & (frame["document"] == "facts 2"), ["status", "official"]] = ["failed", np.nan]
    found = paired(frame)
    lost = 2 if which.startswith("poisson") else 4
    assert (len(found.cells), found.failed) == (16 - lost, lost)
    (text,) = found.obstacles(claim("claim-7"))
    assert text == f"{lost} of 16 pairs have a failed member ({lost / 16:.1%}, at most 1%)"
    assert paired(rows()).obstacles(claim("claim-7")) == ()


def test_one_per_cent_of_failed_pairs_is_still_allowed() -> None:
    frame = planted.frame(planted.world(planted.plan(ROOT, documents=25, requests=4, arms=planted.SYNTHETIC)))
    own = arm(frame, "poisson", "agnostic", [0.1])
    for failing, allowed in ((1, True), (2, False)):
        frame.loc[own.index[:failing], "status"] = "failed"
        found = records(cells(frame), arm(frame, "poisson", "agnostic", [0.1]), full=arm(frame, "full", "full"))
        assert found.failed == failing and (found.obstacles(claim("claim-7")) == ()) == allowed


def test_a_partner_that_is_not_stored_makes_no_pair() -> None:
    frame = rows()
    gone = (frame["arm"] == "full") & (frame["document"] == "facts 0")
    assert (len(paired(frame[~gone]).cells), paired(frame[~gone]).failed) == (12, 0)
    gone = (frame["arm"] == "full again") & (frame["document"] == "facts 0")
    assert len(paired(frame[~gone]).cells) == 16


def test_a_partner_stored_twice_is_an_error() -> None:
    frame = rows()
    with pytest.raises(pd.errors.MergeError):
        paired(pd.concat([frame, frame[frame["arm"] == "full"]]))


# ---------------------------------------------------------------- thresholds and signals


@pytest.mark.parametrize(("metric", "kept"), [("rouge-l longbench-v1/1", 8), ("ROUGE-L x", 8), ("qa_f1 rouge", 16)])
def test_tasks_without_a_threshold_are_left_out_whole_by_their_metric(metric, kept) -> None:
    frame = rows(tasks=("qa", "summary"))
    summary = frame["task"] == "summary"
    frame.loc[summary, "metric"] = metric
    frame.loc[frame.index[summary][:5], ["status", "metric"]] = ["failed", None]
    left = with_threshold(frame, claim("claim-5"))
    assert len(arm(left, "poisson", "aware", [0.25])) == kept
    assert ("summary" in set(left["task"])) == (kept == 16)


def test_every_signal_is_high_where_things_are_bad() -> None:
    frame = rows().head(6).assign(
        certificate=[0.1, 0.2, 0.3, None, None, 0.5], certificate_assisted=1.0, cert_steps=[3, 3, 3, 2, 0, None],
        cert_flagged=[False, False, True, True, False, None], logprob=[-1.0, -2, -3, -4, -5, -6], entropy=2.0, margin=3.0,
    )  # fmt: skip
    np.testing.assert_equal(signal(frame, "certificate"), [0.1, 0.2, np.inf, np.inf, np.nan, np.nan])
    np.testing.assert_equal(signal(frame, "certificate_assisted"), [1, 1, np.inf, np.inf, np.nan, np.nan])
    assert list(signal(frame, "logprob")) == [1, 2, 3, 4, 5, 6]
    assert list(signal(frame.rename(columns={"logprob": "logprob_full"}), "logprob_full")) == [1, 2, 3, 4, 5, 6]
    assert (signal(frame, "entropy") == 2).all() and (signal(frame, "margin") == -3).all()
    assert (signal(frame, "prompt_tokens") == 500).all()


# ---------------------------------------------------------------- blame and noise


def test_blame_row_by_row() -> None:
    full, again, own = (np.array(x) for x in zip(*[(f, a, o) for f in (0, 0.5) for a in (0, 1, None) for o in (0.49, 0.5)],
                                                 strict=True))  # fmt: skip
    frame = pd.DataFrame({"official_full": full, "official_again": again.astype(float), "official": own})
    expected = {
        (0, 0, 0.49): "inherent", (0, 1, 0.49): "discordant", (0.5, 0, 0.49): "discordant", (0.5, 1, 0.49): "induced",
        (0, 1, 0.5): "discordant", (0.5, 0, 0.5): "discordant", (0, None, 0.49): "inherent", (0.5, None, 0.49): "induced",
    }  # fmt: skip
    induced, inherent, discordant = blame(cells(frame.assign(document="d")), 0.5)
    for k, key in enumerate(zip(full, again, own, strict=True)):
        said = [n for n, of in (("induced", induced), ("inherent", inherent), ("discordant", discordant)) if of[k]]
        assert said == ([expected[key]] if key in expected else [])


def test_the_designs_own_noise_is_counted_between_draws() -> None:
    frame = rows(arms=planted.SECOND)
    first = (frame["arm"] == "poisson agnostic 0.25").to_numpy()
    second = (frame["draw"] == 1).to_numpy()
    frame.loc[first, "official"] = [1, 1, 1, 0, 0, 0, 0, 1.0]
    frame.loc[second, "official"] = [0, 1, 1, 0, 1, 0, 0, 0.5]
    assert disagreement(frame, 0.5) == 2 / 8
    frame.loc[frame.index[second][0], "status"] = "failed"
    assert disagreement(frame, 0.5) == 1 / 7
    assert disagreement(rows(), 0.5) is None


# ---------------------------------------------------------------- means over tasks


def test_a_mean_over_tasks_is_the_frozen_one_where_each_has_several_documents() -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"task": np.repeat(["a", "b"], [12, 30]), "document": np.arange(42) // 3})
    values, of = rng.normal(size=42), cells(frame)
    boot = resample(of.tasks, 50, 1)
    sums, counts = (np.bincount(of.cluster, v) for v in (values, np.ones(42)))
    expected = task_mean(sums, counts, boot.tasks)
    for weights in (boot.ones, boot.weights):
        assert mean_over_tasks(of, values)(weights) == pytest.approx(expected(weights))


def test_tasks_of_one_document_keep_their_share_and_their_variance() -> None:
    """Sixteen tasks of one document each: the standard error is that of sixteen exchangeable values."""
    values = np.random.default_rng(2).normal(size=16)
    of = cells(pd.DataFrame({"task": [f"t{k}" for k in range(16)], "document": np.arange(16)}))
    boot = resample(of.tasks, 20_000, 1)
    means = mean_over_tasks(of, values)(boot.weights)
    assert mean_over_tasks(of, values)(boot.ones)[0] == pytest.approx(values.mean())
    assert np.isfinite(means).all() and means.std() == pytest.approx(values.std(ddof=1) / 4, rel=0.03)


def test_each_task_weighs_the_same() -> None:
    of = cells(pd.DataFrame({"task": ["a"] * 9 + ["b"], "document": np.arange(10)}))
    assert mean_over_tasks(of, np.array([0.0] * 9 + [1.0]))(np.ones((1, 10)))[0] == 0.5
