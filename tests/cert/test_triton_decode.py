"""The Triton kernel, interpreted on the CPU (TRITON_INTERPRET=1, tests/conftest.py), against definitions in float64.

On a GPU these tests compile it; tests/gpu has what needs one.
"""

import pytest
import torch
from double import RAGGED, check, double, prob_of, rows

pytest.importorskip("triton", reason="Triton is for Linux; requirements.lock pins it there")

from cert.errors import CertError
from cert.kernels import selftest
from cert.kernels.moments import moments, tail_rows
from cert.kernels.packed import pack
from cert.kernels.triton_decode import decode, decode_padded, shares_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(*given: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(DEVICE) for x in given]


def padded(given, scale: float = 0.125, softcap: float | None = None, certificate: bool = True):
    out, sums = decode_padded(*on_device(*given), scale, softcap, certificate)
    return out.cpu(), tuple(x.cpu() for x in sums) if sums else None


@pytest.mark.parametrize(
    ("d", "values", "group", "softcap"),
    [(64, None, 3, None), (80, None, 1, None), (96, None, 8, None), (128, None, 4, 3.0), (256, None, 2, None),
     (128, 64, 5, None), (16, 24, 6, 2.0), (64, None, 7, None)],
)  # fmt: skip
def test_equal_to_the_definitions(d: int, values: int | None, group: int, softcap: float | None) -> None:
    given = rows(group, d, values)
    check(padded(given, d**-0.5, softcap), double(*given, d**-0.5, softcap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_weights_and_nothing_else(dtype: torch.dtype) -> None:
    """The interpreter cuts bfloat16 off where a GPU rounds: 2^-8 of a value near 2 and of a weight."""
    q, k, v, log_weight = rows(4, 64)
    given = (q.to(dtype), k.to(dtype), v.to(dtype), log_weight)
    out, var = (2e-2, 1e-2) if dtype == torch.bfloat16 else (2e-3, 2e-3)
    check(padded(given), double(*given, 0.125), out, var)


def test_small_weights_do_not_vanish_in_float16() -> None:
    """One certain token has nearly all the weight: the others' squares are below float16's smallest number."""
    q, k, v, log_weight = rows(2, 64, counts=(60, 60))
    q, k = q * 0.01, k * 0.01
    log_weight[..., 0], log_weight[..., 1:] = 0.0, 0.7
    k[..., 0, :] = 0
    q = q / q.norm(dim=-1, keepdim=True)
    k[..., 0, :] = 75 * q[:, :1]
    given = (q.half(), k.half(), v.half(), log_weight)
    wanted = double(*given, 0.125)
    assert 1e-5 < float(wanted[1][:, 0].min()) < float(wanted[1][:, 0].max()) < 3e-4
    check(padded(given), wanted, out=5e-3, var=2e-2)


def test_packed_rows_are_the_padded_ones_without_their_padding() -> None:
    given = rows(3, 64)
    packed = pack(*on_device(*given[1:]))
    assert packed.count.tolist() == [*RAGGED] and len(packed.k) == sum(RAGGED)
    out, sums = decode(given[0].to(DEVICE), packed, 0.125)
    assert sums is not None
    check((out.cpu(), tuple(x.cpu() for x in sums)), double(*given, 0.125))


def test_packed_rows_grow_in_place() -> None:
    """Two tokens more: the same as rows that had them from the first."""
    q, k, v, log_weight = rows(2, 64)
    packed = pack(*on_device(k, v, log_weight), spare=2)
    buffers = packed.k.data_ptr(), packed.count.data_ptr()
    g = torch.Generator().manual_seed(5)
    for _ in range(2):
        new = torch.randn(2, 2, 1, 64, generator=g), torch.randn(2, 2, 1, 64, generator=g)
        packed.append(*on_device(*(x[:, :, 0] for x in new)))
        k, v = torch.cat([k, new[0]], -2), torch.cat([v, new[1]], -2)
        log_weight = torch.cat([log_weight, torch.zeros(2, 2, 1)], -1)
    assert (packed.k.data_ptr(), packed.count.data_ptr()) == buffers
    out, sums = decode(q.to(DEVICE), packed, 0.125)
    assert sums is not None
    check((out.cpu(), tuple(x.cpu() for x in sums)), double(q, k, v, log_weight, 0.125))


def test_padding_is_never_read() -> None:
    q, k, v, log_weight = rows(3, 64)
    wanted = double(q, k, v, log_weight, 0.125)
    gone = log_weight.isinf()[..., None]
    check(padded((q, k.masked_fill(gone, torch.nan), v.masked_fill(gone, torch.nan), log_weight)), wanted)


def test_one_token_and_nothing_sampled() -> None:
    for counts, certain in (((1, 1), True), ((9, 40), True), ((1, 1), False)):
        q, k, v, log_weight = rows(2, 64, counts=counts)
        log_weight = torch.where(log_weight.isinf(), log_weight, 0.0 if certain else 1.5)
        found = padded((q, k, v, log_weight))
        check(found, double(q, k, v, log_weight, 0.125))
        assert float(found[1][0].max()) < 1e-9
        assert not certain or not found[1][1].any()


def test_without_certificate_the_output_is_the_same() -> None:
    given = rows(4, 64)
    out, sums = padded(given, certificate=False)
    assert sums is None
    torch.testing.assert_close(out, padded(given)[0], rtol=0, atol=1e-6)


def test_values_far_from_zero_cost_no_precision() -> None:
    q, k, v, log_weight = rows(3, 64, counts=(40, 30))
    v = v + 2000 * (log_weight > -torch.inf)[..., None]
    check(padded((q, k, v, log_weight)), double(q, k, v, log_weight, 0.125), out=2e-3, var=5e-3)


def test_shares_fill_the_device_and_are_never_empty_in_the_fullest_head() -> None:
    cpu = torch.device("cpu")
    assert [shares_of(heads, 4096, 32, cpu) for heads in (1, 2, 3, 4, 100)] == [4, 2, 1, 1, 1]
    assert [shares_of(1, most, 32, cpu) for most in (1, 32, 33, 64, 65, 97)] == [1, 1, 2, 2, 2, 4]


def test_a_head_without_rows_cannot_be_packed() -> None:
    _, k, v, log_weight = rows(1, 16)
    log_weight[0, 1] = -torch.inf
    with pytest.raises(CertError, match="a head has no retained row"):
        pack(k, v, log_weight)


# ---------------------------------------------------------------- the trial before it serves


@pytest.fixture
def untried():
    selftest.trial.cache_clear()
    yield
    selftest.trial.cache_clear()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_works_passes_its_trial(dtype: torch.dtype) -> None:
    assert selftest.trial(DEVICE, dtype, 64) is None


@pytest.mark.usefixtures("untried")
def test_a_kernel_that_is_wrong_or_fails_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from cert.kernels import triton_decode

    def wrong(q, k, v, offset, scale, softcap):
        out, (var, largest) = moments(q, k, v, offset, tail_rows(prob_of(offset), v), scale, softcap)
        return out, (1.01 * var, largest)

    monkeypatch.setattr(triton_decode, "decode_padded", wrong)
    assert selftest.trial(DEVICE, torch.float32, 64) == "is 0.01 off the reference on this device"
    selftest.trial.cache_clear()
    monkeypatch.setattr(triton_decode, "decode_padded", lambda *_: 1 / 0)
    assert selftest.trial(DEVICE, torch.float32, 64) == "failed on this device (ZeroDivisionError: division by zero)"
