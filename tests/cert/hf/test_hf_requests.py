"""A request keeps what was its own; the conversation is not mistaken for another cache; tokens are counted as fed."""

import gc
import weakref

import pytest
import torch
from oracle import KEYWORD, close, kept_sets, tiny, tokens

from cert.errors import CertError
from cert.hf import attention, certified, report, serve
from cert.hf.state import OPEN
from cert.policy import PRESETS, Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}
CONTEXT, GENERATE = tokens(150), {"max_new_tokens": 4, "do_sample": False}


def policy(name: str = "certified", **changes: object) -> Policy:
    return Policy.preset(name, **{"budget": 0.35, **SMALL, **changes})


def test_a_request_that_ended_stays_as_it_was() -> None:
    """A plain generate, a streaming conversation of two turns, a fork, a rerun: each summary as it was at its end."""
    model, said = tiny(), {}
    with certified(model, policy(), arms=[policy("topk")]) as session:

        def note() -> None:
            assert session.request not in said
            said[session.request] = session.summary()

        model.generate(tokens(90, 4), **GENERATE)
        note()
        session.prefill(CONTEXT)
        session.compress()
        out = model.generate(torch.cat([CONTEXT, tokens(3)], dim=1), **session.cache_kwargs, **GENERATE)
        note()
        session.prefill(torch.cat([out[:, -1:], tokens(40, 6)], dim=1))
        session.compress()
        model.generate(torch.cat([out, tokens(40, 6), tokens(2)], dim=1), **session.cache_kwargs, **GENERATE)
        note()
        session.escalate(budget=0.6)
        note()
        session.reset()
        session.prefill(CONTEXT)
        session.fork(policy("topk"))
        session.compress()
        note()
        session.recompute()
        session.reset()
        assert session.summary()["realised_budget"] == said[5]["realised_budget"]
        model.generate(tokens(70, 9).expand(2, -1), **GENERATE)
        later = [session.summary(request=k) for k in said]
        assert (
            session.summary(request=6)["documents"] == session.summary(request=7)["documents"] != said[0]["documents"]
        )
    for before, after in zip(said.values(), later, strict=True):
        spent = ("prefill_tokens", "rerun_prefill_tokens")
        assert {k: v for k, v in before.items() if k not in spent} == {k: v for k, v in after.items() if k not in spent}
    assert sorted(said) == [0, 1, 2, 3, 5] and said[1]["compressions"] == 1 and said[2]["compressions"] == 2
    assert [said[k]["nominal_budget"] for k in said] == [0.35, 0.35, 0.35, 0.6, 0.35]
    assert later[0]["prefill_tokens"] == 90 and later[1]["prefill_tokens"] == 240


def test_compress_does_not_take_another_forwards_cache() -> None:
    """A forward of a cache of the caller's own comes between: refused, and the conversation goes on by fork()."""
    model, other = tiny(), tokens(120, 8)
    full = torch.cat([CONTEXT, tokens(5, 2)], dim=1)
    with certified(model, policy()) as session, torch.no_grad():
        session.prefill(CONTEXT)
        mine = session.cache
        theirs = model(other)[KEYWORD]
        for act in (session.compress, lambda: session.cache_kwargs, lambda: session.prefill(tokens(3))):
            with pytest.raises(CertError, match=r"another cache: fork\(\) goes on"):
                act()
        assert not theirs.events and not mine.events and theirs.length == 120 and mine.length == 150
        assert session.summary()["cache_bytes_before"] == 2 * 2 * 2 * 120 * 8 * 4
        kwargs = session.fork()
        session.compress()
        kept = kept_sets(session.cache)
        one = model.generate(full, **kwargs, **GENERATE)
        model(other, use_cache=False)
        session.compress()
        assert session.cache.events == [150, 158] and not theirs.events
        theirs = model(tokens(1), **{KEYWORD: theirs})[KEYWORD]
        with pytest.raises(CertError, match="another cache"):
            session.compress()
        session.reset()
        model(tokens(1), **{KEYWORD: theirs})
        session.compress()
        assert session.cache is theirs and theirs.events[-1] == 122
    with certified(model, policy()) as session:
        session.prefill(CONTEXT)
        session.compress()
        assert kept_sets(session.cache) == kept
        assert torch.equal(model.generate(full, **session.cache_kwargs, **GENERATE), one)


def test_a_generate_from_nothing_lets_the_conversation_before_it_go() -> None:
    """Freed before the new prompt is fed, not after the answer; and a call that fails has no plans of another's."""
    model, alive = tiny(), []
    with certified(model, policy(), callback=lambda token: alive.append(before() is not None)) as session:
        session.prefill(CONTEXT)
        session.compress()
        before = weakref.ref(session.cache)
        gc.collect()
        model.generate(tokens(90, 4), **GENERATE)
        assert alive == [False] * 3
        with pytest.raises(ValueError, match="nonsense"):
            model.generate(tokens(90, 4), nonsense=1)
        assert session._last.runs == {} and session.summary()["budget_tokens"] == 31


