"""One decode step over retained rows on a GPU (Triton): output and certificate in one pass over K and V.

A program serves the query heads of one KV head over a share of its rows and leaves running sums; a second kernel puts the
shares together. Grids and shapes depend on sizes the host knows, and nothing is read back: fit for CUDA graphs. With
TRITON_INTERPRET=1, set before this module is loaded, it runs on a CPU, slowly, which is how it is tested.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from cert.kernels.packed import Packed

MOST_SHARES = 64
PROGRAMS_PER_PROCESSOR = 4  # of the first kernel: enough loads under way to fill the memory's bandwidth
LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is the hardware's exponential
FIELDS = tl.constexpr(5)  # of a share beside its vectors: top logit, sums of w and c w^2, second, largest w, w ||v||


# Jitted functions are compiled from their source: no_type_check keeps the tests' shape checker out of it.
@triton.jit(do_not_specialize=["rows"])  # it grows by one a step
@no_type_check
def _share(  # noqa: PLR0913
    q, k, v, log_weight, start, count, rows, scale, softcap, part_out, part_sums,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr, CERTIFICATE: tl.constexpr, UNIT: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    head, share, shares = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if PACKED:
        begin, n = tl.load(start + head), tl.load(count + head)
    else:
        begin, n = head * rows, rows
    each = tl.cdiv(tl.cdiv(n, shares), BLOCK) * BLOCK
    low, high = share * each, tl.minimum(share * each + each, n)
    at_g, at_d, at_v, at_n = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, BLOCK)
    # A product has 16 rows at least. With a certificate the queries come twice: the first GROUP rows weigh the values by
    # w, the next by c w^2, so that one product with the values gives the output and the first moment.
    squared = CERTIFICATE & (at_g >= GROUP)
    real_g, real_d, real_v = at_g < (2 * GROUP if CERTIFICATE else GROUP), at_d < D, at_v < DV
    queries = tl.load(
        q + (head * GROUP + at_g % GROUP)[:, None] * D + at_d[None, :],
        mask=real_g[:, None] & real_d[None, :],
        other=0.0,
    ).to(DOT)
    reference = tl.load(v + begin * DV + at_v, mask=real_v, other=0.0).to(tl.float32)
    top = tl.full([GP], float("-inf"), tl.float32)
    out = tl.zeros([GP, VP], tl.float32)
    # Sums and maxima are kept a column of the block each and put together after the last one.
    total = tl.zeros([GP, BLOCK], tl.float32)
    second = tl.zeros([GP, BLOCK], tl.float32)
    heaviest = tl.zeros([GP, BLOCK], tl.float32)
    largest = tl.zeros([GP, BLOCK], tl.float32)
    for row in range(low, high, BLOCK):
        inside = row + at_n < high
        at = begin + row + at_n
        offset = tl.load(log_weight + at, mask=inside, other=float("-inf"))
        here = inside if PACKED else offset > float("-inf")  # padding is never read
        keys = tl.load(k + at[None, :] * D + at_d[:, None], mask=here[None, :] & real_d[:, None], other=0.0)
        logit = tl.dot(queries, keys.to(DOT), input_precision="ieee") * scale
        if CAPPED:
            logit = softcap * (2.0 * tl.sigmoid(2.0 * logit / softcap) - 1.0)  # softcap * tanh(logit / softcap)
        logit = (logit + offset[None, :]) * LOG2E
        new = tl.maximum(top, tl.max(logit, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(logit - safe[:, None])
        shrink = tl.exp2(top - safe)
        values = tl.load(v + at[:, None] * DV + at_v[None, :], mask=here[:, None] & real_v[None, :], other=0.0)
        shrinks = shrink
        if CERTIFICATE:
            c = tl.where(offset > 0.0, 1.0 - tl.exp2(-offset * LOG2E), 0.0)
            tail = tl.where(c[None, :] > 0.0, weight, 0.0)
            # Rounded once, before all three sums, so that they are those of one set of weights.
            cw2 = (tail * weight * c[None, :] * UNIT).to(values.dtype).to(tl.float32)
            single = values.to(tl.float32)
            apart = tl.where(here[:, None], single - reference[None, :], 0.0)
            distance, size = tl.sum(apart * apart, 1), tl.sqrt(tl.sum(single * single, 1))
            shrinks = tl.where(squared, shrink * shrink, shrink)
            second = second * shrinks[:, None] + cw2 * distance[None, :]
            heaviest = tl.maximum(heaviest * shrink[:, None], tail)
            largest = tl.maximum(largest * shrink[:, None], tail * size[None, :])
            weight = tl.where(squared[:, None], cw2, weight)
        total = total * shrinks[:, None] + weight
        out = out * shrinks[:, None] + tl.dot(weight.to(values.dtype).to(DOT), values.to(DOT), input_precision="ieee")
        top = new
    place = head * shares + share
    tl.store(part_out + (place * GP + at_g)[:, None] * VP + at_v[None, :], out)
    fields = part_sums + place * FIELDS * GP + at_g
    tl.store(fields, top)
    tl.store(fields + GP, tl.sum(total, 1))
    if CERTIFICATE:
        tl.store(fields + 2 * GP, tl.sum(second, 1))
        tl.store(fields + 3 * GP, tl.max(heaviest, 1))
        tl.store(fields + 4 * GP, tl.max(largest, 1))


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def _together(  # noqa: PLR0913
    v, start, rows, part_out, part_sums, result, var_hat, max_term,
    GROUP: tl.constexpr, DV: tl.constexpr, GP: tl.constexpr, VP: tl.constexpr, SHARES: tl.constexpr,
    PACKED: tl.constexpr, CERTIFICATE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    query_head = tl.program_id(0).to(tl.int64)
    head, member = query_head // GROUP, query_head % GROUP
    at_s, at_v = tl.arange(0, SHARES), tl.arange(0, VP)
    real_v = at_v < DV
    place = head * SHARES + at_s
    fields = part_sums + place * FIELDS * GP + member
    vectors = part_out + (place * GP + member)[:, None] * VP + at_v[None, :]
    top = tl.load(fields)
    shrink = tl.exp2(top - tl.max(top, 0))
    norm = tl.sum(tl.load(fields + GP) * shrink, 0)
    out = tl.sum(tl.load(vectors) * shrink[:, None], 0) / norm
    tl.store(result + query_head * DV + at_v, out, mask=real_v)
    if CERTIFICATE:
        begin = tl.load(start + head) if PACKED else head * rows
        reference = tl.load(v + begin * DV + at_v, mask=real_v, other=0.0).to(tl.float32)
        shrink2 = shrink * shrink / UNIT
        total = tl.sum(tl.load(fields + GP + GROUP) * shrink2, 0)
        first = tl.sum(tl.load(vectors + GROUP * VP) * shrink2[:, None], 0) - total * reference
        second = tl.sum(tl.load(fields + 2 * GP + GROUP) * shrink2, 0)
        heaviest = tl.max(tl.load(fields + 3 * GP) * shrink, 0) / norm
        largest = tl.max(tl.load(fields + 4 * GP) * shrink, 0) / norm
        shifted = out - reference
        var = second - 2.0 * tl.sum(shifted * first, 0) + tl.sum(shifted * shifted, 0) * total
        tl.store(var_hat + query_head, tl.maximum(var, 0.0) / (norm * norm))
        tl.store(max_term + query_head, largest + tl.sqrt(tl.sum(out * out, 0)) * heaviest)


def decode(
    q: Tensor, packed: Packed, scale: float, softcap: float | None = None, certificate: bool = True
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """o_hat and (V_hat, b) of one query a head over packed rows; None in place of the latter without certificate.

    q [batch, heads, d] in the dtype of the rows; out [batch, heads, dv], V_hat and b [batch, heads], all float32.
    Source: METHOD sections 3 to 5; the split over the rows: Dao et al., Flash-Decoding (2023).
    """
    return _launched(
        q, packed.k, packed.v, packed.log_weight, _Options(packed, packed.most, scale, softcap, certificate)
    )


def decode_padded(  # noqa: PLR0913 - as the other kernels are called
    q: Tensor, k: Tensor, v: Tensor, offset: Tensor, scale: float, softcap: float | None, certificate: bool = True
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """decode() over rows [batch, kv_heads, n, d] padded to one length, offset [batch, kv_heads, n] float32, -inf there.

    A padded row costs its offset, four bytes; its key and value are not read.
    """
    options = _Options(None, k.shape[2], scale, softcap, certificate)
    return _launched(
        q, k.contiguous().flatten(0, 2), v.contiguous().flatten(0, 2), offset.contiguous().flatten(), options
    )


INTERPRETED = not isinstance(
    _share, triton.JITFunction
)  # whose bfloat16 products are wrong: float32 ones in their place
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class _Options(NamedTuple):
    packed: Packed | None
    most: int
    scale: float
    softcap: float | None
    certificate: bool


def shares_of(heads: int, most: int, block: int, device: torch.device) -> int:
    """Shares of a head's rows: a power of two, as many as fill the device, none of them without a row in the fullest."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = min(max(1, PROGRAMS_PER_PROCESSOR * processors // heads), triton.cdiv(most, block), MOST_SHARES)
    return 1 << (wanted.bit_length() - 1)


