"""What bench.json says, as text: a table for the terminal and the page docs/speed.md."""

from collections.abc import Mapping
from typing import Any

# What each ratio should be, and whether that is a least or a most; names as in DESIGN's bench.json.
TARGETS = {
    "decode_cert_over_plain": ("at most", 1.15),
    "decode_plain_over_full": ("at most", 1.0),
    "arms12_over_separate": ("at most", 0.25),
    "replay_over_loop": ("at least", 20.0),
    "arm_over_kvpress": ("at most", 1.1),
    "arms12_over_kvpress": ("at most", 0.3),
    "kernel_cert_over_plain": ("at most", 1.15),
}
Result = Mapping[str, Any]


def met(entry: Mapping[str, Any]) -> bool | None:
    """Whether a measured ratio is what it should be; None where nothing is asked of it, or nothing was measured."""
    if entry["ratio"] is None or entry["name"] not in TARGETS:
        return None
    way, bound = TARGETS[entry["name"]]
    return bool(entry["ratio"] <= bound if way == "at most" else entry["ratio"] >= bound)


def figures(entry: Mapping[str, Any]) -> str:
    """ "1.03 [1.02, 1.05]": the ratio and its interval; a dash where it was not measured."""
    if entry["ratio"] is None:
        return "-"
    return f"{entry['ratio']:.3g} [{entry['low']:.3g}, {entry['high']:.3g}]"


def goal(entry: Mapping[str, Any]) -> str:
    """ "at most 1.15: yes", or nothing."""
    if entry["name"] not in TARGETS:
        return ""
    way, bound = TARGETS[entry["name"]]
    said = {True: ": yes", False: ": NO", None: ""}[met(entry)]
    return f"{way} {bound:g}{said}"


def table(result: Result) -> str:
    """The entries, one a line, and what stands beside them."""
    lines = []
    for entry in result["entries"]:
        what = entry["why"] or f"{entry['of']} / {entry['over']}"
        lines.append(f"{entry['name']:24} {figures(entry):24} {goal(entry):18} {what}")
    return "\n".join([*lines, *(f"  {line}" for line in beside(result))])


def beside(result: Result) -> list[str]:
    """What else was measured, a sentence a line."""
    found, lines = result["beside"], []
    if "decode_s" in found:
        milli = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in found["decode_s"].items())
        lines.append(f"one decode step, ms: {milli}; kernel {found['kernel']['kernel']}")
    if "arms" in found:
        arms = found["arms"]
        lines.append(f"arms together give the text they give alone: {arms['equal_texts']} of {arms['texts']}")
    if "replay" in found:
        share = found["replay"]["share_of_model"]
        lines.append(f"the replay's arithmetic takes {share:.1%} of the model's own time")
    if "growth" in found:
        slopes = found["growth"]["step_ms_per_1000_tokens"]
        said = ", ".join(f"{name} {x:.2f}" for name, x in slopes.items())
        lines.append(f"a step grows by so many ms for each 1,000 tokens of context: {said}")
        lines.append(f"a step together grows by {found['growth']['together_ms_per_arm']:.1f} ms for each arm")
    for name, one in found.get("peers", {}).get("one", {}).items():
        score = found["peers"]["score"].get(name)
        said = f"{name}: peak memory {one['peak_bytes'] / 1e6:.0f} MB, cache {one['cache_bytes'] / 1e6:.1f} MB"
        lines.append(said + ("" if score is None else f", score {score:.2f}"))
    if (full := found.get("peers", {}).get("score", {}).get("full")) is not None:
        lines.append(f"with the full cache: score {full:.2f}")
    for case in found.get("kernel_cases", []):
        said = ", ".join(f"{name} {x['ratio']:.2f}" for name, x in case["certified_over"].items())
        lines.append(f"kernel, batch {case['batch']}, {case['budget']:.0%}: over {said}")
    return lines


def page(result: Result) -> str:
    """docs/speed.md."""
    machine, took = result["machine"], sum(result["wall_s"].values())
    rows = [
        f"| `{e['name']}` | {e['of'] or e['why']} | {e['over']} | {figures(e)} | {goal(e) or '-'} |"
        for e in result["entries"]
    ]
    measured_on = (
        f"{machine['processor']}, {machine['cores']} cores, one thread, device {machine['device']}, model "
        f"{result['model']}; {took / 60:.0f} minutes, with a load of {machine['load_average']:g} when it began."
    )
    return PAGE.format(
        machine=measured_on, rows="\n".join(rows), beside="\n".join(f"* {line}." for line in beside(result))
    )


PAGE = """## Speed

Written by `python -m scripts.bench --publish` from one run of `make bench`, docs/speed.json; no figure is typed.
{machine}

| entry | this | over this | ratio | should be |
|---|---|---|---|---|
{rows}

{beside}

![ratios and growth](speed.png)

### How to read it

Cases take turns within one run, in reverse order at every second turn, so that what slows the machine slows both. A ratio
is the median over the turns of this case over that one, and by this median a bound is met or not; beside it stands its
distribution-free 95 % interval, or the least and the largest of fewer than six turns. On a CPU the clock is the CPU time
of one thread, so that other processes cost little; they still share its caches and its memory. Compare ratios, not
seconds, between machines. A dash was not measured, and the entry says why.

A step is one forward of one token through the whole model. `cert` and `plain` serve the same retained rows, checked row by
row; without certificate nothing is computed for one. `full` is the model's own cache. Arms together are checked against
the same arms alone, text by text; a matrix product over twelve rows rounds otherwise than over one, so that a tie of two
tokens can fall otherwise. The grids of the study serve with the kernel `reference`, whose rows are published; `auto` takes
`moments` on a CPU, which keeps three numbers a row beside the keys and values (counted in `cache_bytes_fraction`).

Among the peers `certified` and `snapkv` are this project's presets, in one process; `kvpress` is that package's SnapKV, in
another. A score is the share of a few planted facts that are answered from a quarter of the cache, the same examples for
each: it shows that the work compared is of one kind. What eviction costs in answers is measured by claims 3 and 4.

### On a GPU

    make gpu-check      the compiled kernel against float64, in a CUDA graph, and in a session; exit 2 without a GPU
    make gpu-bench      the kernel at the shapes of Llama 3.1 8B, random numbers, no network: analysis/out/bench-gpu.json

`make gpu-bench` serves 16,384 tokens evicted to 10, 25 and 50 %, batch 1 and 8, bfloat16: certified against uncertified,
against torch's scaled_dot_product_attention on the same rows, and against the bytes that must be read over the bandwidth
that a copy reaches. Each case is one CUDA graph over more rows than the L2 cache holds. A session takes the Triton
kernel on its own only where a trial on that device, at its first use, gave the numbers of the reference;
`session.summary()["kernel_why"]` says so, or why not. The kernel was tested interpreted, on a CPU, and compiled for
sm_80 and sm_90; it has run on no GPU yet, and until a `bench-gpu.json` is shown nothing is claimed of its speed.
"""
