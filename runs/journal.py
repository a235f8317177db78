"""Journals: what a process finished, line by line, until its unit can be published.

A line is the SHA-256 of the text behind it and that text, JSON. What a kill, a full disk or a bad sector left of a line
fails its checksum and is dropped: at most the example in flight is lost. Each process writes a file of its own.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from runs.errors import UserError
from runs.files import fsync_folder, writing


def create(folder: Path, unit: str, number: int) -> Path:
    """Create the next journal `<unit>.<number>.<k>.jsonl`; UserError where the store cannot be written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for k in count():
            path = folder / f"{unit}.{number}.{k}.jsonl"
            with suppress(FileExistsError):
                path.touch(exist_ok=False)
                break
        fsync_folder(folder)
    return path


def append(path: Path, payload: Mapping[str, Any]) -> None:
    """Append one line and fsync it; where that fails the file is cut back to what it was and a UserError says why."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    line = f"{hashlib.sha256(text.encode()).hexdigest()} {text}\n".encode()
    with writing(path):
        # O_CREAT: it is gone where another process has published the unit
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        before = os.fstat(handle).st_size
        try:
            while line:
                line = line[os.write(handle, line) :]
            os.fsync(handle)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(handle, before)
            raise
        finally:
            os.close(handle)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the payloads of the whole lines of a journal, whatever stands between them."""
    payloads = []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:  # its unit was published after the folder was listed
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; expected a journal of this store") from error
    for line in lines:
        digest, _, text = line.partition(b" ")
        if digest == hashlib.sha256(text).hexdigest().encode():
            payloads.append(json.loads(text))
    return payloads
