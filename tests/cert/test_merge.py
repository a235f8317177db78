"""Merging: weighted means by hand, mass conserved, retained rows alone change."""

import torch

from cert.merge import merged_values


def test_evicted_values_join_the_nearest_key_by_score() -> None:
    k = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 2.0], [0.1, 1.0]])[None]
    v = torch.tensor([[1.0], [3.0], [10.0], [20.0]])[None]
    keep = torch.tensor([[True, False, True, False]])
    found = merged_values(torch.tensor([[3.0, 1.0, 1.0, 4.0]]), k, v, keep)
    assert found[0, :, 0].tolist() == [1.5, 3.0, 18.0, 20.0]  # (3*1 + 1*3)/4, (1*10 + 4*20)/5


def test_scores_of_zero_give_the_plain_mean() -> None:
    k, v = torch.ones(1, 3, 2), torch.tensor([[[1.0], [2.0], [6.0]]])
    found = merged_values(torch.zeros(1, 3), k, v, torch.tensor([[False, True, False]]))
    assert found[0, :, 0].tolist() == [1.0, 3.0, 6.0]


def test_the_weighted_total_is_conserved_and_nothing_else_changes() -> None:
    k, v, score, keep = (
        torch.randn(2, 3, 50, 8),
        torch.randn(2, 3, 50, 4),
        torch.rand(2, 3, 50),
        torch.rand(2, 3, 50) < 0.4,
    )
    found = merged_values(score, k, v, keep)
    assert torch.equal(found[~keep], v[~keep])
    unit = torch.nn.functional.normalize(k, dim=-1)
    similar = (unit @ unit.transpose(-1, -2)).masked_fill(~keep[..., None, :], -2)
    owner = torch.where(keep, torch.arange(50), similar.argmax(-1))
    mass = torch.zeros_like(score).scatter_add(-1, owner, score)
    total = (score[..., None] * v).sum(2)
    allowed = 1e-5 * float(total.abs().max().clamp(min=1))
    torch.testing.assert_close((mass * keep)[..., None].mul(found).sum(2), total, rtol=0, atol=allowed)


def test_all_kept_or_none_kept_is_the_same_values_and_the_dtype_stays() -> None:
    k, v = torch.randn(1, 5, 4).bfloat16(), torch.randn(1, 5, 4).bfloat16()
    for keep in (torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.bool)):
        found = merged_values(torch.rand(1, 5), k, v, keep)
        assert torch.equal(found, v) and found.dtype == torch.bfloat16 and found is not v
