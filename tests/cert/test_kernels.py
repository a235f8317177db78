"""Kernels against the float32 reference; which one is chosen and why; the offset of flash-attn by algebra."""

import sys
import types

import pytest
import torch

from cert import kernels
from cert.attention import retained_attention
from cert.errors import CertError
from cert.kernels import Case, best_kernel
from cert.kernels.flash import EXTRA, augmented

CPU = ("sdpa", "eager", "flex")


def rows(heads: int = 4, kv_heads: int = 2, m: int = 3, d: int = 16, n: int = 40, values: int = 16):
    """q, k, v and an offset [2, kv_heads, m, n]: weights up to 1/0.001, padding, causal among the last m."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, length, width, generator=g) for h, length, width in
               ((heads, m, d), (kv_heads, n, d), (kv_heads, n, values)))  # fmt: skip
    offset = 7 * torch.rand(2, kv_heads, 1, n, generator=g)
    offset[:, 0, :, 20:25] = -torch.inf
    later = torch.arange(n) > torch.arange(n - m, n)[:, None]
    return 2 * q, k, v, offset.expand(-1, -1, m, -1).masked_fill(later, -torch.inf)


def reference(q, k, v, offset, scale, softcap):
    given = (q.transpose(1, 2), k[:, None], v[:, None], offset.transpose(1, 2), scale, softcap)
    return retained_attention(*given)[0]


@pytest.mark.parametrize(("name", "softcap"), [*((name, None) for name in CPU), ("eager", 1.5), ("flex", 1.5)])
@pytest.mark.parametrize("shape", [{}, {"heads": 8, "kv_heads": 1, "m": 1}, {"heads": 3, "kv_heads": 3, "values": 24}])
def test_equal_to_the_reference(name: str, shape: dict[str, int], softcap: float | None) -> None:
    given = (*rows(**shape), 0.3)
    out = kernels.OUTPUT_ONLY[name](*given, softcap)
    torch.testing.assert_close(out, reference(*given, softcap), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CPU)
def test_half_precision_keeps_a_float32_offset(name: str, dtype: torch.dtype) -> None:
    """With one-hot values the output is the weights: a half-precision offset near 7 would be 1-2 % off in bfloat16."""
    q, k, _, offset = rows(m=1, n=16, values=16)
    offset[..., 0] = 7 + 1 / 64  # not a bfloat16
    q, k, v = q.to(dtype) * 0.05, k.to(dtype), torch.eye(16, dtype=dtype).expand(2, 2, -1, -1)
    wanted = reference(q, k, v, offset, 0.3, None)
    found = kernels.OUTPUT_ONLY[name](q, k, v, offset, 0.3, None)
    assert found.dtype == dtype
    assert float((found.float() / wanted - 1)[wanted > 1e-3].abs().max()) < 0.008  # a rounding of the output and logits


def case(**changes: object) -> Case:
    return Case(
        **{"device": "cpu", "dtype": torch.float32, "head_dim": 64, "softcap": None, "weights": False, **changes}
    )


HALF = {"dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.parametrize(
    ("changes", "name", "why"),
    [
        ({}, "sdpa", "flex and flash were run on no GPU"),
        ({"weights": True}, "reference", "certificates and h2o's sums need the weights"),
        ({"softcap": 30.0}, "eager", "sdpa: adds no offset after a soft cap"),
        ({"dtype": torch.float16}, "sdpa", "by name only"),
        (HALF, "eager", "sdpa: takes a float32 offset beside half precision on a CPU only"),
    ],
)
def test_the_best_kernel_and_why(changes: dict[str, object], name: str, why: str) -> None:
    found, reason = best_kernel(case(**changes))
    assert found == name and why in reason and "\n" not in reason


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("sdpa", {"weights": True}, "output alone"),
        ("sdpa", {"softcap": 30.0}, "soft cap"),
        ("flash", HALF, "not installed"),
        ("triton", {}, "expected one of auto, reference, sdpa, eager, flex, flash"),
    ],
)
def test_a_forced_kernel_that_cannot_work_says_why(name: str, changes: dict[str, object], why: str) -> None:
    with pytest.raises(CertError, match=f"kernel '{name}': .*{why}"):
        best_kernel(case(**changes), name)


def test_a_kernel_asked_for_by_name() -> None:
    for name in ("reference", "eager", "flex"):
        assert best_kernel(case(softcap=30.0), name) == (name, "asked for by name")


# ---------------------------------------------------------------- flash-attn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_dimensions_carry_the_offset(dtype: torch.dtype) -> None:
    """scale * q'.k' = scale * q.k + log(1/pi) to 1e-3 in half precision; one number alone would miss it by 0.02."""
    q, k, _, offset = rows(m=1, d=128)
    q, k, scale = q.to(dtype), k.to(dtype), 128**-0.5
    one, other = augmented(q, k, offset[:, :, 0], scale)
    assert one.shape[-1] == other.shape[-1] == 128 + EXTRA and one.dtype == other.dtype == dtype
    owner = torch.tensor([0, 0, 1, 1])
    product = scale * (one.double() @ other.double()[:, owner].mT)
    plain = scale * (q.double() @ k.double()[:, owner].mT)
    wanted = plain + offset[:, owner].double()
    real = wanted.isfinite()
    assert float((product - wanted)[real].abs().max()) < 1e-3
    assert float((offset - offset.to(torch.bfloat16).float())[offset.isfinite()].abs().max()) > 0.01
    assert product.softmax(-1)[~real].max() == 0


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with flash_attn's signature: [batch, n, heads, d] throughout, one head_dim, grouped heads, no bias."""

    def flash_attn_func(q, k, v, softmax_scale):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2).float() for x in (k, v))
        weight = (softmax_scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), k)).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weight, v).to(q.dtype)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    module.__spec__ = types.SimpleNamespace(name="flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.usefixtures("flash_attn")
def test_flash_around_a_function_of_its_signature() -> None:
    """The real one needs a GPU: what is tested here is all that is ours."""
    q, k, v, offset = rows()
    found = kernels.OUTPUT_ONLY["flash"](q.half(), k.half(), v.half(), offset, 0.3, None)
    wanted = reference(q.half(), k.half(), v.half(), offset, 0.3, None)
    assert float((found.float() - wanted).abs().max()) < 4e-3


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("changes", "why"),
    [({"softcap": 30.0}, "soft cap"), ({"head_dim": 256}, "above its 256"), ({"device": "cpu"}, "on CUDA"),
     ({"dtype": torch.float32}, "bfloat16 and float16"), ({"weights": True}, "output alone")],
)  # fmt: skip
def test_what_flash_attn_cannot(changes: dict[str, object], why: str) -> None:
    with pytest.raises(CertError, match=f"kernel 'flash': .*{why}"):
        best_kernel(case(**{**HALF, **changes}), "flash")
    assert best_kernel(case(**HALF, head_dim=248), "flash")[0] == "flash"