def test_a_generate_is_a_conversation_too() -> None:
    model = tiny()
    with certified(model, policy()) as session, torch.no_grad():
        model.generate(CONTEXT, **GENERATE)
        mine = session.cache
        model(tokens(60, 3))
        with pytest.raises(CertError, match="another cache"):
            session.compress()
        assert mine.events == [150] and not session.cache.events


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("certified", "full")])
def test_a_callback_hears_each_token_of_every_composition(name: str) -> None:
    model, heard, chosen = tiny(), [], policy(name)
    with certified(model, chosen, callback=heard.append):
        model.generate(CONTEXT, **GENERATE)
    assert [(x["request"], x["step"], x["position"]) for x in heard] == [(0, 0, 150), (0, 1, 151), (0, 2, 152)]
    for found in heard:
        assert found["reason"] == chosen.no_certificate
        assert (found["certificate"] is None) == (found["undefined_share"] is None) == (found["reason"] is not None)


def test_a_callback_with_certificates_off_and_with_full() -> None:
    for chosen, delta in ((policy(), None), (Policy.preset("full"), 0.05)):
        model, heard = tiny(), []
        with certified(model, chosen, delta=delta, callback=heard.append) as session:
            model.generate(CONTEXT, **GENERATE)
        reason = report.OFF if delta is None else chosen.no_certificate
        assert [(x["certificate"], x["reason"], x["position"]) for x in heard] == [
            (None, reason, n) for n in (150, 151, 152)
        ]
        assert session.blocks == [] or delta is not None


def test_a_callback_in_a_batch_is_told_its_own_request() -> None:
    model, rows, both, alone = tiny(), tokens(150, 8, rows=2), [], []
    with certified(model, policy(), callback=both.append):
        model.generate(rows, **GENERATE)
    with certified(model, policy(), callback=alone.append):
        model.generate(rows[:1], **GENERATE)
    assert [x["certificate"] for x in both] == pytest.approx([x["certificate"] for x in alone], rel=1e-4)


def test_running_sums_hold_no_graph() -> None:
    model = tiny()
    with certified(model, policy("h2o")) as session:
        out = model(input_ids=CONTEXT)
        for _ in range(3):
            out = model(input_ids=out.logits[:, -1:].argmax(-1), **{KEYWORD: out[KEYWORD]})
            assert all(x.mass.grad_fn is None for x in session.cache.compressible.values())
        assert out.logits.requires_grad and session.summary()["compressions"] == 1


@pytest.mark.parametrize("extra", [{}, {"prefill_chunk_size": 64}])
def test_a_rerun_counts_the_tokens_it_prefills(extra: dict[str, object]) -> None:
    """Three returned sequences are three prefilled rows, in generate() as in recompute() and escalate()."""
    model, sampling = tiny(), {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4, **extra}
    with certified(model, policy()) as session:
        model.generate(CONTEXT, **sampling)
        assert (session.prefill_tokens, session.rerun_tokens) == (450, 0)
        assert session.recompute().shape == (3, 154)
        assert (session.prefill_tokens, session.rerun_tokens) == (900, 450)
        session.escalate(budget=0.5)
        assert (session.prefill_tokens, session.rerun_tokens) == (1350, 900)
        assert session.summary()["rerun_prefill_tokens"] == 900


def test_two_models_that_share_a_config() -> None:
    one, other = tiny(), tiny()
    other = type(one)(one.config).eval()
    ids = tokens(80)
    alone = other.generate(ids, **GENERATE)
    with certified(one, policy()) as session:
        with pytest.raises(CertError, match="shares its config"), certified(other, policy()):
            raise AssertionError("the block ran")
        assert one.generate(ids, **GENERATE).shape[1] == 84 and session.cache.length == 83
        assert one.config._attn_implementation == "certified" and len(OPEN) == 1
    assert one.config._attn_implementation == "sdpa" and not OPEN
    assert torch.equal(other.generate(ids, **GENERATE), alone)


@pytest.mark.parametrize("where", ["set_attn_implementation", "register_forward_pre_hook", "after", "hook"])
def test_all_is_given_back_when_entering_or_leaving_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), tokens(80)
    alone = model.generate(ids, **GENERATE)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        if where == "after":
            patch.setattr(serve, "take_over", lambda *x: (attention.take_over(*x), broken()))
        elif where == "hook":
            patch.setattr(torch.utils.hooks.RemovableHandle, "remove", broken)
        else:
            patch.setattr(type(model), where, broken)
        with pytest.raises(RuntimeError, match="broken"), certified(model, policy()):
            pass
        assert model.config._attn_implementation == "sdpa" and not OPEN
    if where == "hook":
        model._forward_pre_hooks.clear()
        model.__dict__.pop("generate")
    assert "generate" not in model.__dict__ and not model._forward_pre_hooks
    close(model.generate(ids, **GENERATE).float(), alone.float())
