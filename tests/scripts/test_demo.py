"""make demo: what it prints is what the gate decided, in 80 columns, and its threshold is computed."""

import json
import re

import pytest

from cert.gate import quantile_threshold
from cert.hf.call import Gated
from runs import demo as scenes
from runs.errors import UserError
from runs.kinds import policy_of
from runs.registry import load
from scripts import demo
from scripts.compose import compose

RHO = load().claims["extension-2"].params["rho"]
NAME = "tiny random Llama"


@pytest.fixture(autouse=True)
def _smoke(monkeypatch, tmp_path):
    for name in ("MODEL", "MODELS", "DATA", "CTX", "ARGS", "STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROFILE", "smoke")
    monkeypatch.setattr(demo, "PUBLISHED", tmp_path / "extension-2.json")


def shown(capsys) -> str:
    assert demo.main([]) == 0
    return capsys.readouterr().out


def said_threshold(page: str) -> float:
    return float(re.search(r"recomputes\s+above\s+(-?[\d.]+|inf):", page)[1])


def test_the_page_says_what_the_gate_did(capsys, monkeypatch) -> None:
    """Calibrated on the questions that are not shown; every decision is the threshold's; the sums are the lines'."""
    monkeypatch.setenv("ARGS", "assistant.facts=12")
    calibrated, heard, given = [], [], []
    real, asks = scenes.Scene.certificates, scenes.Scene.heard
    monkeypatch.setattr(scenes.Scene, "certificates", lambda *x: calibrated.append(real(*x)) or calibrated[-1])

    def noting(scene, session, end, question, gate):
        given.append((scene.conversation, end, question))
        heard.append(asks(scene, session, end, question, gate))
        return heard[-1]

    monkeypatch.setattr(scenes.Scene, "heard", noting)
    page = shown(capsys)
    assert max(map(len, page.splitlines())) <= 80 and all(c.isprintable() or c == "\n" for c in page)
    (least,) = re.findall(r"never below (\d+) tokens", " ".join(page.split()))
    policy = compose(["profile=smoke"]).policies[0]
    assert int(least) == policy_of(policy).with_budget(1e-6).tokens(100_000)[0]
    turns = re.findall(r"^turn +(\d+)  .* +([\d,]+) fed +([\d,]+) kept$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in turns] == list(range(1, 31))
    fed, kept = ([int(turn[i].replace(",", "")) for turn in turns] for i in (1, 2))
    assert sorted(fed) == fed and fed[-1] > 3000 and abs(kept[-1] / fed[-1] - 0.1) < 0.01 and 40 < kept[0] <= fed[0]
    (certificates,) = calibrated
    threshold = quantile_threshold(certificates, RHO)
    assert said_threshold(page) == round(threshold, 4) and len({*certificates}) == 7
    assert "7 of the other questions" in " ".join(page.split()) and len(heard) == 5
    assert [one.age for one in heard] == sorted({one.age for one in heard})
    noted = re.findall(r"certificate ([\d.]+): (answer|recompute)$", page, re.MULTILINE)
    for one, (value, decision) in zip(heard, noted, strict=True):
        assert one.gated.decision == decision == ("answer" if one.gated.certificate <= threshold else "recompute")
        assert float(value) == round(one.gated.certificate, 4) and len(one.answers) == 1 + (decision == "recompute")
        assert f"{one.question} " in page and f": {one.value}\n" in page and f"said {one.age} turn" in page
    again = [one for one in heard if one.gated.decision == "recompute"]
    assert again and page.count("  full cache  ") == len(again)
    prompts = [len(conversation.history) + len(question.ids) for conversation, _, question in given]
    spent = sum(tokens for tokens, one in zip(prompts, heard, strict=True) if one in again)
    assert re.search(rf"^answered +{5 - len(again)} +0 +0 +0$", page, re.MULTILINE)
    assert re.search(rf"^recomputed +{len(again)} +0 +0 +{spent:,}$", page, re.MULTILINE)
    sizes = re.search(r"([\d.]+) MB compressed, ([\d.]+) MB in full\nat most in memory +([\d.]+) MB", page)
    small, whole, peak = map(float, sizes.groups())
    row = sum(2 * 4 * layer.keys.shape[1] * layer.keys.shape[-1] for layer in given[0][1].layers)
    assert whole == round(fed[-1] * row / 1e6, 1) and small < 0.12 * whole and peak >= whole


@pytest.mark.parametrize(
    ("model", "profile", "used"), [(NAME, "smoke", True), (NAME, "laptop", False), ("another", "smoke", False)]
)
def test_a_published_threshold_is_taken_for_its_model_and_profile(model, profile, used) -> None:
    demo.PUBLISHED.write_text(json.dumps({"profile": profile, "beside": {model: {"threshold": 2.5}}}))
    assert demo.published(NAME, "smoke") == (2.5 if used else None)


def test_without_a_published_result_there_is_none() -> None:
    assert demo.published(NAME, "smoke") is None
    demo.PUBLISHED.write_text(json.dumps({"profile": "smoke", "beside": {}}))
    assert demo.published(NAME, "smoke") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"profile": "smoke"}',
        '{"profile": "smoke", "beside": []}',
        '{"profile": "smoke", "beside": {"tiny random Llama": 3}}',
        '{"profile": "smoke", "beside": {"tiny random Llama": {"threshold": "high"}}}',
        '{"profile": "smoke", "beside": {"tiny random Llama": {"threshold": NaN}}}',
        f'{{"profile": "smoke", "beside": {{"tiny random Llama": {{"threshold": 1{"0" * 400}}}}}}}',
        "[" * 100_000,
        b"\xff",
    ],
    ids=lambda x: str(x)[:60],
)
def test_a_damaged_published_result_is_one_line(text) -> None:
    demo.PUBLISHED.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"extension-2\.json: .*; expected|extension-2\.json: cannot be read"):
        demo.published(NAME, "smoke")


