"""What arms that are compared need of a session: equal counts, self-signals, and several caches as rows of one step."""

import pytest
import torch
from oracle import FAMILIES, close, kept_sets, tiny, tokens

from cert.design import protected_set, topk_set
from cert.errors import CertError
from cert.hf import attention, certified
from cert.hf.compress import token_scores
from cert.policy import Policy

SMALL = {"sinks": 2, "recent": 8, "window": 8}
CONTEXT = tokens(160)
ARMS = {
    "full": Policy.preset("full"),
    "all": Policy.preset("certified", budget=1.0, **SMALL),
    "topk": Policy.preset("topk", budget=0.35, **SMALL),
    "poisson": Policy.preset("certified", budget=0.35, **SMALL),
    "h2o": Policy.preset("h2o", budget=0.35, **SMALL),
}


# ---------------------------------------------------------------- equal counts


@pytest.mark.parametrize("family", FAMILIES)
def test_topk_keeps_the_counts_of_another_cache_head_by_head(family: str) -> None:
    with certified(tiny(family), ARMS["full"], arms=ARMS.values()) as session:
        session.prefill(CONTEXT)
        snapshot = session.cache
        session.fork(ARMS["poisson"], of=snapshot)
        session.compress()
        drawn, realised = session.cache, session.summary()["realised_budget"]
        session.fork(ARMS["topk"], of=snapshot)
        wanted = {}
        for index, layer in session.cache.compressible.items():
            counts = drawn.compressible[index].real.sum(-1)
            chosen = topk_set(token_scores(layer, ARMS["topk"]), counts, protected_set(160, 2, 8))
            wanted[index] = [[head.nonzero().flatten().tolist() for head in row] for row in chosen]
        session.compress(like=drawn)
        assert kept_sets(session.cache) == wanted
        assert len({len(head) for rows in wanted.values() for row in rows for head in row}) > 1
        assert session.summary()["realised_budget"] == session.summary()["expected_budget"] == realised
        assert session.summary()["budget_tokens"] == 56


def test_counts_that_cannot_be_followed_are_refused() -> None:
    with certified(tiny(), ARMS["full"], arms=ARMS.values()) as session:
        session.prefill(CONTEXT)
        snapshot = session.cache
        session.fork(ARMS["poisson"], of=snapshot)
        with pytest.raises(CertError, match="'poisson': expected 'topk'"):
            session.compress(like=snapshot)
        session.compress()
        drawn = session.cache
        session.fork(ARMS["topk"], of=snapshot)
        with pytest.raises(CertError, match=r"compressed where this one was, and now: .* 160 tokens"):
            session.compress(like=snapshot)
        assert not session.cache.events
        session.prefill(tokens(1))
        with pytest.raises(CertError, match=r"and now: .* 161 tokens"):
            session.compress(like=drawn)
        session.compress()
        session.prefill(tokens(1))
        with pytest.raises(CertError, match="counts of its own before"):
            session.compress(like=drawn)


def test_topk_follows_a_draw_from_event_to_event() -> None:
    """Streaming: at each event the same counts as the draw's, and the top scores among what top-k itself still had."""
    with certified(tiny(), ARMS["full"], arms=ARMS.values()) as session:
        session.prefill(CONTEXT)
        caches = {}
        for name in ("poisson", "topk"):
            session.fork(ARMS[name])
            session.compress(like=caches.get("poisson"))
            caches[name] = session.cache
            session.reset()
            session.prefill(CONTEXT)
        before = caches["poisson"].fork()
        for turn in range(3):
            for name in ("poisson", "topk"):
                session.fork(of=caches[name])
                session.prefill(tokens(40, turn))
                had = kept_sets(session.cache)
                if name == "topk":
                    with pytest.raises(CertError, match="compressed where this one was"):
                        session.compress(like=before)
                session.compress(like=caches["poisson"] if name == "topk" else None)
                caches[name] = session.cache
            drawn, topk = (kept_sets(caches[name]) for name in ("poisson", "topk"))
            sizes = [[[len(head) for head in row] for row in drawn[index]] for index in drawn]
            assert sizes == [[[len(head) for head in row] for row in topk[index]] for index in topk]
            assert all(
                set(kept) <= set(old) for index in topk for kept, old in zip(topk[index][0], had[index][0], strict=True)
            )
            assert topk != drawn
        assert len({size for layer in sizes for row in layer for size in row}) > 1


