"""The replay's numbers against plain loops over heads, steps and tokens, on a tiny random model."""

import math
from itertools import product

import pytest
import torch

from cert.draw import uniforms
from cert.policy import Policy
from runs.capture import decode
from runs.config import ReplayConfig
from runs.models import load_model, shape
from runs.replay import replay_document, spread, spread_heads
from runs.replay_loop import plain_cells
from runs.sources import resolve

IDS = [(7 * i * i + 3 * i) % 251 for i in range(150)]
CONFIG = ReplayConfig(
    budgets=(0.4, 0.6, 1.0), documents=1, ctx_tokens=150, layers=2, heads=3, steps=3, seed=4, delta=0.05, kappa=0.25
)
ARMS = {name: Policy.preset(name, budget=1.0) for name in ("certified", "topk", "uniform")}


@pytest.fixture(scope="module")
def decoded():
    return decode(load_model(resolve("tiny")), IDS, (0, 3), 3, 32)


@pytest.fixture(scope="module")
def cells(decoded):
    rows = list(replay_document(decoded, "document", CONFIG, ARMS))
    return {(r["layer"], r["budget"], r["head"], r["step"]): r for r in rows}


def test_layers_and_heads_are_spread() -> None:
    assert spread(30, 4) == (0, 10, 19, 29) and spread(5, 1) == (0,) and spread(2, 2) == (0, 1)
    assert spread_heads(9, 3, 3) == (0, 4, 8)
    assert spread_heads(32, 8, 3) == (0, 17, 30)
    assert spread_heads(4, 2, 3) == (0, 3, 1)
    assert spread_heads(8, 1, 3) == (0, 1, 2)
    for heads, kv_heads, wanted in product((8, 12, 24), (1, 2, 4), (1, 2, 3, 5)):
        chosen = spread_heads(heads, kv_heads, wanted)
        groups = {h // (heads // kv_heads) for h in chosen}
        assert len(set(chosen)) == wanted and len(groups) == min(wanted, kv_heads)


def test_the_model_captured_is_the_model_alone(decoded) -> None:
    """Greedy decoding under capture gives the tokens and logits of the untouched model, which is left as it was."""
    model = load_model(resolve("tiny"))
    before = model.config._attn_implementation
    ids = list(IDS)
    for token in decoded.generated:
        ids_next = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        assert ids_next == token
        ids.append(token)
    decode(model, IDS, (0,), 1, 8)
    assert model.config._attn_implementation == before


def test_captured_keys_reproduce_the_attention_of_the_model(decoded) -> None:
    """From captured q, K, V: dense attention of the last step equals what the model's attention module put out."""
    model = load_model(resolve("tiny"))
    seen = {}
    attention = model.model.layers[3].self_attn
    attention.o_proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0][0, -1]))
    model(torch.tensor([[*IDS, *decoded.generated]]))
    layer = decoded.layers[3]
    assert layer.keys.shape == (2, 153, 16)
    for head in range(4):
        k, v = layer.keys[head // 2], layer.values[head // 2]
        p = torch.softmax(layer.scale * (k @ layer.queries[-1][head]), -1)
        assert torch.allclose(p @ v, seen["out"][16 * head : 16 * head + 16], atol=1e-5)


def test_the_window_holds_the_last_queries_of_the_context(decoded) -> None:
    every = decode(load_model(resolve("tiny")), IDS, (3,), 1, 150).layers[3].window
    assert decoded.layers[3].window.shape == (4, 32, 16)
    assert torch.equal(decoded.layers[3].window, every[:, -32:])


def test_every_cell_is_there_once(cells) -> None:
    assert len(cells) == 2 * 3 * 3 * 3
    assert {r["kv_head"] for r in cells.values()} == {0, 1}
    assert all(r["n_tokens"] == 150 + r["step"] for r in cells.values())


def by_hand(decoded, layer: int, budget: float, head: int, step: int) -> dict[str, float]:
    """One cell from the definitions, in float64, the draw taken from the public coins and probabilities."""
    capture = decoded.layers[layer]
    n, now, kv = 150, 150 + step, head // 2
    k, v = capture.keys[:, :now].double(), capture.values[:, :now].double()
    score = torch.zeros(n, dtype=torch.float64)
    for h in (2 * kv, 2 * kv + 1):
        for t in range(32):
            last = n - 32 + t
            p = torch.softmax(capture.scale * (k[kv, : last + 1] @ capture.window[h, t].double()), -1)
            score[: last + 1] += p / 64
    both = torch.stack([score, score]).float()
    u = uniforms(4, "document", layer, 2, n)[kv]
    prob, keep = (x[0] for x in ARMS["certified"].with_budget(budget).plan(both[:1], u[None]))
    uni_prob, uni_keep = (x[0] for x in ARMS["uniform"].with_budget(budget).plan(torch.ones(1, n), u[None]))
    a = torch.exp(capture.scale * (k[kv] @ capture.queries[step - 1][head].double()))
    o = (a[:, None] * v[kv]).sum(0) / a.sum()

    def estimate(kept, inverse):
        inverse = torch.cat([torch.where(kept, inverse, 0.0).double(), torch.ones(step, dtype=torch.float64)])
        w = a * inverse / (a * inverse).sum()
        return w, w @ v[kv]

    w, out = estimate(keep, 1 / prob)
    competing = torch.ones(n, dtype=torch.bool)
    competing[:4] = competing[-32:] = False
    order = torch.where(competing, score, math.inf).argsort(descending=True, stable=True)
    topk = torch.zeros(n, dtype=torch.bool).index_fill_(0, order[: int(keep.sum())], True)
    _, top_out = estimate(topk, torch.ones(n))
    _, uni_out = estimate(uni_keep, 1 / uni_prob)
    pi, p = prob.double(), a / a.sum()
    tail = (pi < 1).nonzero().flatten().tolist()
    kept_tail = [i for i in tail if keep[i]]
    s = score / score.sum()
    mean = s @ v[kv, :n]
    return {
        "err": (out - o).norm(),
        "out_norm": out.norm(),
        "full_norm": o.norm(),
        "err_topk": (top_out - o).norm(),
        "err_uniform": (uni_out - o).norm(),
        "var_hat": sum((1 - pi[i]) * w[i] ** 2 * (v[kv, i] - out).square().sum() for i in kept_tail),
        "var_true": sum((1 - pi[i]) / pi[i] * p[i] ** 2 * (v[kv, i] - o).square().sum() for i in tail),
        "var_anticipated": sum((1 - pi[i]) / pi[i] * s[i] ** 2 * (v[kv, i] - mean).square().sum() for i in tail),
        "max_term": max((w[i] * v[kv, i].norm() for i in kept_tail), default=0.0)
        + out.norm() * max((w[i] for i in kept_tail), default=0.0),
        "n_kept": int(keep.sum()),
        "expected_kept": pi.sum(),
    }


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("budget", [0.4, 0.6, 1.0])
def test_cells_equal_the_loops(decoded, cells, layer: int, budget: float) -> None:
    for head, step in product((0, 3, 1), (1, 3)):
        cell = cells[layer, budget, head, step]
        for name, value in by_hand(decoded, layer, budget, head, step).items():
            assert cell[name] == pytest.approx(float(value), rel=2e-3, abs=2e-6), name


def test_radii_follow_from_the_cell_itself(cells) -> None:
    level = math.log(2 / 0.05)
    for cell in cells.values():
        if cell["exact"]:
            assert all(cell[f"radius_{rule}"] == 0 for rule in ("empirical_bernstein", "normal", "assisted"))
            continue
        third = cell["max_term"] * level / 3
        plain = third + math.sqrt(third**2 + 2 * cell["var_hat"] * level)
        assert cell["radius_empirical_bernstein"] == pytest.approx(plain, rel=1e-4)
        more = cell["var_hat"] + 0.25 * cell["var_anticipated"]
        assert cell["radius_assisted"] == pytest.approx(third + math.sqrt(third**2 + 2 * more * level), rel=1e-4)
        assert cell["radius_normal"] == pytest.approx(1.959964 * math.sqrt(cell["var_hat"]), rel=1e-4)


def test_budget_one_is_exact_and_nothing_is_nan(cells) -> None:
    for (_, budget, _, _), cell in cells.items():
        assert cell["exact"] == (budget == 1.0)
        assert not any(isinstance(x, float) and not math.isfinite(x) for x in cell.values())
        if budget == 1.0:
            assert cell["err"] == 0 and cell["n_kept"] == 150 and cell["margin"] is None


def test_retained_sets_nest_over_budgets(decoded) -> None:
    coins = uniforms(4, "document", 0, 2, 150)
    score = torch.rand(2, 150, generator=torch.Generator().manual_seed(0))
    small, large = (ARMS["certified"].with_budget(b).plan(score, coins)[1] for b in (0.4, 0.6))
    assert (large | ~small).all() and large.sum() > small.sum()


def test_another_seed_or_document_gives_other_cells_the_same_gives_the_same_bits(decoded, cells) -> None:
    again = list(replay_document(decoded, "document", CONFIG, ARMS))
    assert again == list(cells.values())
    for other in (replay_document(decoded, "other", CONFIG, ARMS),):
        assert [r["err"] for r in other] != [r["err"] for r in again]


def test_other_scores_run(decoded) -> None:
    for score in ("knorm", "streaming"):
        arms = ARMS | {"certified": Policy.preset("certified", score=score, budget=1.0)}
        assert len(list(replay_document(decoded, "document", CONFIG, arms))) == 54


def test_a_context_shorter_than_the_window_keeps_everything() -> None:
    short = decode(load_model(resolve("tiny")), IDS[:5], (0,), 2, 32)
    for cell in replay_document(short, "short", CONFIG, ARMS):
        assert cell["exact"] and cell["err"] == 0 and cell["n_kept"] == 5


def test_shape_of_the_tiny_model() -> None:
    of = shape(resolve("tiny"))
    assert (of.layers, of.heads, of.kv_heads) == ((0, 1, 2, 3), 4, 2)


def test_the_plain_loop_that_its_speed_is_measured_by_gives_its_cells(decoded, cells) -> None:
    """Every number of every cell, in the same order; a radius that is undefined there is not compared."""
    plain = list(plain_cells(decoded, "document", CONFIG, ARMS))
    assert [(r["layer"], r["budget"], r["head"], r["step"]) for r in plain] == list(cells)
    for mine, theirs in zip(plain, cells.values(), strict=True):
        compared = {name for name in mine if theirs[name] is not None}
        assert {"err", "var_hat", "max_term", "err_topk", "err_uniform", "radius_assisted"} <= compared
        for name in compared:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-6), name