def test_with_a_published_threshold_nothing_is_calibrated(capsys, monkeypatch) -> None:
    """One in the middle of this model's certificates: some answers stand and others do not."""
    demo.PUBLISHED.write_text(json.dumps({"profile": "smoke", "beside": {NAME: {"threshold": 2.6}}}))
    monkeypatch.setattr(scenes.Scene, "certificates", None)
    page = shown(capsys)
    assert said_threshold(page) == 2.6 and "as published" in " ".join(page.split())
    noted = re.findall(r"certificate ([\d.]+): (answer|recompute)$", page, re.MULTILINE)
    assert [decision for _, decision in noted] == ["answer" if float(x) <= 2.6 else "recompute" for x, _ in noted]
    kept = sum(decision == "answer" for _, decision in noted)
    assert 0 < kept < 5 == len(noted) and page.count("  full cache  ") == 5 - kept
    assert re.search(rf"^answered +{kept} +0 +0 +0$", page, re.MULTILINE)
    assert re.search(rf"^recomputed +{5 - kept} +0 +0 +[\d,]+$", page, re.MULTILINE)


def test_the_table_adds_up(capsys) -> None:
    """Right after the gate, and right before it; bytes of both caches where one was recomputed, else none."""

    def one(decision: str, right: tuple[bool, ...], spent: int, peak: int | None) -> scenes.Heard:
        record = Gated(0, decision, 0.5, None, 0, spent, 1, 1, peak, ())
        return scenes.Heard("q", 1, "v", ("a",) * len(right), right, record)

    stood = [one("answer", (True,), 0, None), one("answer", (False,), 0, None)]
    redone = [one("recompute", (False, True), 1000, 2 * 10**6), one("recompute", (True, False), 1200, 10**6)]
    demo.table([*stood, *redone, one("recompute", (False, True), 1, 1)], (10**7, 10**6), 3.4)
    page = capsys.readouterr().out
    numbers = [re.findall(r"[\d,.]+", text) for text in page.splitlines() if re.match("answered|recomputed", text)]
    assert numbers == [["2", "1", "1", "0"], ["3", "2", "1", "2,201"]]
    assert "1.0 MB compressed, 10.0 MB in full" in page and "2.0 MB: compressed" in page and " 3 s," in page
    demo.table(stood, (10**7, 10**6), 3.4)
    assert "nothing recomputed" in capsys.readouterr().out


def test_the_questions_are_shown_evenly_over_the_ages() -> None:
    class One:
        def __init__(self, age: int) -> None:
            self.age = age

    questions = [One(age) for age in (30, 3, 9, 1, 12, 17, 24, 28, 6, 20, 15, 22)]
    asked, others = demo.divided(questions)
    assert [one.age for one in asked] == [1, 9, 17, 22, 30] and len(others) == 7 and {*asked, *others} == set(questions)
    assert [len(part) for part in demo.divided(questions[:3])] == [3, 0]


def test_what_a_model_says_cannot_move_the_terminal() -> None:
    assert scenes.plain("\x1b[2Ja\tb\n c\x07") == "[2Ja b c"


def test_a_wrong_setting_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setenv("MODEL", "nowhere")
    from scripts._cli import run

    assert run(lambda: demo.main([])) == 2
    assert capsys.readouterr().err.count("\n") == 1
