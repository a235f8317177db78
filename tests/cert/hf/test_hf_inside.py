"""What happens inside a running generate() beside its own forwards: it stays one request on one cache, or is refused."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from oracle import KEYWORD, kept_sets, tiny, tokens
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from cert.errors import CertError
from cert.hf import certified
from cert.policy import Policy

POLICY = Policy.preset("certified", budget=0.35, sinks=2, recent=8, window=8)
IDS, GENERATE = tokens(120), {"max_new_tokens": 5, "do_sample": False}


class Processor(LogitsProcessor):
    """Does something before the third token is chosen, and leaves the scores as they are."""

    def __init__(self, act: Callable[[torch.Tensor], object]) -> None:
        self.act = act

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 122:
            self.act(ids)
        return scores


class Criterion(Processor, StoppingCriteria):
    """The same before the decision to stop, which is never taken."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        super().__call__(ids, scores)
        return torch.zeros(len(ids), dtype=torch.bool)


HOOKS = {
    "processor": lambda act: {"logits_processor": LogitsProcessorList([Processor(act)])},
    "criterion": lambda act: {"stopping_criteria": StoppingCriteriaList([Criterion(act)])},
}


@pytest.fixture(scope="module")
def undisturbed():
    """(answer, certificates, kept tokens) of the same call with nothing beside it."""
    model = tiny()
    with certified(model, POLICY) as session:
        out = model.generate(IDS, **GENERATE)
        return out, session.certificates, kept_sets(session.cache)


@pytest.mark.parametrize("where", [*HOOKS, "callback"])
@pytest.mark.parametrize("length", [3, 120, 300])
def test_a_forward_of_the_callers_own_without_a_cache(where: str, length: int, undisturbed: tuple) -> None:
    """Also by the callback, which is called in the middle of a forward."""
    model = tiny()
    alone, seen = model(tokens(length), use_cache=False).logits, []

    def act(_: object) -> None:
        seen.append(model(tokens(length), use_cache=False).logits)

    with certified(model, POLICY, callback=act if where == "callback" else None) as session:
        out = model.generate(IDS, **({} if where == "callback" else HOOKS[where](act)), **GENERATE)
        assert torch.equal(out, undisturbed[0]) and session.certificates == undisturbed[1]
        assert kept_sets(session.cache) == undisturbed[2]
        assert session.request == 0 and session.prefill_tokens == 120 and session.summary()["certificate"]["steps"] == 4
    assert len(seen) == (4 if where == "callback" else 1) and all(torch.equal(one, alone) for one in seen)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("what", ["none", "flag", "another", "short"])
def test_one_that_would_begin_another_cache_is_refused(hook: str, what: str, undisturbed: tuple) -> None:
    """Else one generate() would be several requests, and summary() that of the last, which has no step."""
    model = tiny()
    with certified(model, POLICY) as session:
        session.prefill(IDS)
        session.compress()
        whole = session.cache
        session.fork()
        calls = {
            "none": model,
            "flag": lambda ids: model(ids, use_cache=True),
            "short": lambda ids: model(ids[:, -1:]),
            "another": lambda ids: model(ids[:, -1:], **{KEYWORD: whole}),
        }
        with pytest.raises(CertError, match=r"LlamaForCausalLM: a forward inside generate\(\).*use_cache=False"):
            model.generate(IDS, **HOOKS[hook](calls[what]), **GENERATE)
        assert session.request == 2 and session.cache.length == {"processor": 122, "criterion": 121}[hook]
        assert whole.length == 120
        assert torch.equal(model.generate(IDS, **GENERATE), undisturbed[0])
        assert session.request == 3 and kept_sets(session.cache) == undisturbed[2]


def test_rows_together_beside_a_running_generate_keep_their_own_requests(undisturbed: tuple) -> None:
    model = tiny()
    with certified(model, POLICY) as session:
        session.prefill(tokens(90, 4))
        session.compress()
        row = session.row()
        rows = session.together([row], size=2)
        act = HOOKS["processor"](lambda _: model(tokens(1, 5).expand(2, -1), **rows))
        assert torch.equal(model.generate(IDS, **act, **GENERATE), undisturbed[0])
        assert session.request == 1 and kept_sets(session.cache) == undisturbed[2] and row.cache.length == 91
        assert session.summary(0)["certificate"]["steps"] == 1 and session.summary(1)["certificate"]["steps"] == 4


