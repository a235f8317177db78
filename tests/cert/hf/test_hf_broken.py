"""What stopped half way, parted, ended or was changed behind the session's back is refused, never answered wrongly."""

import pytest
import torch
from oracle import KEYWORD, kept_sets, tiny, tokens

from cert.errors import CertError
from cert.hf import certified
from cert.policy import Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}
CONTEXT, GENERATE = tokens(120), {"max_new_tokens": 4, "do_sample": False}


def policy(name: str = "certified", budget: float = 0.35) -> Policy:
    return Policy.preset(name, budget=budget, **SMALL)


class Stopped(Exception):
    pass


def stopping(model, layer: int = 1):
    """A hook that stops the next forward before a layer, as an interrupt would."""

    def stop(*_: object) -> None:
        hook.remove()
        raise Stopped

    hook = model.model.layers[layer].register_forward_pre_hook(stop)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_forward_that_stopped_leaves_a_cache_that_refuses_to_go_on(compressed: bool) -> None:
    model = tiny()
    with certified(model, policy()) as session, torch.no_grad():
        session.prefill(CONTEXT)
        if compressed:
            session.compress()
        whole = session.cache
        kwargs = session.fork()
        stopping(model)
        with pytest.raises(Stopped):
            model(input_ids=tokens(5, 3), **kwargs)
        for go_on in (lambda: model(input_ids=tokens(5, 3), **kwargs), session.compress):
            with pytest.raises(CertError, match="did not finish"):
                go_on()
        with pytest.raises(CertError, match="did not finish"):
            model(input_ids=tokens(5, 3), **session.fork())
        again = model(input_ids=tokens(5, 3), **session.fork(of=whole)).logits
        assert again.isfinite().all()


def test_a_compression_that_failed_is_not_taken_for_done() -> None:
    with certified(tiny(), policy()) as session:
        session.prefill(CONTEXT)
        session.cache.layers[1].queries.fill_(torch.nan)
        with pytest.raises(CertError, match="finite"):
            session.compress()
        with pytest.raises(CertError, match="did not finish"):
            session.compress()


def rows_of(session, count: int = 2, name: str = "certified"):
    session.reset()
    session.prefill(CONTEXT)
    session.compress()
    whole, rows = session.cache, []
    for _ in range(count):
        session.fork(of=whole)
        rows.append(session.row())
    return rows


def test_rows_that_parted_stopped_or_outlived_the_session_are_refused() -> None:
    model, one = tiny(), tokens(1, 5)
    with certified(model, policy()) as session, torch.no_grad():
        rows = rows_of(session)
        together = session.together(rows, size=2)
        model(input_ids=one, **{KEYWORD: rows[0].cache})
        before = [row.cache.ids.clone() for row in rows]
        with pytest.raises(CertError, match="parted"):
            model(input_ids=one.expand(2, 1), **together)
        assert all(torch.equal(row.cache.ids, ids) for row, ids in zip(rows, before, strict=True))
        rows = rows_of(session)
        together = session.together(rows, size=2)
        stopping(model)
        with pytest.raises(Stopped):
            model(input_ids=one.expand(2, 1), **together)
        with pytest.raises(CertError, match="did not finish"):
            model(input_ids=one.expand(2, 1), **together)
    with certified(model, policy(budget=1.0)) as session, torch.no_grad():
        together = session.together(rows_of(session, 1), size=1)
    with pytest.raises(CertError, match="ended"), torch.no_grad():
        model(input_ids=one, **together)


def test_the_callback_of_rows_together_is_given_every_layer() -> None:
    model, said = tiny(), []
    with certified(model, policy(), callback=said.append) as session, torch.no_grad():
        rows = rows_of(session)
        model(input_ids=tokens(1, 5).expand(2, 1), **session.together(rows, size=2))
        for token, row in zip(said, rows, strict=True):
            assert token["request"] == row.request
            assert token["certificate"] == pytest.approx(session.summary(row.request)["certificate"]["value"], rel=1e-9)


def test_counts_of_another_cache_need_its_shape_and_no_escalation() -> None:
    model = tiny()
    arms = [policy("topk", 0.3), policy(budget=0.6)]
    ids = torch.cat([CONTEXT, tokens(3, 7)], dim=1)
    with certified(model, policy(), arms=arms) as session:
        session.prefill(CONTEXT.expand(2, -1))
        pair = session.cache
        session.reset()
        session.prefill(CONTEXT)
        snapshot = session.cache
        session.fork(arms[1], of=snapshot)
        session.compress()
        like = session.cache
        session.fork(arms[0], of=pair)
        with pytest.raises(CertError, match="as many layers, rows and KV heads"):
            session.compress(like=like)
        session.fork(arms[0], of=snapshot)
        session.compress(like=like)
        model.generate(ids, **session.cache_kwargs, **GENERATE)
        with pytest.raises(CertError, match="like another"):
            session.escalate(0.5)
        assert torch.equal(session.recompute(), tiny().generate(ids, **GENERATE))


def test_a_rerun_answers_the_prompt_that_was_asked() -> None:
    model, prompt = tiny(), CONTEXT.clone()
    with certified(model, policy()) as session:
        model.generate(prompt, **GENERATE)
        prompt.fill_(7)
        session.escalate(0.6)
        kept = kept_sets(session.cache)
        assert torch.equal(session.recompute(), tiny().generate(CONTEXT, **GENERATE))
        session.reset()
        model.generate(CONTEXT, **GENERATE)
        session.escalate(0.6)
        assert kept_sets(session.cache) == kept
