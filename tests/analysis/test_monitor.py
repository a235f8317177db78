"""The monitors from rows: the paths of cert.eprocess, which conversations they take, and what is refused."""

import json
import subprocess
import sys
from math import log10, sqrt

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from analysis.monitor import STRICT, monitored
from cert.eprocess import EProcess, weighted_sum
from runs.errors import UserError


def row(document, plain=None, strict=None, status="ok", audited=True):
    """One question's row; without steps it is not audited."""
    texts = [None if steps is None else json.dumps(list(steps)) for steps in (plain, strict)]
    return {
        "document": document,
        "status": status,
        "audited": audited,
        "miss_steps": texts[0],
        "miss_steps_strict": texts[1],
    }


def conversations(rng, count, miss, questions=3, steps=5, strict=0.0, audit=0.5):
    """Rows of `count` conversations whose head-steps miss with probability `miss`, ten heads a step."""
    rows = []
    for c in range(count):
        coin = bool(rng.random() < audit)
        for _ in range(questions):
            plain = rng.binomial(10, miss, steps) / 10
            hard = np.minimum(plain, rng.binomial(10, strict, steps) / 10)
            rows.append(row(f"c{c}", *((plain.tolist(), hard.tolist()) if coin else (None, None)), audited=coin))
    return pd.DataFrame(rows)


@pytest.mark.parametrize("delta", [0.05, 0.1])
def test_the_bets_are_those_on_the_means_of_audited_conversations(delta):
    frame = conversations(np.random.default_rng(1), 40, 0.2)
    found = monitored(frame, delta)
    process, shares = EProcess(delta), {}
    for record in frame[frame["audited"]].to_dict("records"):
        shares.setdefault(record["document"], []).extend(json.loads(record["miss_steps"]))
    for steps in shares.values():
        process.update(float(np.mean(steps)))
    assert [point["document"] for point in found["betting"]] == list(shares)
    assert (found["conversations"], found["audited"]) == (40, len(shares)) and 10 < len(shares) < 30
    for point, want in zip(found["betting"], process.path, strict=True):
        assert point["share"] == want.share and point["bet_alarm"] == want.bet_alarm
        assert point["bet_evidence"] == want.bet_evidence
        assert 10 ** point["log10_alarm"] == pytest.approx(np.exp(want.log_alarm), rel=1e-12)
        assert 10 ** point["log10_evidence"] == pytest.approx(np.exp(want.log_evidence), rel=1e-12)
    assert found["log10_alarm"] == max(point["log10_alarm"] for point in found["betting"])
    assert found["miss"] == pytest.approx(np.mean([np.mean(steps) for steps in shares.values()]))
    assert found["log10_alarm"] > found["log10_threshold"] == pytest.approx(log10(20))  # coverage 0.8 alarms


def test_good_coverage_gives_evidence_and_no_alarm():
    found = monitored(conversations(np.random.default_rng(2), 300, 0.005, audit=0.9))
    assert found["log10_evidence"] > found["log10_threshold"] > found["log10_alarm"]


def test_units_are_conversations_not_questions():
    """Steps that all miss in one conversation of many questions are one unit: no alarm from a single draw."""
    rows = [row("bad", [1.0] * 5, [1.0] * 5) for _ in range(50)] + [row(f"good {i}", [0.0], [0.0]) for i in range(20)]
    found = monitored(pd.DataFrame(rows))
    assert len(found["betting"]) == 21 and found["log10_alarm"] < found["log10_threshold"]


def test_a_trajectory_is_every_step_of_a_conversation_in_order():
    frame = conversations(np.random.default_rng(3), 12, 0.5, strict=0.2, audit=1.0)
    frame = frame.iloc[np.argsort(np.arange(len(frame)) % 3, kind="stable")]  # questions of a conversation apart
    found = monitored(frame, delta=0.2)
    assert len(found["trajectories"]) == 12 and found["delta"] == 0.2
    for own in found["trajectories"]:
        lists = frame[frame["document"] == own["document"]]["miss_steps_strict"]
        want = weighted_sum([x for text in lists for x in json.loads(text)], 0.2 / STRICT)
        path, at = np.zeros(own["steps"]), np.array(own["at"]) - 1
        path[at] = own["e"]
        np.testing.assert_array_equal(np.maximum.accumulate(path), want)
        assert np.diff(own["e"], prepend=0).min() > 0
    tops = [own["e"][-1] for own in found["trajectories"]]
    assert found["log10_trajectory"] == pytest.approx(log10(max(tops)))
    assert found["trajectory_alarms"] == sum(top >= 20 for top in tops)


