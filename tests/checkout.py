"""A copy of the project for the commands to run in, as a user types them: what they write is not the user's."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from conftest import ROOT

Done = subprocess.CompletedProcess[str]
PATIENCE_S = 600


def checkout(folder: Path) -> Path:
    """Copy into folder what the commands need."""
    ignored = shutil.ignore_patterns("store", "out", "published", "__pycache__")
    for name in ("cert", "runs", "analysis", "scripts", "prereg", "configs", "paper"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def command(folder: Path, module: str, *arguments: str, **variables: str) -> Done:
    """python -m scripts.<module> in a copy, with the user's variables; the smoke profile where none is named.

    A fork of an interpreter that has loaded the libraries (tests/warm.py): each starts seconds sooner.
    """
    with tempfile.TemporaryDirectory() as texts:
        out, err = Path(texts, "out"), Path(texts, "err")
        request = {
            "module": f"scripts.{module}",
            "arguments": arguments,
            "folder": str(folder),
            "environment": os.environ | {"PROFILE": "smoke"} | variables,
            "out": str(out),
            "err": str(err),
        }
        warm = _warm()
        assert warm.stdin and warm.stdout
        warm.stdin.write(json.dumps(request) + "\n")
        warm.stdin.flush()
        answer = warm.stdout.readline() if select.select([warm.stdout], [], [], PATIENCE_S)[0] else ""
        if not answer:  # or the interpreter itself has ended: the next command gets another one
            _warm.cache_clear()
            with warm:
                warm.kill()
            raise TimeoutError(f"scripts.{module} {' '.join(arguments)}: no end in {PATIENCE_S} s: {err.read_text()}")
        status = int(answer)
        return Done([f"scripts.{module}", *arguments], status, out.read_text(), err.read_text())


@cache
def _warm() -> "subprocess.Popen[str]":
    script = [sys.executable, str(Path(__file__).with_name("warm.py"))]
    return subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
