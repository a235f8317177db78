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
        **{
            "device": "cpu",
            "dtype": torch.float32,
            "head_dim": 64,
            "softcap": None,
            "weights": False,
            "certificate": False,
            **changes,
        }
    )


HALF = {"dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.parametrize(
    ("changes", "name", "why"),
    [
        ({}, "sdpa", "flex and flash were run on no GPU"),
        ({"weights": True}, "reference", "triton, sdpa, eager, moments: no weights, which h2o's sums and self-signals"),
        ({"weights": True, "certificate": True}, "reference", "no weights"),
        ({"certificate": True}, "moments", "triton: serves CUDA devices; sdpa, eager: output alone, no certificate"),
        ({"certificate": True, "softcap": 30.0}, "moments", "no certificate"),
        ({"softcap": 30.0}, "eager", "sdpa: adds no offset after a soft cap"),
        ({"dtype": torch.float16}, "sdpa", "by name only"),
        (HALF, "eager", "sdpa: takes a float32 offset beside half precision on a CPU only"),
    ],
)
def test_the_best_kernel_and_why(
    changes: dict[str, object], name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "trial", lambda *_: "is of no use here")
    found, reason = best_kernel(case(**changes))
    assert found == name and why in reason and "\n" not in reason


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("sdpa", {"certificate": True}, "output alone, no certificate"),
        ("sdpa", {"weights": True}, "no weights"),
        ("moments", {"weights": True}, "no weights"),
        ("triton", {}, "serves CUDA devices"),
        ("triton", {"device": "cuda", "head_dim": 512}, "head_dim up to 256"),
        ("triton", {"device": "cuda", "dtype": torch.float64}, "serves float32, float16 and bfloat16"),
        ("sdpa", {"softcap": 30.0}, "soft cap"),
        ("flash", HALF, "not installed"),
        ("fast", {}, "expected one of auto, reference, moments, triton, sdpa, eager, flex, flash"),
    ],
)
def test_a_forced_kernel_that_cannot_work_says_why(name: str, changes: dict[str, object], why: str) -> None:
    with pytest.raises(CertError, match=f"kernel '{name}': .*{why}"):
        best_kernel(case(**changes), name)


def test_a_kernel_asked_for_by_name() -> None:
    for name in ("reference", "moments", "eager", "flex"):
        assert best_kernel(case(softcap=30.0), name) == (name, "asked for by name")


@pytest.mark.parametrize("certificate", [True, False])
def test_triton_serves_a_gpu_where_its_trial_went_well(monkeypatch: pytest.MonkeyPatch, certificate: bool) -> None:
    """A device of its own is simulated: what its trial says decides, and is said."""
    asked = []
    wanted = case(**HALF, certificate=certificate)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(kernels, "trial", lambda *of: asked.append(of))
    name, why = best_kernel(wanted)
    assert name == "triton" and why.startswith("tried on this device, equal to the reference")
    assert asked == [("cuda", torch.bfloat16, 64)] and best_kernel(wanted, "triton")[0] == "triton"
    monkeypatch.setattr(kernels, "trial", lambda *_: "is 0.5 off the reference on this device")
    name, why = best_kernel(wanted)
    assert name == ("moments" if certificate else "eager") and why.startswith("triton: is 0.5 off the reference")
    with pytest.raises(CertError, match=r"kernel 'triton': is 0\.5 off"):
        best_kernel(wanted, "triton")
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    assert best_kernel(wanted)[1].startswith("triton: is not installed")


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
     ({"dtype": torch.float32}, "bfloat16 and float16"), ({"certificate": True}, "output alone")],
)  # fmt: skip
def test_what_flash_attn_cannot(changes: dict[str, object], why: str) -> None:
    with pytest.raises(CertError, match=f"kernel 'flash': .*{why}"):
        best_kernel(case(**{**HALF, **changes}), "flash")
    assert best_kernel(case(**HALF, head_dim=248), "flash")[0] == "flash"
