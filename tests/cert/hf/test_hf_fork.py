"""One prefill serves several arms and questions: forks are independent, and equal to arms prefilled by themselves."""

import hashlib

import pytest
import torch
from oracle import FAMILIES, kept_sets, tiny, tokens

from cert.errors import CertError
from cert.hf import CertifiedCache, Session, certified
from cert.policy import Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}
CONTEXT, QUESTIONS = tokens(160), {"q": tokens(5, 2), "r": tokens(7, 4)}
GENERATE = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
ARMS = {
    "full": Policy.preset("full"),
    "all": Policy.preset("certified", budget=1.0, **SMALL),
    "topk": Policy.preset("topk", budget=0.35, **SMALL),
    "poisson": Policy.preset("certified", budget=0.35, **SMALL),
    "wide": Policy.preset("snapkv", budget=0.35, **{**SMALL, "window": 24}),
    "h2o": Policy.preset("h2o", budget=0.35, **SMALL),
}


def checksum(cache: CertifiedCache) -> str:
    """SHA-256 of every tensor of a cache, and of what else it knows of its conversation."""
    found = hashlib.sha256(repr((cache.events, cache.documents, cache.expected, cache.policy)).encode())
    for thing in (cache, *cache.layers):
        for name, value in sorted(vars(thing).items()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                    found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def storages(cache: CertifiedCache) -> set[int]:
    values = [v for layer in cache.layers for value in vars(layer).values()
              for v in (value if isinstance(value, tuple) else (value,))]  # fmt: skip
    return {v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor) and v.numel()}


def answer(model: object, session: Session, question: str) -> tuple[object, ...]:
    """Compress now, ask: text, logits, retained sets, certificates of the request."""
    session.compress()
    out = model.generate(torch.cat([CONTEXT, QUESTIONS[question]], dim=1), **session.cache_kwargs, **GENERATE)
    table, last = session.certificates, session.request
    mine = [
        (*place, radius, norm)
        for request, *place, radius, norm in zip(
            *(table[name] for name in ("request", "step", "layer", "head", "radius", "out_norm")), strict=True
        )
        if request == last
    ]
    logits = [[x.hex() for x in row.flatten().tolist()] for row in out.logits]
    return out.sequences.tolist(), logits, kept_sets(session.cache), mine, session.summary()["no_certificate"]


def alone(family: str, arm: str, question: str) -> tuple[object, ...]:
    """The same arm in a session and a model of its own."""
    model = tiny(family)
    with certified(model, ARMS[arm]) as session:
        session.prefill(CONTEXT)
        return answer(model, session, question)


def forked(family: str, order: list[tuple[str, str]], audit: bool = False) -> dict[tuple[str, str], tuple[object, ...]]:
    """Every arm and question from one prefill, whose checksum never changes."""
    model, found = tiny(family), {}
    with certified(model, ARMS["full"], arms=ARMS.values(), audit=audit) as session:
        session.prefill(CONTEXT)
        snapshot = session.cache
        before = checksum(snapshot)
        for arm, question in order:
            session.fork(ARMS[arm], of=snapshot)
            assert not storages(snapshot) & storages(session.cache)
            found[arm, question] = answer(model, session, question)
            assert checksum(snapshot) == before
        assert session.prefill_tokens == 160
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_arm_and_question_from_one_prefill(family: str) -> None:
    """The snapshot stays; budget 1.0 is bit-equal to full; an arm is what it is alone; order does not matter."""
    order = [(arm, question) for arm in ARMS for question in QUESTIONS]
    found = forked(family, order)
    assert forked(family, order[::-1]) == found
    for question in QUESTIONS:
        text, logits, sets, *_ = found["full", question]
        assert found["all", question][:3] == (text, logits, sets)
        assert found["poisson", question][1] != logits != found["topk", question][1]
    for arm in ARMS:
        assert found[arm, "q"] == alone(family, arm, "q")
        assert found[arm, "q"][2].keys() == found[arm, "r"][2].keys()


def test_forks_that_take_turns_do_not_meet() -> None:
    """Forked first, asked later and in another order; a compressed fork serves two questions in its own policy."""
    model, full = tiny(), torch.cat([CONTEXT, QUESTIONS["q"]], dim=1)
    with certified(model, ARMS["full"], arms=ARMS.values()) as session:
        session.prefill(CONTEXT)
        snapshot, given = session.cache, {}
        for arm in ("topk", "poisson"):
            given[arm] = session.fork(ARMS[arm], of=snapshot)
            session.compress()
        context = next(iter(given["poisson"].values()))
        again = session.fork(of=context)
        assert checksum(context) == checksum(next(iter(again.values())))
        outs = {}
        for arm, kwargs in (("topk", given["topk"]), ("poisson", given["poisson"]), ("again", again)):
            outs[arm] = torch.cat(model.generate(full, **kwargs, **GENERATE).logits)
            summary = session.summary()
            assert (summary["certificate"] is None) == (summary["no_certificate"] is not None) == (arm == "topk")
            assert session.cache is next(iter(kwargs.values()))
        assert torch.equal(outs["again"], outs["poisson"]) and not torch.equal(outs["topk"], outs["poisson"])
        assert session.escalate(budget=1.0).sequences.shape == (1, 170)
        assert session.cache.policy == ARMS["poisson"].with_budget(1.0)
        with pytest.raises(CertError, match="before compress"):
            session.fork(ARMS["topk"], of=context)
        model.generate(CONTEXT, **GENERATE)
        assert session.cache.policy == ARMS["full"]


def test_an_aware_arm_is_forked_before_the_last_token() -> None:
    model, full = tiny(), torch.cat([CONTEXT, QUESTIONS["q"]], dim=1)
    outs = []
    with certified(model, ARMS["full"], arms=[ARMS["poisson"]], audit=True) as session:
        session.prefill(full[:, :-1])
        outs.append(model.generate(full, **session.fork(ARMS["poisson"]), **GENERATE))
        forked_sets, errors = kept_sets(session.cache), [x for x in session.certificates["err"] if x]
    with certified(model, ARMS["poisson"]) as session:
        outs.append(model.generate(full, **GENERATE))
        assert kept_sets(session.cache) == forked_sets and errors
    torch.testing.assert_close(*(torch.cat(out.logits) for out in outs), rtol=0, atol=1e-5)


def test_a_fork_that_the_prefill_did_not_prepare_is_refused() -> None:
    model = tiny()
    with certified(model, ARMS["poisson"]) as session:
        with pytest.raises(CertError, match="no cache yet"):
            session.fork()
        session.prefill(CONTEXT)
        for arm in ("wide", "h2o"):
            with pytest.raises(CertError, match="arms="):
                session.fork(ARMS[arm])
        snapshot = session.cache
        session.fork(ARMS["topk"])
    with certified(model, ARMS["poisson"]) as session, pytest.raises(CertError, match="another session"):
        session.fork(of=snapshot)


def test_a_fork_ends_with_its_session() -> None:
    model = tiny()
    with certified(model, ARMS["poisson"]) as session:
        session.prefill(CONTEXT)
        given = session.fork(ARMS["topk"])
        session.compress()
    with pytest.raises(CertError, match="session has ended"), torch.no_grad():
        model(input_ids=tokens(1), **given)
