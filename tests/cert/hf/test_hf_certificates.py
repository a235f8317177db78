"""The certificates of a session: recomputed from the rows, flagged, absent with a reason, and what they cost when off."""

import math

import pandas as pd
import pytest
import torch
from oracle import FAMILIES, Oracle, column_bias, tiny, tokens

from cert.certificate import anticipated_variance
from cert.hf import attention, certified, certify, report
from cert.policy import PRESETS, Policy
from cert.scores import snapkv

SMALL = {"sinks": 2, "recent": 8, "window": 8}
CONTEXT = tokens(150)
GENERATE = {"max_new_tokens": 5, "do_sample": False}


def policy(name: str = "certified", **changes: object) -> Policy:
    return Policy.preset(name, **{"budget": 0.35, **SMALL, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_each_number_is_that_of_the_method(family: str) -> None:
    """Radius, assisted radius, output norm and served error of every step, from dense rows in plain loops."""
    model, oracle = tiny(family), Oracle(tiny(family))
    with certified(model, policy(), audit=True, delta=0.1) as session:
        out = model.generate(CONTEXT, **GENERATE)
        table = pd.DataFrame(session.certificates)
        bias = {i: b[..., :150] for i, b in column_bias(session.cache).items()}
    oracle.feed(CONTEXT)
    dense = {i: rows for i, rows in oracle.rows.items() if i in bias}
    oracle.bias = bias
    scale = model.config.query_pre_attn_scalar**-0.5 if family == "gemma3_text" else 8**-0.5
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    for step, token in enumerate(out[:, 150:-1].split(1, dim=1)):
        oracle.feed(token)
        for index in bias:
            q, k, v = (x[0] for x in oracle.rows[index])
            for head in range(heads):
                kv = head * kv_heads // heads
                logit = scale * (k[kv] @ q[head, 0]).double()
                offset = torch.zeros(len(logit)).double()
                offset[:150] = bias[index][0, kv]
                w, prob = (logit + offset).softmax(0), torch.exp(-offset)
                here, vs = w > 0, v[kv].double()
                o_hat, o = w @ vs, logit.softmax(0) @ vs
                spread = (vs - o_hat).norm(dim=1)
                var = ((1 - prob) * w**2 * spread**2)[here].sum()
                tail = here & (prob < 1 - 1e-9)
                b = (w * vs.norm(dim=1))[tail].max() + o_hat.norm() * w[tail].max()
                first = dense[index]
                score = snapkv(first[0][0, :, -8:], first[1][0], scale)
                keep_prob = policy().plan(score, torch.zeros_like(score), list(bias).index(index), len(bias))[0]
                ant = anticipated_variance(score, keep_prob, first[2][0])[kv]
                third = b * math.log(20) / 3
                row = table[(table.step == step) & (table.layer == index) & (table["head"] == head)].iloc[0]
                for name, wanted in {
                    "radius": third + math.sqrt(third**2 + 2 * var * math.log(20)),
                    "assisted": third + math.sqrt(third**2 + 2 * (var + 0.25 * ant) * math.log(20)),
                    "out_norm": o_hat.norm(), "err": (o_hat - o).norm(),
                }.items():  # fmt: skip
                    assert row[name] == pytest.approx(float(wanted), rel=1e-5, abs=1e-5), (name, step, index, head)
                assert row.relative == pytest.approx(row.radius / row.out_norm) and row.position == 150 + step
                assert not row.exact and not row.undefined and row.request == 0
    assert len(table) == 4 * len(bias) * heads


def test_the_request_certificate_is_the_mean_over_layers_of_sums() -> None:
    model = tiny()
    with certified(model, policy()) as session:
        model.generate(CONTEXT, **GENERATE)
        model.generate(tokens(100, 4), **GENERATE)
        table, summary = pd.DataFrame(session.certificates), session.summary()
        sums = table.groupby(["request", "layer"])[["radius", "assisted", "out_norm"]].sum()
        for request, found in ((1, summary), (0, session.summary(request=0))):
            mine = sums.loc[request]
            assert found["certificate"]["value"] == pytest.approx((mine.radius / mine.out_norm).mean(), rel=1e-5)
            assert found["assisted_certificate"]["value"] == pytest.approx(
                (mine.assisted / mine.out_norm).mean(), rel=1e-5
            )
            assert found["certificate"]["steps"] == 4 and found["no_certificate"] is None


def test_agnostic_steps_run_from_the_last_prompt_token() -> None:
    model, full = tiny(), torch.cat([CONTEXT, tokens(5, 2)], dim=1)
    with certified(model, policy()) as session:
        session.prefill(CONTEXT)
        session.compress()
        assert session.certificates["step"] == []
        model.generate(full, **session.cache_kwargs, **GENERATE)
        table = session.certificates
        assert sorted(set(table["position"])) == [154, 155, 156, 157, 158] and set(table["request"]) == {0}
        assert session.summary()["certificate"]["steps"] == 5


@pytest.mark.parametrize("name", [name for name in PRESETS if "certified" not in name and name != "uniform"])
def test_a_composition_without_certificate_says_why(name: str) -> None:
    """None with the reason, never 0, also where nothing was evicted; the audit still measures the error."""
    model, chosen = tiny(), policy(name) if name != "full" else Policy.preset("full")
    with certified(model, chosen, audit=True) as session:
        model.generate(CONTEXT, **GENERATE)
        table, summary = pd.DataFrame(session.certificates), session.summary()
    assert set(table.reason) == {chosen.no_certificate} and summary["no_certificate"] == chosen.no_certificate
    assert table.radius.isna().all() and table.assisted.isna().all() and summary["certificate"] is None
    assert (table.err > 0).any() == (name != "full")


def test_poisson_without_compensation_has_no_certificate() -> None:
    model = tiny()
    with certified(model, policy(compensation="none")) as session:
        model.generate(CONTEXT, **GENERATE)
        assert session.summary()["certificate"] is None and session.summary()["no_certificate"]


def test_switched_off_they_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("called")

    model = tiny()
    with certified(model, policy()) as session:
        out = model.generate(CONTEXT, **GENERATE)
    named = {report: ("radius", "served_error", "certify"), attention: ("moments", "tail")}
    for module, names in (named | {certify: ("poisson_variance", "max_term", "tail_flags", "tail_rows")}).items():
        for name in names:
            monkeypatch.setattr(module, name, never)
    with certified(model, policy(), delta=None) as session:
        assert torch.equal(model.generate(CONTEXT, **GENERATE), out)
        assert session.blocks == [] and session.certificates["step"] == []
        assert session.summary()["certificate"] is None and "delta=None" in session.summary()["no_certificate"]


def test_nothing_evicted_is_exact_and_nothing_sampled_is_undefined() -> None:
    model = tiny()
    with certified(model, policy(budget=1.0), audit=True) as session:
        model.generate(CONTEXT, **GENERATE)
        table = pd.DataFrame(session.certificates)
        assert table.exact.all() and (table.radius == 0).all() and (table.err == 0).all() and (table.out_norm > 0).all()
        assert session.summary()["certificate"]["value"] == 0
    with certified(model, policy()) as session:
        session.prefill(CONTEXT)
        session.compress()
        layer = session.cache.layers[0]
        layer.log_weight = torch.where(
            (layer.log_weight > 0) & (torch.arange(2)[:, None] == 0), -math.inf, layer.log_weight
        )
        model.generate(torch.cat([CONTEXT, tokens(3)], dim=1), **session.cache_kwargs, **GENERATE)
        table = pd.DataFrame(session.certificates)
        lost = (table.layer == 0) & (table["head"] < 2)
        assert (table.undefined == lost).all() and table.radius[lost].isna().all() and table.radius[~lost].notna().all()
        found = session.summary()["certificate"]
        assert found["undefined_share"] == 0.25 and found["flagged"] and found["value"] > 0


def test_no_step_is_a_counted_null() -> None:
    model = tiny()
    with certified(model, policy()) as session:
        model.generate(CONTEXT, max_new_tokens=1)
        assert session.summary()["certificate"]["value"] is None and session.summary()["certificate"]["steps"] == 0


def test_a_callback_hears_each_token() -> None:
    model, heard = tiny(), []
    with certified(model, policy(), callback=heard.append) as session:
        model.generate(CONTEXT, **GENERATE)
        table = pd.DataFrame(session.certificates)
    assert [x["step"] for x in heard] == [0, 1, 2, 3] and [x["position"] for x in heard] == [150, 151, 152, 153]
    for found in heard:
        sums = table[table.step == found["step"]].groupby("layer")[["radius", "out_norm"]].sum()
        assert found["certificate"] == pytest.approx((sums.radius / sums.out_norm).mean(), rel=1e-5)


def test_the_served_error_is_against_every_row_also_after_two_events() -> None:
    model, oracle, turns = tiny(), Oracle(tiny()), [tokens(120, 5), tokens(60, 6)]
    with certified(model, policy(), audit=True) as session:
        for turn in turns:
            session.prefill(turn)
            session.compress()
            oracle.feed(turn)
            oracle.bias = column_bias(session.cache)
        full = torch.cat([*turns, tokens(1, 9)], dim=1)
        model.generate(full, **session.cache_kwargs, max_new_tokens=1)
        table = pd.DataFrame(session.certificates)
    oracle.feed(full[:, -1:])
    for index in (0, 1):
        q, k, v = (x[0] for x in oracle.rows[index])
        for head in range(4):
            logit = 8**-0.5 * (k[head // 2] @ q[head, 0])
            offset = torch.cat([oracle.bias[index][0, head // 2], torch.zeros(1)])
            err = ((logit + offset).softmax(0) @ v[head // 2] - logit.softmax(0) @ v[head // 2]).norm()
            found = table[(table.layer == index) & (table["head"] == head)].err.item()
            assert found == pytest.approx(float(err), abs=1e-5)


def test_rows_of_a_batch_are_requests_of_their_own() -> None:
    model, rows = tiny(), tokens(150, 8, rows=2)
    with certified(model, policy()) as session:
        model.generate(rows, **GENERATE)
        both = pd.DataFrame(session.certificates)
        assert sorted(set(both.request)) == [0, 1] and len(session.summary(request=1)["documents"]) == 2
        model.generate(rows[1:], **GENERATE)
        alone = pd.DataFrame(session.certificates).query("request == 2")
    theirs = both[both.request == 1].radius.to_numpy()
    assert alone.radius.to_numpy() == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_a_forward_of_many_tokens_certifies_its_last() -> None:
    model, question = tiny(), tokens(5, 2)
    found = []
    with certified(model, policy(), audit=True) as session, torch.no_grad():
        for parts in ([question], question.split(1, dim=1)):
            session.reset()
            session.prefill(CONTEXT)
            session.compress()
            for part in parts:
                model(input_ids=part, **session.cache_kwargs)
            table = pd.DataFrame(session.certificates)
            found.append(table[(table.request == table.request.max()) & (table.position == 154)])
    for name in ("radius", "assisted", "out_norm", "err"):
        assert found[0][name].to_numpy() == pytest.approx(found[1][name].to_numpy(), rel=1e-5, abs=1e-6)
    assert len(found[0]) == len(found[1]) == 8
