"""What the GPU bench serves, on the CPU: rows as a Poisson design leaves them, bytes, and cases that agree."""

import pytest
import torch

from runs.speed_gpu import HEADLINE, Shape, cases, headline, read_bytes, retained

SMALL = Shape(heads=4, kv_heads=2, head_dim=16, ctx_tokens=160, dtype=torch.float32)


def test_rows_are_as_a_poisson_design_leaves_them() -> None:
    """Budget, a quarter of it certain, uneven heads padded behind, uncertain rows with an offset above 0."""
    shape = Shape(heads=8, kv_heads=8, head_dim=8, ctx_tokens=4000, dtype=torch.float32)
    q, k, v, log_weight = retained(shape, 4, 0.25, "cpu")
    there = log_weight > -torch.inf
    counts = there.sum(-1).float()
    assert q.shape == (4, 8, 8) and k.shape == v.shape == (4, 8, int(counts.max()), 8)
    assert counts.unique().numel() > 5 and abs(float(counts.mean()) - 1000) < 4 * (4000 * 0.2 * 0.8 / 32) ** 0.5
    assert torch.equal(there, torch.arange(k.shape[2]) < counts[..., None])  # padding comes last
    assert not log_weight[..., :250].any() and float(log_weight[..., 250:][there[..., 250:]].min()) > 0
    again, other = (retained(shape, 4, 0.25, "cpu", seed)[3] for seed in (0, 1))
    assert torch.equal(again, log_weight) and not torch.equal(other[..., :300], log_weight[..., :300])


def test_bytes_of_a_step_by_hand() -> None:
    log_weight = torch.tensor([[[0.0, 1.0, -torch.inf], [0.0, -torch.inf, -torch.inf]]])
    assert read_bytes(log_weight, SMALL) == 3 * (2 * 16 * 4 + 4)
    assert read_bytes(log_weight, Shape()) == 3 * (2 * 128 * 2 + 4)


def test_all_cases_over_the_same_rows_give_the_same_output() -> None:
    """Certified, plain, and torch's with the offset as its mask."""
    pytest.importorskip("triton", reason="Triton is for Linux; requirements.lock pins it there")
    if torch.cuda.is_available():
        pytest.skip("these are interpreted, on a CPU")
    given = retained(SMALL, 1, 0.4, "cpu")
    g = torch.Generator().manual_seed(1)
    full = [torch.randn(1, 2, SMALL.ctx_tokens, 16, generator=g) for _ in "kv"]
    found = {
        name: case().view(1, 4, 16) for name, case in cases(given, (full[0], full[1])).items() if "flash" not in name
    }
    assert list(found) == ["certified", "plain", "sdpa"]
    for name in ("plain", "sdpa"):
        torch.testing.assert_close(found[name], found["certified"], rtol=0, atol=1e-5)


def test_the_headline_is_one_of_the_cases() -> None:
    shape = Shape()
    every = [{"batch": b, "budget": x, "seconds": {}} for b in shape.batches for x in shape.budgets]
    assert [one for one in every if headline(one)] == [HEADLINE | {"seconds": {}}]
