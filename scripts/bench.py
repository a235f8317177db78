"""make bench: what certificates, arms and the replay cost, as ratios of cases that take turns in one run.

    make bench                     everything; minutes, with progress; analysis/out/bench.json, .png and .pdf
    .venv/bin/python -m scripts.bench --only decode,replay        some of decode, arms, replay, growth, peers, kernel
    .venv/bin/python -m scripts.bench --quick                     a tiny random model, seconds; its figures mean nothing
    .venv/bin/python -m scripts.bench --publish                   docs/speed.md and its figure from the last run

MODEL= is what is served (SmolLM2-135M). One thread. A ratio that could not be measured is null and says why.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from analysis.bench import page, table
from analysis.figures_bench import draw
from analysis.frame import write
from analysis.judge import OUT
from runs.errors import UserError
from runs.registry import ROOT
from runs.timing import Watch, machine
from scripts._bench import NAMES, QUICK, RUN, Bench, Size, unmeasured
from scripts._cli import run, settings

DOCS, NAME = ROOT / "docs", "speed"


@dataclass
class Progress:
    """One line on stderr: seconds so far, what is measured, and about how long the rest takes.

    usual: seconds each section took in the published run; the sections that are done say how this machine compares.
    """

    chosen: Sequence[str]
    usual: Mapping[str, float]
    took: dict[str, float] = field(default_factory=dict)
    section: str = ""
    began: float = field(default_factory=time.monotonic)
    shown: float = 0.0

    def __call__(self, text: str) -> None:
        """Show a step of the section, a second after the last one at the earliest; ten where nobody is at a terminal."""
        now, here = time.monotonic(), sys.stderr.isatty()
        if now - self.shown > (1 if here else 10):
            self.shown = now
            line = f"{now - self.began:5.0f} s  {self.section}: {text}{self.left(now)}"
            print(f"\r\033[K{line}" if here else line, end="" if here else "\n", file=sys.stderr, flush=True)

    def left(self, now: float) -> str:
        """ "; about 80 s left", or nothing where the published run does not tell."""
        if any(name not in self.usual for name in self.chosen):
            return ""
        slower = sum(self.took.values()) / sum(self.usual[name] for name in self.took) if self.took else 1.0
        here = slower * self.usual[self.section] - (now - self.began - sum(self.took.values()))
        rest = self.chosen[self.chosen.index(self.section) + 1 :]
        return f"; about {max(here, 0) + slower * sum(self.usual[name] for name in rest):.0f} s left"

    def done(self, seconds: float) -> None:
        """The section has ended, after so many seconds."""
        self.took[self.section] = round(seconds, 1)


def measured(size: Size, chosen: Sequence[str], usual: Mapping[str, float]) -> dict[str, Any]:
    """The whole of bench.json, of the sections that were asked for."""
    import torch

    facts = machine(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    progress = Progress(chosen, usual)
    bench = Bench(size, Watch(progress))
    for section, measure in RUN.items():
        if section not in chosen:
            bench.entries += unmeasured(section, f"not asked for: --only {','.join(chosen)}")
            continue
        progress.section, began = section, time.monotonic()
        measure(bench)
        progress.done(time.monotonic() - began)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    order = [name for names in NAMES.values() for name in names]
    entries = sorted(bench.entries, key=lambda entry: order.index(entry.name))
    return {
        "machine": facts,
        "model": size.model,
        "wall_s": progress.took,
        "entries": [asdict(entry) for entry in entries],
        "beside": bench.beside,
    }


def publish(result: Mapping[str, Any]) -> None:
    """Write docs/speed.json, the page and the figure of a whole result.

    Raises UserError, with nothing written, for a result of some sections alone and for a damaged one.
    """
    if result["model"] == QUICK.model:
        raise UserError(
            "--publish: the last run was a quick one, whose figures mean nothing; expected one of make bench"
        )
    if absent := [name for name in RUN if name not in result["wall_s"]]:
        raise UserError(f"--publish: the last run left {absent[0]} out; expected one of make bench")
    try:
        text = page(result)
        draw(result, DOCS, NAME, ("png",))
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"--publish: no whole result ({error!r}); make bench writes it anew") from error
    write(DOCS / f"{NAME}.md", text.encode())
    write(DOCS / f"{NAME}.json", (json.dumps(result, indent=1) + "\n").encode())


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever the figures; 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__)
    parser.add_argument("--only", help="some of " + ",".join(RUN))
    parser.add_argument("--quick", action="store_true", help="a tiny random model, seconds; the figures mean nothing")
    parser.add_argument("--out", help="name of the files in analysis/out: bench, of a quick run bench-quick")
    parser.add_argument("--publish", action="store_true", help="make docs/speed.md of the last run, measure nothing")
    options = parser.parse_args(argv)
    folder = ROOT / OUT
    if options.out is None:
        options.out = "bench-quick" if options.quick else "bench"
    if not re.fullmatch(r"\w[\w.-]*", options.out):
        raise UserError(f"--out {options.out!r}: expected a name of letters, digits, '-', '_' and '.', no path")
    if options.publish:
        publish(_read(folder / f"{options.out}.json"))
        return 0
    chosen = options.only.split(",") if options.only else list(RUN)
    if unknown := [name for name in chosen if name not in RUN]:
        raise UserError(f"--only {unknown[0]}: expected some of {', '.join(RUN)}")
    size = QUICK if options.quick else Size(model=settings().model or Size.model)
    published = DOCS / f"{NAME}.json"
    usual = _read(published)["wall_s"] if published.is_file() and not options.quick else {}
    result = measured(size, [name for name in RUN if name in chosen], usual)
    if options.quick:
        print("a tiny random model: these figures mean nothing, met or not\n")
    print(table(result))  # first: minutes of work, whatever comes of the files
    write(folder / f"{options.out}.json", (json.dumps(result, indent=1) + "\n").encode())
    for path in draw(result, folder, options.out):
        print(path.relative_to(ROOT))
    return 0


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path.relative_to(ROOT)}: no such file; make bench writes it")
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.relative_to(ROOT)}: {error}; make bench writes it anew") from error
    wanted = ("machine", "model", "wall_s", "entries", "beside")
    if not isinstance(found, dict) or any(name not in found for name in wanted):
        raise UserError(f"{path.relative_to(ROOT)}: expected the keys {', '.join(wanted)}; make bench writes it anew")
    took = found["wall_s"]
    if not isinstance(took, dict) or not all(type(seconds) in (int, float) for seconds in took.values()):
        raise UserError(f"{path.relative_to(ROOT)}: wall_s: expected seconds by section; make bench writes it anew")
    return found


if __name__ == "__main__":
    sys.exit(run(main, "interrupted; nothing was written"))