# ---------------------------------------------------------------- self-signals


def test_the_self_signals_of_a_request(monkeypatch) -> None:
    """Entropy of the weights that attention used, over layers, heads and steps; the margin at each head's boundary."""
    weights, recorded = [], attention.record

    def spied(state, index, layer, query, out, weight):
        weights.append(weight)
        recorded(state, index, layer, query, out, weight)

    monkeypatch.setattr(attention, "record", spied)
    model, margins = tiny(), []
    with certified(model, ARMS["topk"], signals=True) as session, torch.no_grad():
        session.prefill(CONTEXT)
        for layer in session.cache.compressible.values():
            score = token_scores(layer, ARMS["topk"])[0, :, 2:-8].sort(descending=True).values
            margins.append(score[:, 45] - score[:, 46])  # 56 tokens, 10 of them protected
        session.compress()
        weights.clear()
        for token in (5, 6, 7):
            model(input_ids=torch.tensor([[token]]), **session.cache_kwargs)
        summary = session.summary()
        each = [-(w.double() * w.double().log()).nan_to_num(0).sum(-1).mean() for w in weights]
        assert len(each) == 6
        assert summary["entropy"] == pytest.approx(float(torch.stack(each).mean()), rel=1e-6)
        assert summary["margin"] == pytest.approx(float(torch.stack(margins).mean()), rel=1e-6)
        assert summary["certificate"] is None
        session.fork()
        assert session.summary(0) == summary and session.summary()["entropy"] is None


def test_self_signals_are_undefined_where_nothing_is_evicted_and_absent_unless_asked_for() -> None:
    for policy, asked in (("all", True), ("full", True), ("topk", False)):
        with certified(tiny(), ARMS[policy], signals=asked) as session:
            session.model.generate(CONTEXT, max_new_tokens=3, do_sample=False)
            summary = session.summary()
            assert {"entropy", "margin"} & summary.keys() == ({"entropy", "margin"} if asked else set())
            assert summary.get("entropy") is summary.get("margin") is None
            assert bool(session.blocks) == (policy == "all")


# ---------------------------------------------------------------- together


def compressed(session, snapshot, arms):
    """Each arm's row, one token behind the context."""
    rows = []
    for arm in arms:
        session.fork(ARMS[arm], of=snapshot)
        session.compress()
        with torch.no_grad():
            session.model(input_ids=torch.tensor([[9]]), **session.cache_kwargs)
        rows.append(session.row())
    return rows


def served(family: str, arms: list[str], size: int | None, attention_: str = "sdpa"):
    """arm -> logits of six steps, retained sets, certificates; arm i ends after i + 2 steps; size None: one by one."""
    model, logits = tiny(family, attention_), {arm: [] for arm in arms}
    with certified(model, ARMS["full"], arms=ARMS.values(), audit=True) as session, torch.no_grad():
        session.prefill(CONTEXT)
        rows = compressed(session, session.cache, arms)
        for start in range(len(arms)) if size is None else (0,):
            part = rows[start : start + 1] if size is None else rows
            kwargs = session.together(part, size or 1)
            (together,) = kwargs.values()
            for step in range(6):
                for b, row in enumerate(part):
                    if step == [*ARMS].index(arms[rows.index(row)]) + 2:
                        together.rows[b] = None
                if not any(together.rows):
                    break
                said = [20 + step + 10 * [*ARMS].index(arms[rows.index(row)]) for row in part]
                ids = torch.tensor([*said, *[0] * ((size or 1) - len(part))])[:, None]
                out = model(input_ids=ids, **kwargs).logits[:, -1]
                for b, row in enumerate(together.rows):
                    if row is not None:
                        logits[arms[rows.index(row)]].append(out[b])
        table, found = session.certificates, {}
        for arm, row in zip(arms, rows, strict=True):
            mine = [i for i, request in enumerate(table["request"]) if request == row.request]
            columns = {name: [table[name][i] for i in mine] for name in ("step", "layer", "position", "radius", "err")}
            assert row.cache.ids[0, 161:].tolist() == [
                20 + 10 * [*ARMS].index(arm) + i for i in range(len(logits[arm]))
            ]
            found[arm] = (torch.stack(logits[arm]), kept_sets(row.cache), columns, session.summary(row.request))
        plain = model(input_ids=CONTEXT, use_cache=False).logits  # ordinary forwards are again
        assert torch.equal(model(input_ids=CONTEXT).logits, plain) and session.cache.length == 160
    return found


