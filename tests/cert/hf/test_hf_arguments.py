"""A wrong argument is one CertError in one line that says what was given and expected, before any work."""

from collections.abc import Iterator

import jaxtyping
import numpy as np
import pytest
import torch
from oracle import tiny, tokens

from cert.errors import CertError
from cert.hf import certified
from cert.hf.state import OPEN
from cert.policy import Policy

POLICY = Policy.preset("certified", budget=0.6)
IDS = tokens(80)


@pytest.fixture(autouse=True)
def _as_a_user_meets_it() -> Iterator[None]:
    """Without the annotations that these tests execute elsewhere."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def refused(call: object, *words: str) -> None:
    """Refused in one line with these words in it."""
    with pytest.raises(CertError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 200 and all(word in text for word in words), text


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("policy", "certified", ["policy 'certified'", "a Policy"]),
        ("policy", None, ["policy None"]),
        *(("delta", x, ["delta", "between 0 and 1"]) for x in ("0.05", 0, 1, 1.5, -0.1, float("nan"), True, torch.ones(1))),
        *(("seed", x, ["seed", "whole number"]) for x in (None, 1.0, -1, "1", True)),
        *(("document", x, ["document", "a str, an int"]) for x in (3.0, True, ["a"], torch.ones(2, 2), np.int64(3))),
        *(("audit", x, ["audit", "True or False"]) for x in ("yes", 1, None)),
        *(("compress_every", x, ["compress_every", "at least 1"]) for x in (0, 2.0, "8", True)),
        ("callback", 5, ["callback 5", "a function"]),
        *(("arms", x, ["arms", "a list of policies"]) for x in ("topk", POLICY, 5, [POLICY, "topk"])),
        *(("model", x, ["model", "a transformers model"]) for x in ("gpt2", None, tiny().model)),
    ],
)  # fmt: skip
def test_of_certified(name: str, wrong: object, words: list[str]) -> None:
    model = tiny()
    before = sorted(model.__dict__)

    def enter() -> None:
        with certified(**{"model": model, "policy": POLICY, name: wrong}):
            raise AssertionError("the block ran")

    refused(enter, *words)
    assert sorted(model.__dict__) == before and model.config._attn_implementation == "sdpa" and not OPEN


def test_what_is_right_is_taken() -> None:
    for right in ({"delta": np.float32(0.1)}, {"seed": np.int64(3)}, {"document": -3}, {"arms": iter([POLICY])}):
        with certified(tiny(), POLICY, **right) as session:
            session.prefill(IDS.int())
            session.compress()


@pytest.mark.parametrize(
    "ids",
    [[], "text", None, IDS[None], IDS.float(), IDS.bool(), torch.zeros(1, 0, dtype=torch.long), [[1, 2], [3]], [0.5], 7,
     {"input_ids": IDS}, [2**70]],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_of_prefill(ids: object) -> None:
    with certified(tiny(), POLICY) as session:
        refused(lambda: session.prefill(ids), "prefill: expected")
        assert session.cache is None and session.prefill_tokens == 0


@pytest.mark.parametrize("chunk", [-1, 0, 1.5, "32", True])
def test_of_chunks(chunk: object) -> None:
    with certified(tiny(), POLICY) as session:
        refused(lambda: session.prefill(IDS, chunk=chunk), "chunk", "at least 1 token")
        assert session.cache is None


@pytest.mark.parametrize("budget", [None, "0.5", 2.0, 0, -0.5, 0.3, float("nan"), True, torch.tensor(0.7)])
@pytest.mark.parametrize("policy", [POLICY, Policy.preset("full"), Policy.preset("certified", budget_tokens=60)])
def test_of_escalate(policy: Policy, budget: object) -> None:
    model = tiny()
    with certified(model, policy) as session:
        model.generate(IDS, max_new_tokens=2, do_sample=False)
        if budget != 0.3 or policy.budget_tokens is None:
            refused(lambda: session.escalate(budget), *(["escalate to", "at least"] if budget != 0 else ["budget"]))
        assert session.summary()["request"] == 0 and session.summary()["rerun_prefill_tokens"] == 0


@pytest.mark.parametrize("request_", [3, -1, "0", 0.5, None])
def test_of_summary_and_fork(request_: object) -> None:
    model = tiny()
    with certified(model, POLICY) as session:
        refused(lambda: session.summary(request=request_), "request", "so far")
        model.generate(IDS, max_new_tokens=2)
        if request_ is not None:
            refused(lambda: session.summary(request=request_), "request", "one of the 1 so far")
        refused(lambda: session.fork("topk"), "fork to policy 'topk'", "a Policy")


def test_of_a_forward_and_of_generate() -> None:
    model, short = tiny(), torch.ones(1, 70, dtype=torch.long)
    with certified(model, POLICY) as session, torch.no_grad():
        for call in (model, lambda **x: model.generate(max_new_tokens=3, **x)):
            refused(lambda call=call: call(), "expected input_ids")
            refused(lambda call=call: call(input_ids=IDS[0]), "expected input_ids")
            refused(lambda call=call: call(input_ids=IDS, attention_mask=short), "attention_mask [1, 70]", "[1, 80]")
            refused(lambda call=call: call(input_ids=IDS, attention_mask=torch.ones(2, 80)), "attention_mask [2, 80]")
        assert session.cache is None and session.prefill_tokens == 0 and not session.reasons
        session.prefill(IDS)
        refused(lambda: model(tokens(2), attention_mask=short, **session.cache_kwargs), "[1, 70]", "[1, 82]")
        model(tokens(2), attention_mask=torch.ones(1, 82), **session.cache_kwargs)
        assert session.cache.length == 82


@pytest.mark.parametrize("how", ["forward", "generate", "config"])
def test_weights_are_not_returned_over_retained_rows(how: str) -> None:
    model = tiny(attention="eager")
    if how == "config":
        model.config.output_attentions = True
    flag = {} if how == "config" else {"output_attentions": True}
    with certified(model, POLICY) as session, torch.no_grad():
        if how == "generate":
            refused(
                lambda: model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True, **flag), "output_attentions"
            )
        else:
            refused(lambda: model(IDS, **flag), "output_attentions")
            assert len(model(IDS, use_cache=False, **flag).attentions) == 2
        assert session.cache is None and session.prefill_tokens == 0


def test_a_document_for_a_batch_is_refused_before_the_prefill() -> None:
    model = tiny()
    with certified(model, POLICY, document="d") as session:
        refused(lambda: model.generate(IDS.expand(2, -1), max_new_tokens=2), "document 'd' for a batch of 2")
        assert session.cache is None and session.prefill_tokens == 0


def test_together_takes_rows_of_the_session_and_their_number() -> None:
    with certified(tiny(), Policy.preset("certified", budget=0.5, sinks=2, recent=8, window=8)) as session:
        session.prefill(tokens(80))
        session.compress()
        row = session.row()
        for wrong in (None, "ab", [None], [session.cache], [row, row], []):
            refused(lambda wrong=wrong: session.together(wrong, size=2), "together")
        for size in ("2", 1.5, 0, True):
            refused(lambda size=size: session.together([row], size=size), "together")


def test_ids_and_positions_are_those_of_the_model_and_the_text() -> None:
    model = tiny()
    with certified(model, POLICY) as session, torch.no_grad():
        for odd in (-1, model.config.vocab_size):
            refused(lambda odd=odd: session.prefill([5, odd]), f"token id {odd}", "vocabulary")
        session.prefill(IDS)
        session.compress()
        next_one = {"input_ids": tokens(2, 3), **session.cache_kwargs}
        refused(lambda: model(**next_one, position_ids=torch.tensor([[48, 49]])), "position_ids", "from 80 on")
        model(**next_one, position_ids=torch.tensor([[80, 81]]))


def test_a_policy_takes_numbers_alone() -> None:
    for field, value in (("budget", "0.25"), ("budget", [1]), ("budget", True), ("window", 2.5), ("sinks", 1.5)):
        refused(
            lambda field=field, value=value: Policy(**{"budget": 0.5, field: value}), f"{field} of type", "a number"
        )
    refused(lambda: Policy(budget_tokens=10.5), "budget_tokens of type float")
