"""A copy of the project for the commands to run in, as a user types them: what they write is not the user's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

Done = subprocess.CompletedProcess[str]


def checkout(folder: Path) -> Path:
    """Copy into folder what the commands need."""
    ignored = shutil.ignore_patterns("store", "out", "published", "__pycache__")
    for name in ("cert", "runs", "analysis", "scripts", "prereg", "configs", "paper"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def command(folder: Path, module: str, *arguments: str, **variables: str) -> Done:
    """python -m scripts.<module> in a copy, with the user's variables; the smoke profile where none is named."""
    return subprocess.run(
        [sys.executable, "-m", f"scripts.{module}", *arguments],
        cwd=folder,
        env=os.environ | {"PROFILE": "smoke"} | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