def test_a_model_that_drops_its_cache_on_the_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the prefix of another cache as in its own: an aware request never takes the place of an agnostic one."""
    model = tiny()
    prepare = model.prepare_inputs_for_generation

    def dropping(ids: torch.Tensor, *args: object, **kwargs: object) -> dict[str, object]:
        given = prepare(ids, *args, **kwargs)
        return given if ids.shape[1] < 123 else {"input_ids": ids, "use_cache": True}

    monkeypatch.setattr(model, "prepare_inputs_for_generation", dropping)
    with certified(model, POLICY) as session:
        with pytest.raises(CertError, match="the model has dropped it"):
            model.generate(IDS, **GENERATE)
        assert session.request == 0 and session.cache.length == 122
        session.reset()
        session.prefill(IDS)
        session.compress()
        mine = session.cache
        with pytest.raises(CertError, match="the model has dropped it"):
            model.generate(torch.cat([IDS, tokens(20, 4)], dim=1), **session.cache_kwargs, **GENERATE)
        assert session.cache is mine and mine.length == 120 and session.request == 1


INSIDE = {
    "prefill": lambda session, _: session.prefill(tokens(9)),
    "reset": lambda session, _: session.reset(),
    "fork": lambda session, _: session.fork(),
    "escalate": lambda session, _: session.escalate(0.8),
    "recompute": lambda session, _: session.recompute(),
    "generate": lambda session, _: session.model.generate(tokens(30), max_new_tokens=2),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("where", [*HOOKS, "callback"])
def test_what_would_part_the_running_request_is_refused(name: str, where: str, undisturbed: tuple) -> None:
    model, act = tiny(), lambda ids: INSIDE[name](session, ids)
    callback, hooks = ({"callback": act}, {}) if where == "callback" else ({}, HOOKS[where](act))
    with certified(model, POLICY, **callback) as session:
        with pytest.raises(CertError, match=r"inside a running generate\(\)"):
            model.generate(IDS, **hooks, **GENERATE)
        assert session.request == 0 and session.cache.events == [120]
        if callback:
            assert torch.equal(session.recompute(), tiny().generate(IDS, **GENERATE))
            return
        assert torch.equal(model.generate(IDS, **GENERATE), undisturbed[0])
        assert kept_sets(session.cache) == undisturbed[2] and session.request == 1


@pytest.mark.parametrize("hook", HOOKS)
def test_after_an_exception_in_the_middle_the_next_call_is_as_if_nothing_was(hook: str, undisturbed: tuple) -> None:
    model = tiny()

    def broken(_: torch.Tensor) -> None:
        raise RuntimeError("broken")

    with certified(model, POLICY) as session:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken"):
                model.generate(IDS, **HOOKS[hook](broken), **GENERATE)
        assert torch.equal(model.generate(IDS, **GENERATE), undisturbed[0])
        assert kept_sets(session.cache) == undisturbed[2] and session.request == 2
        session.escalate(0.6)
        session.compress()
        session.prefill(tokens(4))
        session.compress()
        assert session.cache.events == [120, 124, 128]
    assert "generate" not in model.__dict__


def test_a_forward_between_two_calls_is_a_conversation_of_its_own() -> None:
    model = tiny()
    with certified(model, POLICY) as session, torch.no_grad():
        first = model.generate(IDS, **GENERATE)
        model(tokens(40))
        assert session.request == 1 and session.cache.length == 40
        assert torch.equal(model.generate(IDS, **GENERATE), first) and session.request == 2


def test_reset_lets_the_cache_of_a_generate_go() -> None:
    model = tiny()
    with certified(model, POLICY) as session:
        model.generate(IDS, **GENERATE)
        cache = weakref.ref(session.cache)
        session.reset()
        gc.collect()
        assert cache() is None
