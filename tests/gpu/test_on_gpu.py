"""What needs a GPU (make gpu-check): the compiled kernel at real shapes, in a CUDA graph, and in a session.

tests/cert/test_triton_decode.py has the kernel's edges; make gpu-check runs it there too, compiled.
"""

import pytest
import torch
from tiny_folder import SMALL
from transformers import LlamaConfig, LlamaForCausalLM

from cert.attention import retained_attention
from cert.certificate import max_term, poisson_variance
from cert.hf import certified
from cert.kernels import OUTPUT_ONLY, Case, cannot
from cert.policy import Policy
from runs.speed_gpu import Shape, captured, retained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device (make gpu-check)"),
]
DEVICE = "cuda"
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1e-2, 1e-2)}  # output, variance
SHAPE = Shape(ctx_tokens=4096)


def rows(dtype: torch.dtype, batch: int = 2) -> tuple[torch.Tensor, ...]:
    return retained(Shape(ctx_tokens=SHAPE.ctx_tokens, dtype=dtype), batch, 0.25, DEVICE)


def wanted(q, k, v, log_weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, V_hat and b by their definitions in float64."""
    q, k, v, log_weight = (x.double() for x in (q, k, v, log_weight))
    prob = torch.where(log_weight.isinf(), 1.0, torch.exp(-log_weight))
    out, weight = retained_attention(q, k, v, log_weight, q.shape[-1] ** -0.5)
    return out, poisson_variance(weight, prob, v, out), max_term(weight, prob, v, out)


def check(found, given, dtype: torch.dtype) -> None:
    out, (var, largest) = found
    o, v, b = wanted(*given)
    near, relative = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), o, rtol=0, atol=near)
    torch.testing.assert_close(var.double(), v, rtol=relative, atol=1e-12)
    torch.testing.assert_close(largest.double(), b, rtol=max(near, 1e-5), atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equal_to_the_definitions_at_the_shapes_of_llama(dtype: torch.dtype) -> None:
    from cert.kernels.packed import pack
    from cert.kernels.triton_decode import decode, decode_padded

    given = rows(dtype)
    scale = SHAPE.head_dim**-0.5
    check(decode_padded(*given, scale, None), given, dtype)
    check(decode(given[0], pack(*given[1:]), scale), given, dtype)


def test_the_same_call_gives_the_same_bits() -> None:
    from cert.kernels.triton_decode import decode_padded

    given = rows(torch.bfloat16)
    (first, sums), (again, others) = (decode_padded(*given, 0.1, None) for _ in range(2))
    assert torch.equal(first, again) and all(torch.equal(a, b) for a, b in zip(sums, others, strict=True))


def test_a_cuda_graph_follows_rows_that_grow_in_place() -> None:
    """Captured once; a token is appended, and the replay gives what a call gives."""
    from cert.kernels.packed import pack
    from cert.kernels.triton_decode import decode

    q, k, v, log_weight = rows(torch.bfloat16)
    packed, scale = pack(k, v, log_weight, spare=2), SHAPE.head_dim**-0.5
    kept: list[torch.Tensor] = []

    def step() -> None:
        out, sums = decode(q, packed, scale)
        kept[:] = [out, *sums]

    replay = captured([step])
    for _ in range(2):
        packed.append(*(torch.randn(2, SHAPE.kv_heads, SHAPE.head_dim, device=DEVICE, dtype=k.dtype) for _ in "kv"))
        replay()
        out, sums = decode(q, packed, scale)
        for mine, called in zip(kept, (out, *sums), strict=True):
            assert torch.equal(mine, called)


@pytest.mark.parametrize("name", OUTPUT_ONLY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_without_certificate_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    if why := cannot(name, Case(DEVICE, dtype, SHAPE.head_dim, None, False, False)):
        pytest.skip(f"{name}: {why}")
    given, scale = rows(dtype), SHAPE.head_dim**-0.5
    q, k, v, log_weight = given
    out = OUTPUT_ONLY[name](q[:, :, None], k, v, log_weight[:, :, None], scale, None)[:, 0]
    torch.testing.assert_close(out.double(), wanted(*given)[0], rtol=0, atol=TOLERANCE[dtype][0])


def test_a_session_is_served_by_triton_and_says_what_the_cpu_says() -> None:
    """The same kept rows, since coins know no device; certificates within 0.1 %."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    ids, policy = torch.randint(5, 250, (1, 90)), Policy.preset("certified", budget=0.5, sinks=2, recent=8, window=8)
    found = []
    for device in ("cpu", DEVICE):
        with certified(model.to(device), policy, seed=3) as session, torch.no_grad():
            session.prefill(ids.to(device))
            session.compress()
            for token in range(7, 11):
                model(input_ids=torch.tensor([[token]], device=device), use_cache=True, **session.cache_kwargs)
            positions = [layer.position.cpu() for layer in session.cache.compressible.values()]
            found.append((positions, session.certificates["radius"], session.summary()["kernel"]))
    (places, radii, _), (others, theirs, kernel) = found
    assert kernel == "triton"
    assert all(torch.equal(a, b) for a, b in zip(places, others, strict=True))
    assert any(radii) and radii == pytest.approx(theirs, rel=1e-3, abs=1e-9)