def _launched(
    q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor, options: _Options
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    packed, most, scale, softcap, certificate = options
    (batch, heads, d), dv = q.shape, v.shape[-1]
    owners = len(packed.start) if packed else k.shape[0] // most  # KV heads of the whole batch
    group, half = batch * heads // owners, k.dtype in (torch.bfloat16, torch.float16)
    gp, dp, vp = (max(16, triton.next_power_of_2(x)) for x in (2 * group if certificate else group, d, dv))
    block = (32 if half else 16) if max(dp, vp) <= 128 else 16
    shares = shares_of(owners, most, block, q.device)

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=q.device)

    out, var_hat, max_term = empty(batch, heads, dv), empty(batch, heads), empty(batch, heads)
    parts, sums = empty(owners, shares, gp, vp), empty(owners, shares, FIELDS.value, gp)
    start, count = (packed.start, packed.count) if packed else (log_weight, log_weight)  # the latter are not read
    sizes = {"GROUP": group, "DV": dv, "GP": gp, "VP": vp, "PACKED": packed is not None, "CERTIFICATE": certificate}
    sizes["UNIT"] = 2.0**15 if k.dtype == torch.float16 else 1.0  # c w^2 would underflow in float16
    _share[(owners, shares)](
        q.contiguous(), k, v, log_weight, start, count, most, scale, softcap or 1.0, parts, sums, D=d, DP=dp, BLOCK=block,
        CAPPED=softcap is not None, DOT=tl.float32 if INTERPRETED else TYPES[k.dtype], num_stages=3, **sizes,
    )  # fmt: skip
    _together[(batch * heads,)](v, start, most, parts, sums, out, var_hat, max_term, SHARES=shares, **sizes)
    return out, (var_hat, max_term) if certificate else None
