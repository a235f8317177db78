"""Timing: cases that take turns, the ratio of two with an interval from their turns, the slope of a line. No torch."""

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A ratio of two measurements, `of` over `over`, each in `unit`; None with the reason where it was not measured.

    low, high: 95 % interval of the median over the turns, or the least and largest of fewer than six.
    """

    name: str
    unit: str
    of: str
    over: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class Watch:
    """A clock in seconds, the unit they are said in, and who is told how far it is."""

    said: Callable[[str], None]
    clock: Callable[[], float] = time.process_time
    unit: str = "CPU seconds of one thread"  # what other processes take of the machine is not in it

    def take_turns(self, cases: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
        """Seconds of each case at each turn; within a turn one after another, in reverse at every second turn."""
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(turns):
            for name in list(cases)[:: 1 if turn % 2 == 0 else -1]:
                self.said(f"turn {turn + 1} of {turns}: {name}")
                began = self.clock()
                cases[name]()
                seconds[name].append(self.clock() - began)
        return seconds


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and its distribution-free 95 % interval: order statistics x_(k) and x_(n+1-k), k the largest number with
    P(Binomial(n, 1/2) < k) <= 0.025; the least and the largest value where n < 6.

    Raises ValueError without values. Source: David and Nagaraja, Order Statistics (2003), section 7.1.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0
    while n and (below := below + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    return median(ordered), ordered[max(k, 1) - 1], ordered[n - max(k, 1)]


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each case's turns."""
    return {name: median(values) for name, values in seconds.items()}


def ratios(of: Sequence[float], over: Sequence[float]) -> list[float]:
    """of / over, turn by turn: what slows the machine for a while slows both."""
    return [a / b for a, b in zip(of, over, strict=True)]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through the points."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / over


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on: device in words, processor, cores, the load when it began, versions."""
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.is_file()
        else []
    )
    return {
        "device": device,
        "processor": (names or [platform.processor() or platform.machine()])[0],
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "threads": 1,
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
