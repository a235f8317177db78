"""The certificate from moments, on the CPU, against definitions in float64; every kind of retained set."""

import pytest
import torch
from double import check, double, prob_of, rows

from cert.attention import retained_attention
from cert.certificate import max_term, poisson_variance
from cert.kernels.moments import moments, tail_rows


def found(q, k, v, log_weight, scale=0.125, softcap=None, seen: int | None = None):
    """moments(); seen: the first so many rows were there at the last compression."""
    tail = tail_rows(prob_of(log_weight[..., :seen]), v[..., :seen, :])
    return moments(q, k, v, log_weight, tail, scale, softcap)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("d", "values"), [(64, None), (80, None), (96, 32), (128, None), (256, None)])
def test_equal_to_the_definitions(d: int, values: int | None, group: int, softcap: float | None) -> None:
    given = rows(group, d, values)
    check(found(*given, d**-0.5, softcap), double(*given, d**-0.5, softcap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_rows_are_float32(dtype: torch.dtype) -> None:
    q, k, v, log_weight = rows(3, 64)
    given = (q.to(dtype), k.to(dtype), v.to(dtype), log_weight, 0.125)
    out, sums = found(*given)
    assert out.dtype == sums[0].dtype == sums[1].dtype == torch.float32
    check((out, sums), double(*given))


def test_float64_stays() -> None:
    q, k, v, log_weight = rows(2, 16)
    given = (q.double(), k.double(), v.double(), log_weight.double(), 0.125)
    check(found(*given), double(*given), out=1e-12, var=1e-10)


def test_one_token_and_nothing_sampled() -> None:
    """One certain token, or many: no variance, no largest term; one sampled token: o_hat is its value."""
    for counts, certain in (((1, 1), True), ((9, 30), True), ((1, 1), False)):
        q, k, v, log_weight = rows(2, 64, counts=counts)
        log_weight = torch.where(log_weight.isinf(), log_weight, 0.0 if certain else 1.5)
        out, (var, largest) = found(q, k, v, log_weight)
        check((out, (var, largest)), double(q, k, v, log_weight, 0.125))
        assert float(var.max()) < 1e-9
        assert not certain or not largest.any()


def test_rows_that_came_after_the_compression() -> None:
    """They are certain, and tail_rows need not know them."""
    q, k, v, log_weight = rows(3, 64, counts=(40, 40, 40, 40))
    log_weight[..., 33:] = 0
    check(found(q, k, v, log_weight, seen=33), double(q, k, v, log_weight, 0.125))


def test_values_far_from_zero_cost_no_precision() -> None:
    """||v|| is 1,000 times ||v - o_hat||: without v_ref the variance would be off by more than itself."""
    q, k, v, log_weight = rows(3, 64, counts=(40, 30, 20, 50))
    v = v + 2000 * (log_weight > -torch.inf)[..., None]
    check(found(q, k, v, log_weight), double(q, k, v, log_weight, 0.125), out=2e-3, var=5e-3)


def test_equal_to_what_the_reference_makes_of_its_weights() -> None:
    q, k, v, log_weight = rows(4, 64)
    out, weight = retained_attention(q, k, v, log_weight, 0.125)
    prob = prob_of(log_weight)
    mine, sums = found(q, k, v, log_weight)
    torch.testing.assert_close(mine, out, rtol=0, atol=1e-5)
    torch.testing.assert_close(sums[0], poisson_variance(weight, prob, v, out), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(sums[1], max_term(weight, prob, v, out), rtol=1e-5, atol=1e-12)
