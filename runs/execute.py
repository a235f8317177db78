"""The missing units of a replay plan, run by worker processes: one torch thread each, one model in memory each."""

import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from cert.policy import Policy
from runs.capture import decode
from runs.cells import Plan
from runs.config import ROLES, PolicyConfig
from runs.data import Document
from runs.errors import UserError
from runs.grid import Part
from runs.models import load_model, shape, verify_converted
from runs.prepare import layers
from runs.provenance import collect
from runs.replay import replay_document
from runs.store import Store

Progress = tuple[str, bool, str | None]  # an example that is done, whether just now, and its failure


@dataclass(frozen=True)
class Job:
    """One unit for a worker: whether its failures are tried again, its part, and the documents of its examples."""

    unit: str
    retry: bool
    part: int
    documents: Mapping[str, Document]


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
    found: Sequence[Sequence[Document]],
    missing: Sequence[str],
    workers: int,
) -> Report:
    """Compute the missing units of a plan, with progress on stderr; failures become rows and do not stop the others.

    missing: units to do; of one that is stored with failed examples these alone are tried again. found: the documents
    of each part, as the plan was made from. Rows are bit-equal for any number of workers.
    Raises UserError where the store cannot be written or a model cannot be loaded.
    """
    jobs = _jobs(plan, parts, found, missing, store.failing(plan))
    for part in {job.part for job in jobs}:
        verify_converted(parts[part].source)  # converts once, before several workers would
    report, started = Report(), time.monotonic()
    total = sum(len(job.documents) for job in jobs)
    context = get_context("spawn")
    progress: SimpleQueue[Progress] = context.SimpleQueue()
    workers = max(1, min(workers, len(jobs)))
    initial = (store.root, plan.design, tuple(parts), progress, os.getpid())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=initial)
    quiet = not sys.stderr.isatty()
    try:
        with tqdm(total=total, unit="document", desc="replay", mininterval=10 if quiet else 0.5, smoothing=0.1) as bar:
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
    found: Sequence[Sequence[Document]],
    missing: Sequence[str],
    failing: Collection[str],
) -> list[Job]:
    """The units to do, those of one model together, so that a worker loads it once."""
    known = {(part.model, d.example): (i, d) for i, part in enumerate(parts) for d in found[i]}
    models = dict(zip(plan.cells["unit"].to_pylist(), plan.cells["model"].to_pylist(), strict=True))
    jobs = []
    for unit in missing:
        mine = {example: known[models[unit], example] for example in plan.units[unit]}
        (part,) = {i for i, _ in mine.values()}
        jobs.append(Job(unit, unit in failing, part, {example: document for example, (_, document) in mine.items()}))
    return sorted(jobs, key=lambda job: job.part)


def _drain(progress: "SimpleQueue[Progress]", bar: tqdm, report: Report) -> None:
    while not progress.empty():
        example, computed, message = progress.get()
        bar.update()
        report.done += computed
        if message:
            report.failures[example] = message


@dataclass
class _Worker:
    """A worker's state: set once by `_start`; the model changes only where the next unit needs another."""

    root: Path
    design: str
    parts: tuple[Part, ...]
    progress: "SimpleQueue[Progress]"
    model: PreTrainedModel | None = None
    part: int = -1


_worker: _Worker


def _start(root: Path, design: str, parts: tuple[Part, ...], progress: "SimpleQueue[Progress]", parent: int) -> None:
    global _worker  # noqa: PLW0603 - a process pool hands its tasks no other state
    torch.set_num_threads(1)  # part of provenance: more threads change the order of sums, and are slower here
    _worker = _Worker(root, design, parts, progress)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(job: Job) -> None:
    store, part = Store(_worker.root), _worker.parts[job.part]
    if _worker.model is None or _worker.part != job.part:
        _worker.model = None  # the old one goes before the new one comes
        _worker.model, _worker.part = load_model(part.source), job.part
    model, captured = _worker.model, layers(part, shape(part.source))
    device = str(model.device)
    attempt = store.attempt(job.unit, _worker.design, _provenance(part, device), job.retry)
    for example in attempt.finished:
        _worker.progress.put((example, False, None))
    for example in attempt.missing:
        began = time.monotonic()
        message = None
        try:
            attempt.record(
                example,
                _rows(model, part, captured, job.documents[example], attempt.planned(example)),
                time.monotonic() - began,
            )
        except UserError:
            raise  # the store or the model: nothing more can be done
        except Exception as error:  # noqa: BLE001 - recorded as a failed row, listed at the end, exit 1
            message = f"{type(error).__name__}: {error}"
            attempt.fail(example, message, time.monotonic() - began)
        _worker.progress.put((example, True, message))
    attempt.publish()


def _provenance(part: Part, device: str) -> dict[str, Any]:
    return collect(asdict(part.config), device, torch.get_num_threads())


def _rows(
    model: PreTrainedModel,
    part: Part,
    captured: tuple[int, ...],
    document: Document,
    planned: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The rows of one document: what the plan says of each cell, and what was measured there."""
    replay = part.config.replay
    certified, *_ = policies = [_policy(config) for config in part.config.policies]
    decoded = decode(model, document.ids, captured, replay.steps, certified.window)
    arms = dict(zip(ROLES, policies, strict=True))
    axes = ("layer", "budget", "head", "step")
    measured = {
        tuple(cell[axis] for axis in axes): cell for cell in replay_document(decoded, document.sha256, replay, arms)
    }
    fixed = {"design": _worker.design, "status": "ok", "message": None}
    return [{**cell, **measured[tuple(cell[axis] for axis in axes)], **fixed} for cell in planned]


def _policy(config: PolicyConfig) -> Policy:
    fields = {name: value for name, value in asdict(config).items() if name != "name"}
    return Policy(**fields, budget=1.0)  # each cell sets its own
