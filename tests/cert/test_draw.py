"""The coins: addressed, uniform, independent; and the draw they decide."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from cert.design import certainty_set, inclusion_probs
from cert.draw import poisson_keep, uniforms
from cert.errors import CertError


def test_a_shorter_call_is_a_prefix_and_the_order_of_calls_does_not_matter() -> None:
    long = uniforms(7, "doc", 3, 4, 500)
    uniforms(7, "other", 3, 4, 99)
    assert torch.equal(uniforms(7, "doc", 3, 4, 123), long[:, :123])
    assert torch.equal(uniforms(7, "doc", 3, 2, 500), long[:2])
    assert uniforms(7, "doc", 3, 4, 0).shape == (4, 0)


@pytest.mark.parametrize(
    "other", [(8, "doc", 3), (7, "dog", 3), (7, "doc", 4), (7, 5, 3), (-7, "doc", 3), (7, "doc", 33)]
)
def test_every_part_of_the_address_changes_the_coins(other: tuple) -> None:
    assert (uniforms(7, "doc", 3, 2, 64) == uniforms(*other, 2, 64)).float().mean() < 0.01


def test_an_int_and_its_digits_are_different_documents() -> None:
    assert not torch.equal(uniforms(0, 5, 0, 1, 64), uniforms(0, "5", 0, 1, 64))


def test_a_head_keeps_its_coins_on_any_machine() -> None:
    """Registered rows depend on these bits: SHA-256 key, Philox 4x64, top 23 bits."""
    assert (uniforms(0, "x", 0, 2, 3) * 2**24).long().tolist() == [
        [3364357, 4254327, 2272503],
        [15374293, 8543175, 16763595],
    ]


def test_coins_are_uniform_float32_and_never_zero_or_one() -> None:
    u = uniforms(1, "uniform", 0, 8, 20_000)
    assert u.dtype == torch.float32 and u.min() > 0 and u.max() < 1
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    # P(u < 0.001) is 0.001, where bfloat16 would give 0.0029
    share = (u < 0.001).float().mean().item()
    assert abs(share - 0.001) < 4 * math.sqrt(0.001 / u.numel())


def test_layers_and_heads_are_uncorrelated() -> None:
    n = 20_000
    rows = torch.cat([uniforms(0, "doc", layer, 6, n) for layer in range(5)]).numpy()
    off = np.abs(np.corrcoef(rows))[~np.eye(30, dtype=bool)]
    assert off.max() < stats.norm.isf(0.001 / 870) / math.sqrt(n)  # Bonferroni over 435 pairs, two-sided


def test_inclusion_frequencies_are_the_probabilities() -> None:
    score = torch.rand(150, generator=torch.Generator().manual_seed(0)) ** 4
    prob = inclusion_probs(score, 70, certainty_set(score, 70))
    draws = 20_000
    coins = uniforms(0, "draws", 0, draws, 150)
    frequency = poisson_keep(prob.expand(draws, -1), coins).double().mean(0)
    error = (prob.double() * (1 - prob.double()) / draws).sqrt()
    z = ((frequency - prob) / error.clamp(min=1e-12)).abs()
    assert z[prob < 1].max() < stats.norm.isf(0.001 / 300)
    assert (frequency[prob == 1] == 1).all()


def test_smaller_probabilities_keep_a_subset() -> None:
    u = uniforms(0, "nest", 0, 3, 400)
    prob = torch.rand(3, 400, generator=torch.Generator().manual_seed(1))
    assert (poisson_keep(prob, u) | ~poisson_keep(prob / 2, u)).all()


def test_bad_coins_are_refused() -> None:
    with pytest.raises(CertError, match="float32 or float64"):
        poisson_keep(torch.ones(3), torch.rand(3).bfloat16())
    with pytest.raises(CertError, match="document"):
        uniforms(0, True, 0, 1, 1)
    with pytest.raises(CertError, match="at least 0"):
        uniforms(0, "x", 0, 1, -1)
