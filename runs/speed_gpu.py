"""What certified decode attention costs on a GPU at the shapes of Llama 3.1 8B: random numbers, no files, no network."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from runs.speed import decode_steps
from runs.timing import Watch, interval, medians, ratios


@dataclass(frozen=True)
class Shape:
    """heads, kv_heads, head_dim of a layer; ctx_tokens that were evicted down to each of budgets, for each batch."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ctx_tokens: int = 16384
    budgets: tuple[float, ...] = (0.1, 0.25, 0.5)
    batches: tuple[int, ...] = (1, 8)
    dtype: torch.dtype = torch.bfloat16


HEADLINE = {"batch": 8, "budget": 0.25}  # the case that the entries of bench.json are of
COLD = 2**28  # bytes that a case walks through before it meets the same rows again: more than a GPU's L2 cache
BUSY_S = 4e-3  # least duration of what is timed at once


def clock() -> float:
    """Seconds by the wall, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def retained(
    shape: Shape, batch: int, budget: float, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and log_weight of what a Poisson design leaves: a quarter certain, uneven heads, padded to the fullest."""
    g = torch.Generator().manual_seed(seed)
    n, kv_heads = shape.ctx_tokens, shape.kv_heads
    certain = int(0.25 * budget * n)
    chance = (budget * n - certain) / (n - certain)
    drawn = torch.rand(batch, kv_heads, n - certain, generator=g) < chance
    counts = certain + drawn.sum(-1)
    width = int(counts.max())
    tail = -(chance * (0.5 + torch.rand(batch, kv_heads, width, generator=g))).clamp(max=1).log()
    at = torch.arange(width)
    log_weight = torch.where(at < certain, 0.0, tail).masked_fill(at >= counts[..., None], -torch.inf)
    g = torch.Generator(device).manual_seed(seed)
    sizes = (shape.heads,), (kv_heads, width), (kv_heads, width)
    q, k, v = (torch.randn(batch, *x, shape.head_dim, generator=g, device=device, dtype=shape.dtype) for x in sizes)
    return q, k, v, log_weight.to(device)


def read_bytes(log_weight: Tensor, shape: Shape) -> int:
    """Bytes a decode step must read at least: key, value and offset of each retained row."""
    rows = int((log_weight > -torch.inf).sum())
    return rows * (2 * shape.head_dim * torch.finfo(shape.dtype).bits // 8 + 4)


def cases(given: tuple[Tensor, Tensor, Tensor, Tensor], full: tuple[Tensor, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """One decode step over the same rows: ours with and without certificate, torch's; and torch's over the full cache."""
    from cert.kernels.packed import pack
    from cert.kernels.triton_decode import decode

    (q, k, v, log_weight), scale = given, given[0].shape[-1] ** -0.5
    packed, one = pack(k, v, log_weight), q[:, :, None]
    grouped, mask = q.unflatten(1, (k.shape[1], -1)), log_weight[:, :, None].to(q.dtype)

    def flash(keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(one, keys, values, scale=scale, enable_gqa=True)

    return {
        "certified": lambda: decode(q, packed, scale)[0],
        "plain": lambda: decode(q, packed, scale, certificate=False)[0],
        "sdpa": lambda: scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale),
        "sdpa flash, no offset": lambda: flash(k, v),
        "sdpa flash, full cache": lambda: flash(*full),
    }


def captured(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    """The calls as one CUDA graph, so that the host's share of a launch is not measured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def bandwidth(turns: int, watch: Watch) -> float:
    """Bytes a second of a copy within the device, read and written; median of the turns."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = watch.take_turns({"copy": lambda: [target.copy_(source) for _ in range(8)]}, turns)["copy"]
    return 8 * 2 * source.numel() / interval(seconds)[0]


def measured(shape: Shape, turns: int, watch: Watch) -> Iterator[dict[str, Any]]:
    """For each batch and budget: seconds of a step by case, and ratios with their intervals. Needs a CUDA device."""
    copied = bandwidth(turns, watch)
    for batch in shape.batches:
        size = (batch, shape.kv_heads, shape.ctx_tokens, shape.head_dim)
        full = torch.randn(size, device="cuda", dtype=shape.dtype), torch.randn(size, device="cuda", dtype=shape.dtype)
        for budget in shape.budgets:
            watch.said(f"batch {batch}, {budget:.0%}")
            first = retained(shape, batch, budget, "cuda")
            least = read_bytes(first[3], shape)
            sets = [
                first,
                *(retained(shape, batch, budget, "cuda", seed) for seed in range(1, math.ceil(COLD / least))),
            ]
            each = [cases(given, full) for given in sets]
            seconds, missing = _timed(each, turns, watch)
            of = {name: ratios(seconds["certified"], seconds[name]) for name in seconds if name != "certified"}
            of["bandwidth"] = [second / (least / copied) for second in seconds["certified"]]
            yield {
                "batch": batch,
                "budget": budget,
                "bytes": least,
                "copy_bytes_per_s": copied,
                "seconds": medians(seconds),
                "certified_over": {
                    name: dict(zip(("ratio", "low", "high"), interval(x), strict=True)) for name, x in of.items()
                },
                "not_measured": missing,
            }


def _timed(
    each: list[dict[str, Callable[[], Tensor]]], turns: int, watch: Watch
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds a step of each case, over all its sets of rows in turn; and why a case of torch's could not run."""
    graphs, missing, often = {}, {}, {}
    for name in each[0]:
        try:
            graphs[name] = captured([one[name] for one in each])
        except RuntimeError as error:
            if name in ("certified", "plain"):
                raise
            missing[name] = str(error).splitlines()[0][:160]
            continue
        began = clock()
        graphs[name]()
        often[name] = max(1, math.ceil(BUSY_S / (clock() - began)))
    repeated = {name: _repeated(graph, often[name]) for name, graph in graphs.items()}
    watch.take_turns(repeated, 2)
    seconds = watch.take_turns(repeated, turns)
    return {name: [x / often[name] / len(each) for x in found] for name, found in seconds.items()}, missing


def _repeated(call: Callable[[], None], often: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(often):
            call()

    return run


def whole_steps(shape: Shape, watch: Watch, layers: int = 4) -> dict[str, Any]:
    """Seconds of whole decode steps through a session, of a few layers as wide as Llama 3.1 8B's with random weights.

    Every part of a step but attention is launched by the host, so that this says more of the host than of the kernel.
    """
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=shape.heads * shape.head_dim,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2 * shape.ctx_tokens,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=shape.dtype).eval()
    ids = torch.randint(config.vocab_size, (1, shape.ctx_tokens), generator=torch.Generator().manual_seed(0)).to("cuda")
    found = decode_steps(model, ids, 0.25, 20, watch)
    told = {name: found.summary[name] for name in ("kernel", "kernel_why")}
    return {"layers": layers, "seconds": medians(found.seconds), **told}


def headline(found: Mapping[str, Any]) -> bool:
    """Whether a measured case is the one that the entries of bench.json are of."""
    return all(found[name] == value for name, value in HEADLINE.items())
