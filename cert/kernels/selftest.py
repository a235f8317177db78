"""Whether the Triton kernel works on a device: it is tried once, on rows whose answer is known, before it serves."""

from functools import cache

import torch

from cert.kernels.moments import moments, tail_rows

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # of the largest number of each kind


@cache
def trial(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernel does not serve here, or None: it gave the numbers of `moments` for 300 random rows of 4 heads."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, *size, head_dim, generator=g).to(device, dtype) for size in ((4,), (2, 300), (2, 300)))
    offset = torch.rand(1, 2, 300, generator=g).mul(4).sub(1).clamp(min=0).to(device)
    offset[:, 0, 200:] = -torch.inf
    tail = tail_rows(torch.where(offset.isinf(), 1.0, torch.exp(-offset)), v)
    try:
        from cert.kernels.triton_decode import decode_padded

        out, sums = decode_padded(q, k, v, offset, head_dim**-0.5, None)
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways; the reason is kept and another kernel serves
        return f"failed on this device ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    wanted, others = moments(q, k, v, offset, tail, head_dim**-0.5, None)
    for mine, theirs in zip((out, *(sums or ())), (wanted, *others), strict=True):
        apart = float((mine - theirs).abs().max() / theirs.abs().max())
        if not apart <= TOLERANCE[dtype]:
            return f"is {apart:.1g} off the reference on this device"
    return None
