"""session.gated(): always recomputed it is the full cache, never it is the compressed run, escalated it keeps a superset."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf

import jaxtyping
import pytest
import torch
from oracle import FAMILIES, kept_sets, tiny, tokens
from test_hf_bytes import storages
from test_hf_escalate import nested

from cert.errors import CertError
from cert.gate import Gate
from cert.hf import Session, certified
from cert.policy import Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}
POLICY = Policy.preset("certified", budget=0.3, **SMALL)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 1.7}
TURNS = [tokens(110, 5), tokens(40, 6), tokens(30, 7), tokens(9, 8)]
FULL = torch.cat(TURNS, dim=1)
MODES = {"aware": 0, "agnostic": 1, "streaming": 3}  # turns that are compressed one by one before the question


@contextmanager
def opened(model, mode: str, policy: Policy = POLICY, **options: object) -> Iterator[tuple[Session, dict]]:
    """A session up to the question, and what generate() needs to go on."""
    with certified(model, policy, **options) as session:
        turns = [torch.cat(TURNS[:-1], dim=1)] if mode == "agnostic" else TURNS[: MODES[mode]]
        for turn in turns:
            session.prefill(turn)
            session.compress()
        yield session, session.cache_kwargs if turns else {}


def same(one, other) -> bool:
    return torch.equal(one.sequences, other.sequences) and all(map(torch.equal, one.logits, other.logits))


def compressed(model, mode: str, budget: float = 0.3, settings: dict = GREEDY):
    """(output, certificate, kept sets) of the same request without a gate."""
    with opened(model, mode, POLICY.with_budget(budget)) as (session, kwargs):
        torch.manual_seed(3)
        out = model.generate(FULL, **kwargs, **settings)
        return out, session.summary()["certificate"]["value"], kept_sets(session.cache)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_always_is_the_full_cache_and_never_is_the_compressed_run(family: str, mode: str, settings: dict) -> None:
    model, found = tiny(family), {}
    for threshold in (-1.0, inf):
        with opened(model, mode) as (session, kwargs):
            torch.manual_seed(3)
            found[threshold] = session.gated(Gate(threshold), FULL, **kwargs, **settings)
    torch.manual_seed(3)
    assert same(found[-1.0][0], model.generate(FULL, **settings))
    out, certificate, _ = compressed(model, mode, settings=settings)
    assert same(found[inf][0], out) and not same(found[inf][0], found[-1.0][0])
    assert same(found[-1.0][1].rejected[0], out) and found[inf][1].rejected == ()
    assert found[-1.0][1].decision == "recompute" and found[inf][1].decision == "answer"
    assert found[-1.0][1].certificate == found[inf][1].certificate == certificate > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_threshold_decides_at_the_certificate_itself(mode: str) -> None:
    model = tiny()
    _, certificate, _ = compressed(model, mode)
    for threshold, decision in ((certificate, "answer"), (certificate * (1 - 1e-9), "recompute")):
        with opened(model, mode) as (session, kwargs):
            assert session.gated(Gate(threshold), FULL, **kwargs, **GREEDY)[1].decision == decision


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_escalation_keeps_a_superset_and_decides_again(family: str, mode: str) -> None:
    model = tiny(family)
    _, small, few = compressed(model, mode)
    with opened(model, mode) as (session, kwargs):
        model.generate(FULL, **kwargs, **GREEDY)
        want, large = session.escalate(0.6), session.summary()["certificate"]["value"]
    assert large < small
    with opened(model, mode) as (session, kwargs):
        out, record = session.gated(Gate((small + large) / 2, 0.6), FULL, **kwargs, **GREEDY)
        assert same(out, want) and nested(few, kept_sets(session.cache), session.cache.events[-1])
    assert (record.decision, record.certificate, record.escalated_certificate) == ("escalate", small, large)
    assert record.peak_bytes is None
    with opened(model, mode) as (session, kwargs):
        out, record = session.gated(Gate(large / 2, 0.6), FULL, **kwargs, **GREEDY)
    assert same(out, model.generate(FULL, **GREEDY)) and same(record.rejected[1], want) and len(record.rejected) == 2
    assert (record.decision, record.certificate, record.escalated_certificate) == ("recompute", small, large)


@pytest.mark.parametrize(("mode", "first"), [("aware", 189), ("agnostic", 0), ("streaming", 0)])
def test_what_was_spent_and_held(mode: str, first: int) -> None:
    """Prefill is counted where rows are written before anything is evicted; the question goes to retained ones."""
    model = tiny()
    with opened(model, mode) as (session, kwargs):
        _, record = session.gated(Gate(inf), FULL, **kwargs, **GREEDY)
        summary = session.summary()
        assert (record.prefill_tokens, record.rerun_prefill_tokens, record.request) == (first, 0, session.request)
        assert (record.cache_bytes, record.full_bytes) == (
            summary["cache_bytes_after"], summary["cache_bytes_before"],
        )  # fmt: skip
        assert record.cache_bytes < 0.5 * record.full_bytes == 0.5 * (189 + 5) * 2 * 2 * 2 * 8 * 4
    with opened(model, mode) as (session, kwargs):
        _, record = session.gated(Gate(-1.0), FULL, **kwargs, **GREEDY)
        assert (record.prefill_tokens, record.rerun_prefill_tokens) == (first, 189)
        assert record.peak_bytes == record.full_bytes + storages(session.cache)
        assert session._full is None
    with opened(model, mode) as (session, kwargs):
        _, record = session.gated(Gate(-1.0, 0.6), FULL, **kwargs, **GREEDY)
        assert record.rerun_prefill_tokens == 189 + (189 if mode == "aware" else 180)


def test_a_conversation_goes_on_from_its_snapshot() -> None:
    """Questions asked on forks, whatever the gate did to them: the same answers in any order."""
    model, asked = tiny(), [torch.cat([FULL[:, :180], tokens(7, seed)], dim=1) for seed in (1, 2, 3)]
    with opened(model, "streaming") as (session, _):
        snapshot = session.cache
        before, found = kept_sets(snapshot), {}
        for order in ((0, 1, 2), (2, 0, 1)):
            for k in order:
                gate = [Gate(inf), Gate(-1.0), Gate(-1.0, 0.6)][k]
                out, record = session.gated(gate, asked[k], **session.fork(of=snapshot), **GREEDY)
                assert (record.peak_bytes is None) == (record.decision != "recompute")
                found.setdefault(k, []).append((out.sequences.tolist(), replace(record, request=0)))
        assert all(one == other for one, other in found.values()) and kept_sets(snapshot) == before
        session.fork(of=snapshot)
        session.prefill(tokens(20, 9))
        session.compress()
        assert session.cache.events == [110, 150, 180, 200]


def test_without_a_step_nothing_is_answered() -> None:
    """The first answer token of a question-aware request comes from the dense prefill: no certificate yet."""
    model = tiny()
    with certified(model, POLICY) as session:
        _, record = session.gated(Gate(inf), FULL, **(GREEDY | {"max_new_tokens": 1}))
    assert (record.decision, record.certificate) == ("recompute", None)


def test_a_certificate_undefined_in_over_a_tenth_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from cert.hf import report

    real, every = report.certify, iter(range(10**6))

    def holed(*given):
        found = real(*given)
        return found | ({"var_hat": found["var_hat"] * torch.nan} if next(every) % 7 == 0 else {})

    monkeypatch.setattr(report, "certify", holed)
    with opened(tiny(), "agnostic") as (session, kwargs):
        _, record = session.gated(Gate(inf, 0.6), FULL, **kwargs, **GREEDY)
        summary = session.summary(record.request)["certificate"]
    assert summary["flagged"] and summary["value"] > 0
    assert (record.decision, record.certificate, record.escalated_certificate) == ("recompute", None, None)


def test_bad_use_is_refused_before_any_work() -> None:
    model, fed = tiny(), []
    model.register_forward_hook(lambda *_: fed.append(1))

    def refused(message: str, gate: object = Gate(0.1), ids: object = FULL, policy: Policy = POLICY, **options) -> None:
        with certified(model, policy, **options) as session, pytest.raises(CertError, match=message) as error:
            session.gated(gate, ids, **GREEDY)
        assert "\n" not in str(error.value)

    jaxtyping.config.update("jaxtyping_disable", True)  # as a user meets it
    try:
        refused("gate 0.1: expected a cert.gate.Gate", 0.1)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    refused("gated: certificates are switched off", delta=None)
    refused("gated: no certificate to decide by; design topk", policy=Policy.preset("topk", budget=0.3, **SMALL))
    refused("gated: no certificate to decide by; design none", policy=Policy.preset("full"))
    refused("gated: a batch of 2; expected one row", ids=tokens(50, rows=2))
    refused("gated: escalate_to 0.3; expected a budget above the present 0.3", Gate(0.1, 0.3))
    refused("expected input_ids", ids=None)
    with certified(model, POLICY) as session, pytest.raises(CertError, match="gated: a batch of 3; expected one row"):
        session.gated(Gate(0.1), FULL, **SAMPLED, num_return_sequences=3)
    assert not fed
    topk = Policy.preset("topk", budget=0.3, **SMALL)
    with certified(model, POLICY, arms=[topk]) as session:
        session.prefill(FULL[:, :180])
        kwargs = session.fork(topk)
        session.compress()
        with pytest.raises(CertError, match="no certificate to decide by; design topk"):
            session.gated(Gate(0.1), FULL, **kwargs, **GREEDY)
    with pytest.raises(CertError, match="session has ended"):
        session.gated(Gate(0.1), FULL, **GREEDY)
