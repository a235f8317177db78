"""The missing units of a plan, run by worker processes: one torch thread each, one model in memory each."""

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from runs.cells import Plan
from runs.grid import Part
from runs.kinds import Rows, Serving, kind_named
from runs.models import load_model, verify_converted
from runs.prepare import texts
from runs.provenance import collect
from runs.store import Store

Progress = tuple[str, bool, str | None]  # an example that is done, whether just now, and its failure


@dataclass(frozen=True)
class Job:
    """One unit for a worker: whether its failures are tried again, its part, and the texts of its examples."""

    unit: str
    retry: bool
    part: int
    texts: Mapping[str, Any]


@dataclass
class Report:
    """What a run did: examples computed now, failures by example, seconds, whether a worker died."""

    done: int = 0
    wall_s: float = 0.0
    died: bool = False
    failures: dict[str, str] = field(default_factory=dict)


def run(
    store: Store,
    plan: Plan,
    parts: Sequence[Part],
    found: Sequence[Sequence[Any]],
    missing: Sequence[str],
    workers: int,
) -> Report:
    """Compute the missing units of a plan, with progress on stderr; failures become rows and do not stop the others.

    missing: units to do; of one that is stored with failed examples these alone are tried again. found: the texts of
    each part, as the plan was made from. Rows are bit-equal for any number of workers.
    Raises UserError where the store cannot be written or a model cannot be loaded.
    """
    jobs = _jobs(plan, parts, found, missing, store.failing(plan))
    for part in {job.part for job in jobs}:
        verify_converted(parts[part].source)  # converts once, before several workers would
    report, started = Report(), time.monotonic()
    total, kind = sum(len(job.texts) for job in jobs), plan.header["kind"]
    context = get_context("spawn")
    progress: SimpleQueue[Progress] = context.SimpleQueue()
    workers = max(1, min(workers, len(jobs)))
    initial = (store.root, plan.design, tuple(parts), progress, os.getpid())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=initial)
    quiet = not sys.stderr.isatty()
    try:
        how = {"unit": kind_named(kind).noun, "desc": kind, "mininterval": 10 if quiet else 0.5, "smoothing": 0.1}
        with tqdm(total=total, **how) as bar:
            pending = {pool.submit(_work, job) for job in jobs}
            while pending:
                finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                _drain(progress, bar, report)
                for future in finished:
                    future.result()
    except BrokenProcessPool:
        report.died = True
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    report.wall_s = time.monotonic() - started
    return report


def _jobs(
    plan: Plan,
    parts: Sequence[Part],
    found: Sequence[Sequence[Any]],
    missing: Sequence[str],
    failing: Collection[str],
) -> list[Job]:
    """The units to do, those of one model together, so that a worker loads it once."""
    name = kind_named(plan.header["kind"]).name
    known = {(part.model, name(text)): (i, text) for i, part in enumerate(parts) for text in found[i]}
    models = dict(zip(plan.cells["unit"].to_pylist(), plan.cells["model"].to_pylist(), strict=True))
    jobs = []
    for unit in missing:
        mine = {example: known[models[unit], example] for example in plan.units[unit]}
        (part,) = {i for i, _ in mine.values()}
        jobs.append(Job(unit, unit in failing, part, {example: text for example, (_, text) in mine.items()}))
    return sorted(jobs, key=lambda job: job.part)


def _drain(progress: "SimpleQueue[Progress]", bar: tqdm, report: Report) -> None:
    while not progress.empty():
        example, computed, message = progress.get()
        bar.update()
        report.done += computed
        if message:
            report.failures[example] = message


@dataclass
class Worker:
    """A process that computes units one after the other; its model changes only where the next unit needs another.

    said: told of each example that is done; stopped: asked before each, for a process that its engine may end.
    """

    root: Path
    design: str
    parts: Sequence[Part]
    said: Callable[[Progress], None]
    stopped: Callable[[], bool] = lambda: False
    part: int = -1
    serving: Serving | None = None
    device: str = ""

    def work(self, job: Job) -> None:
        """Compute what a unit lacks and publish it; stopped, what is finished is in its journal."""
        store, part = Store(self.root), self.parts[job.part]
        serving = self._serving(job.part)
        provenance = collect(part.settings, self.device, torch.get_num_threads())
        attempt = store.attempt(job.unit, self.design, provenance, job.retry)
        for example in attempt.finished:
            self.said((example, False, None))
        for example in attempt.missing:
            if self.stopped():
                return
            began = time.monotonic()
            rows, message = computed(serving, job.texts[example], attempt.planned(example))
            if message is None:
                attempt.record(example, rows, time.monotonic() - began)
            else:
                attempt.fail(example, message, time.monotonic() - began)
            self.said((example, True, message))
        attempt.publish()

    def _serving(self, index: int) -> Serving:
        """What gives the rows of a part's texts; its model is loaded where the last unit was another part's."""
        if self.serving is None or self.part != index:
            self.serving = None  # the old model goes before the new one comes
            part = self.parts[index]
            kind = kind_named(part.kind)
            model = load_model(part.source, getattr(torch, kind.dtype(part)))
            self.serving, self.part, self.device = kind.serving(part, model), index, str(model.device)
        return self.serving


_worker: Worker


def _start(root: Path, design: str, parts: tuple[Part, ...], progress: "SimpleQueue[Progress]", parent: int) -> None:
    global _worker  # noqa: PLW0603 - a process pool hands its tasks no other state
    torch.set_num_threads(1)  # part of provenance: more threads change the order of sums, and are slower here
    _worker = Worker(root, design, parts, progress.put)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(job: Job) -> None:
    _worker.work(job)


def serve(
    store: Store,
    plan: Plan,
    parts: Sequence[Part],
    units: Mapping[str, bool],
    said: Callable[[Progress], None],
    stopped: Callable[[], bool],
) -> None:
    """Compute units of a plan in this process and one torch thread, for an engine that runs many of us.

    units: whether the failed examples of each are tried again; said and stopped: as a Worker has them.
    Raises UserError where the store cannot be written or a model cannot be loaded.
    """
    torch.set_num_threads(1)
    jobs = _jobs(plan, parts, texts(parts, plan, units), list(units), [unit for unit, retry in units.items() if retry])
    for part in {job.part for job in jobs}:
        verify_converted(parts[part].source)
    worker = Worker(store.root, plan.design, parts, said, stopped)
    for job in jobs:
        if not stopped():
            worker.work(job)


def computed(serving: Serving, text: Any, planned: Sequence[Mapping[str, Any]]) -> tuple[Rows, str | None]:
    """The rows of a text, or what went wrong: a failed row each, listed at the end, exit 1."""
    try:
        return [{**row, "status": "ok", "message": None} for row in serving(text, planned)], None
    except Exception as error:  # noqa: BLE001 - recorded, and the others go on
        return [], f"{type(error).__name__}: {error}"
