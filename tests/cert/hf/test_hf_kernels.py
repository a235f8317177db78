"""What serves retained rows inside transformers, and half-precision models: float32 statistics, float32 offset."""

import pytest
import torch
from oracle import Oracle, close, column_bias, tiny, tokens

from cert.certificate import radius
from cert.errors import CertError
from cert.hf import attention, certified
from cert.hf.certify import certify
from cert.policy import Policy

SMALL = {"budget": 0.35, "sinks": 2, "recent": 8, "window": 8}
POLICY = Policy.preset("certified", **SMALL)
CONTEXT, QUESTION = tokens(120), tokens(5, 2)
GEMMA2 = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 2.0}


def served(kernel: str, policy: Policy = POLICY, delta: float | None = None, **config: object):
    """(logits of a question after an agnostic compression, what the oracle says, summary)."""
    family, way = ("gemma2", "eager") if config else ("llama", "sdpa")
    model, oracle = tiny(family, way, **config), Oracle(tiny(family, way, **config))
    with certified(model, policy, delta=delta, kernel=kernel) as session, torch.no_grad():
        session.prefill(CONTEXT)
        session.compress()
        oracle.feed(CONTEXT)
        oracle.bias = column_bias(session.cache)
        found = model(input_ids=QUESTION, use_cache=True, **session.cache_kwargs).logits
        return found, oracle.feed(QUESTION), session.summary()


@pytest.mark.parametrize("kernel", ["reference", "moments", "sdpa", "eager", "flex"])
def test_each_equals_the_oracle(kernel: str) -> None:
    found, wanted, summary = served(kernel)
    close(found, wanted)
    assert (summary["kernel"], summary["kernel_why"]) == (kernel, "asked for by name")


@pytest.mark.parametrize("kernel", ["reference", "moments", "eager", "flex"])
def test_also_with_a_soft_cap(kernel: str) -> None:
    found, wanted, summary = served(kernel, **GEMMA2)
    close(found, wanted)
    assert summary["kernel"] == kernel


def test_the_summary_says_what_was_chosen_and_why() -> None:
    for delta, policy, name, why in (
        (0.05, POLICY, "moments", "output alone, no certificate"),
        (0.05, Policy.preset("topk", **SMALL), "sdpa", "by name only"),  # has no certificate
        (None, POLICY, "sdpa", "by name only"),
        (0.05, Policy.preset("certified", score="h2o", **SMALL), "reference", "no weights"),
        (None, Policy.preset("h2o", **SMALL), "reference", "h2o's sums"),
    ):
        found, wanted, summary = served("auto", policy, delta)
        close(found, wanted)
        assert summary["kernel"] == name and why in summary["kernel_why"]


@pytest.mark.parametrize(
    ("kernel", "delta", "config", "why"),
    [
        ("sdpa", 0.05, {}, "output alone"),
        ("flash", None, {}, "not installed"),
        ("sdpa", None, GEMMA2, "soft cap"),
        ("fast", None, {}, "expected one of"),
    ],
)
def test_a_forced_kernel_that_cannot_work_is_refused_before_any_work(
    kernel: str, delta: float | None, config: dict[str, object], why: str
) -> None:
    model = tiny("gemma2", "eager", **config) if config else tiny()
    before = model.config._attn_implementation
    refused = pytest.raises(CertError, match=f"kernel '{kernel}': .*{why}")
    with refused, certified(model, POLICY, delta=delta, kernel=kernel):
        raise AssertionError("the block ran")
    assert model.config._attn_implementation == before and "generate" not in model.__dict__


# ---------------------------------------------------------------- half precision