@pytest.mark.parametrize(("family", "attention_"), [*((x, "sdpa") for x in FAMILIES), ("gemma3_text", "eager")])
def test_caches_that_go_on_together_are_what_they_are_alone(family: str, attention_: str) -> None:
    found, alone = served(family, [*ARMS], 7, attention_), served(family, [*ARMS], None, attention_)
    for i, arm in enumerate(ARMS):
        steps = min(6, i + 2)
        assert len(found[arm][0]) == steps
        assert [*dict.fromkeys(found[arm][2]["step"])] == [*range(steps + 1)]
        close(found[arm][0], alone[arm][0])
        assert found[arm][1] == alone[arm][1]
        for name, values in found[arm][2].items():
            assert len(values) == len(alone[arm][2][name])
            pairs = [(a, b) for a, b in zip(values, alone[arm][2][name], strict=True) if a != b]
            assert all(a == pytest.approx(b, rel=1e-3, abs=1e-5) for a, b in pairs)
        certificate = found[arm][3]["certificate"]
        assert (certificate is not None) == (arm in ("all", "poisson"))
        if certificate:
            assert certificate["steps"] == steps + 1
            assert certificate["value"] == pytest.approx(alone[arm][3]["certificate"]["value"], rel=1e-4)


def test_a_row_does_not_depend_on_the_others(family: str = "llama") -> None:
    """Another order, fewer rows: the same bits, as the size stays."""
    found = served(family, [*ARMS], 7)
    for arms in ([*ARMS][::-1], ["poisson"], ["topk", "full"]):
        other = served(family, arms, 7)
        for arm in arms:
            assert torch.equal(other[arm][0], found[arm][0])
            assert other[arm][1:3] == found[arm][1:3]


def test_rows_that_cannot_go_on_together_are_refused() -> None:
    model = tiny()
    with certified(model, ARMS["full"], arms=ARMS.values()) as session, torch.no_grad():
        session.prefill(CONTEXT)
        snapshot = session.cache
        uncompressed = session.row()
        rows = compressed(session, snapshot, ["poisson", "topk"])
        for wrong, size, match in (
            ([], 2, "0 rows; expected 1 to 2"),
            (rows, 1, "2 rows; expected 1 to 1"),
            ([rows[0], uncompressed], 2, "compressed caches, all of 161 tokens"),
        ):
            with pytest.raises(CertError, match=match):
                session.together(wrong, size)
        with pytest.raises(CertError, match="a batch of 2; expected 3"):
            model(input_ids=torch.tensor([[1], [2]]), **session.together(rows, 3))
        session.fork(of=rows[0].cache)
        model(input_ids=torch.tensor([[1]]), **session.cache_kwargs)
        with pytest.raises(CertError, match="all of 161 tokens"):
            session.together([rows[1], session.row()], 2)
        kwargs = session.together(rows, 2)
    with certified(model, ARMS["full"]) as session:
        with pytest.raises(CertError, match="another session"):
            session.together(rows, 2)
        with pytest.raises(CertError, match="another session"):
            model(input_ids=torch.tensor([[1], [2]]), **kwargs)
    with certified(model, ARMS["full"], compress_every=4) as session, pytest.raises(CertError, match="compress_every"):
        session.together(rows, 2)