def test_the_strict_sum_can_alarm_at_the_first_step():
    found = monitored(pd.DataFrame([row("c", [1.0], [1.0]), row("d", [1.0], [0.0])]))
    assert found["trajectories"] == [
        {"document": "c", "steps": 1, "at": [1], "e": [100.0]}, {"document": "d", "steps": 1, "at": [], "e": []}
    ]  # fmt: skip
    assert found["trajectory_alarms"] == 1


def test_only_the_past_moves_a_path():
    frame = conversations(np.random.default_rng(4), 30, 0.1, audit=1.0)
    long, short = monitored(frame), monitored(frame.iloc[:45])
    assert long["betting"][:15] == short["betting"] and long["trajectories"][:15] == short["trajectories"]


def test_failed_and_empty_rows_are_counted():
    rows = [
        row("a", [0.5], [0.0]), row("a", status="failed", audited=None), row("b", [], []),
        row("c", audited=False), row("d", status="failed", audited=None),
    ]  # fmt: skip
    found = monitored(pd.DataFrame(rows))
    assert {name: found[name] for name in ("conversations", "audited", "without_steps", "failed", "miss")} == {
        "conversations": 4, "audited": 2, "without_steps": 1, "failed": 2, "miss": 0.5,
    }  # fmt: skip
    assert [point["document"] for point in found["betting"]] == ["a"]


def test_nothing_audited_is_no_number():
    found = monitored(pd.DataFrame([row("a", audited=False), row("b", audited=False)]))
    assert found["miss"] is found["log10_alarm"] is found["log10_evidence"] is found["log10_trajectory"] is None
    assert found["betting"] == found["trajectories"] == [] and found["trajectory_alarms"] == 0
    json.dumps(found, allow_nan=False)


def test_steps_of_one_draw_keep_the_level_as_units_and_would_break_it_as_factors():
    """A third of the draws miss 15 % of every step, the others nothing: the mean is 5 %, the null."""
    rng, reps, alarms, wrong = np.random.default_rng(6), 100, 0, 0
    for _ in range(reps):
        lists = [[0.15 * (rng.random() < 1 / 3)] * 200 for _ in range(8)]
        alarms += monitored(pd.DataFrame([row(f"c{i}", x, x) for i, x in enumerate(lists)]))["log10_alarm"] > log10(20)
        product = EProcess()
        wrong += any(product.update(share) for steps in lists for share in steps)
    assert alarms / reps <= 0.05 + 3.3 * sqrt(0.05 * 0.95 / reps) < wrong / reps


def test_bets_are_offered_to_units_alone():
    """Nothing multiplies the e-values of dependent steps: the monitor is the one that bets, on conversations."""
    using = {path.name for floor in ("cert", "runs", "analysis", "scripts") for path in (ROOT / floor).rglob("*.py")
             if "EProcess" in path.read_text()}  # fmt: skip
    assert using == {"eprocess.py", "monitor.py"}


def test_the_result_is_plain_json():
    found = monitored(conversations(np.random.default_rng(5), 10, 0.3, strict=0.1, audit=1.0))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("c", [0.1], [0.0]), row("c", audited=False)], r"conversation c: audited is \['False', 'True'\]"),
        ([row("c", [0.1], [0.0], audited=None)], r"audited is \['None'\]; expected one coin"),
        ([row("c", [0.1], [0.0]), row("c", [0.1, 0.2], [0.0])], "differ in length"),
        ([row("c", [0.1], None)], "conversation c: miss_steps_strict is 'None'; expected a JSON list of shares"),
        ([row("c", [1.5], [0.0])], r"miss_steps is '\[1.5\]'; expected a JSON list of shares 0 to 1"),
        ([row("c", [None], [0.0])], "expected a JSON list of shares"),
        ([row("c", [float("nan")], [0.0])], "expected a JSON list of shares"),
        ([row("c", [True], [0.0])], "expected a JSON list of shares"),
        ([row("c") | {"miss_steps": "{", "miss_steps_strict": "[0]"}], "expected a JSON list of shares"),
    ],
)
def test_columns_that_contradict_themselves_are_refused(rows, message):
    with pytest.raises(UserError, match=message):
        monitored(pd.DataFrame(rows))


def test_it_needs_no_torch():
    code = "import sys, analysis.monitor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