@pytest.mark.parametrize("kernel", ["reference", "moments"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_those_of_the_stored_rows_in_double(
    dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, variance and radius of each step and head, again in float64 from the half-precision q, K and V."""
    model, steps, real = tiny().to(dtype), [], attention.record

    def checked(state, index, layer, query, out, weight) -> None:
        if weight is not None:
            assert isinstance(weight, torch.Tensor) == (kernel == "reference")
            k, v = (x.repeat_interleave(2, 1).double() for x in layer.stored)
            offset, prob = (x.repeat_interleave(2, 1).double() for x in (layer.log_weight, layer.prob))
            assert {layer.log_weight.dtype, out.dtype, weight[0].dtype} == {torch.float32}
            w = (layer.scale * torch.einsum("bhd,bhnd->bhn", query.double(), k) + offset).softmax(-1)
            o = torch.einsum("bhn,bhnd->bhd", w, v)
            var = ((1 - prob) * w.square() * (v - o[:, :, None]).square().sum(-1)).sum(-1)
            tail = w * (prob < 1)
            largest = (tail * v.norm(dim=-1)).amax(-1) + o.norm(dim=-1) * tail.amax(-1)
            torch.testing.assert_close(out.double(), o, rtol=0, atol=1e-5)
            made = certify(layer, out, weight)
            found = radius(made["var_hat"], made["max_term"], 0.05)
            torch.testing.assert_close(found.double(), radius(var, largest), rtol=1e-4, atol=0)
            steps.append(index)
        real(state, index, layer, query, out, weight)

    monkeypatch.setattr(attention, "record", checked)
    with certified(model, POLICY, kernel=kernel) as session:
        model.generate(CONTEXT, max_new_tokens=5, do_sample=False)
        assert session.cache.layers[0].keys.dtype == dtype
    assert len(steps) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["reference", "moments", "sdpa", "eager", "flex"])
def test_half_precision_is_near_float32(dtype: torch.dtype, kernel: str) -> None:
    """The same rounded weights and, scores being constant, the same draw: certificates within 5 %, logits within 0.1."""
    found = []
    for model in (tiny().to(dtype), tiny().to(dtype).float()):
        delta = 0.05 if kernel in ("reference", "moments") else None
        with certified(model, Policy.preset("uniform", **SMALL), delta, kernel=kernel) as session, torch.no_grad():
            session.prefill(CONTEXT)
            session.compress()
            logits = model(input_ids=QUESTION, use_cache=True, **session.cache_kwargs).logits.float()
            found.append((logits, torch.tensor(session.certificates["radius"] or [0.0])))
    (half, r), (single, exact) = found
    assert 0 < float((half - single).abs().max()) < 0.1 * float(single.abs().max())
    torch.testing.assert_close(r, exact, rtol=0.05, atol=0)


# ---------------------------------------------------------------- certificates without weights


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_moments_say_what_the_reference_says(family: str) -> None:
    """Streaming, two compressions, a question of several tokens between: every certificate and every logit."""
    found = []
    for kernel in ("reference", "moments"):
        model = tiny(family, "eager", **GEMMA2) if family == "gemma2" else tiny()
        with certified(model, POLICY, kernel=kernel) as session, torch.no_grad():
            session.prefill(CONTEXT)
            session.compress()
            logits = [model(input_ids=QUESTION, use_cache=True, **session.cache_kwargs).logits[:, -1]]
            for step in range(6):
                if step == 3:
                    session.compress()
                ids = torch.tensor([[7 + step]])
                logits.append(model(input_ids=ids, use_cache=True, **session.cache_kwargs).logits[:, -1])
            found.append((torch.cat(logits), session.certificates, session.summary()))
    (logits, table, summary), (others, theirs, told) = found
    close(logits, others)
    assert summary["kernel"] == "reference" and told["kernel"] == "moments"
    assert len(table["step"]) == 7 * 4 * len(set(table["layer"])) > 0
    for name in ("radius", "assisted", "out_norm"):
        assert table[name] == pytest.approx(theirs[name], rel=1e-4)
    for name in ("step", "layer", "head", "position", "exact", "undefined"):
        assert table[name] == theirs[name]
    assert summary["certificate"]["value"] == pytest.approx(told["certificate"]["value"], rel=1e-5)
    assert told["scalar_bytes"] > summary["scalar_bytes"]


def test_a_fork_does_not_see_what_another_worked_out() -> None:
    """What stands between two compressions is that cache's own, also where one fork is compressed again."""
    model = tiny()
    with certified(model, POLICY) as session, torch.no_grad():
        session.prefill(CONTEXT)
        session.compress()
        snapshot, radii = session.cache, []
        for again in (False, True, False):
            session.fork(of=snapshot)
            model(input_ids=QUESTION, use_cache=True, **session.cache_kwargs)
            if again:
                session.compress()
            model(input_ids=torch.tensor([[9]]), use_cache=True, **session.cache_kwargs)
            table = session.certificates
            radii.append([r for r, request in zip(table["radius"], table["request"], strict=True)
                          if request == session.request][-8:])  # fmt: skip
    assert radii[0] == radii[2] != radii[1]
