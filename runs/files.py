"""Names and durable writes in the store's folders: a file appears whole under its name, or not at all."""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runs.cells import ID_LENGTH
from runs.errors import UserError

NO_HARD_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NAME = re.compile(rf"(?P<unit>[0-9a-f]{{{ID_LENGTH}}})\.(?P<number>\d+)(\.(?P<k>\d+)\.jsonl|\.parquet)")


@dataclass(frozen=True, order=True)
class UnitFile:
    """A published unit, or the k-th journal, of attempt `number` at a unit."""

    unit: str
    number: int
    k: int
    path: Path


def unit_files(folder: Path, unit: str | None = None) -> list[UnitFile]:
    """Return the units or journals in a folder (of one id), by id, number and k; files of other names are none."""
    names = ((_NAME.fullmatch(path.name), path) for path in listing(folder))
    files = [UnitFile(name["unit"], int(name["number"]), int(name["k"] or 0), path) for name, path in names if name]
    return sorted(file for file in files if unit in (None, file.unit))


def listing(folder: Path) -> list[Path]:
    """Return the files of a folder by name, none where there is no folder; UserError where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}; expected a folder of a store (STORE=)") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError (full disk, read-only store, missing rights) into a UserError with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; expected a store (STORE=) with room and write permission;"
            " what it holds is whole, and running again does what is missing"
        ) from error


def fsync_folder(folder: Path) -> None:
    """Make names that were created in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def temporary(folder: Path, data: bytes) -> Iterator[Path]:
    """Write and fsync data under a name that no reader takes for its own; the file is gone at the end."""
    path = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        yield path
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def replace(path: Path, data: bytes) -> None:
    """Give a file new content in one step."""
    with temporary(path.parent, data) as fresh, writing(path):
        fresh.replace(path)
        fsync_folder(path.parent)


def publish(path: Path, data: bytes) -> Path:
    """Create a unit's file unless its name exists, and return it: the first complete attempt wins.

    Where the file system has no hard links it goes to the next free number instead, and readers drop the double.
    """
    with temporary(path.parent, data) as fresh, writing(path):
        try:
            os.link(fresh, path)
        except FileExistsError:
            return path
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            path = _next_free(path)
            fresh.rename(path)  # whoever takes the name between these lines is replaced by an equal unit
        fsync_folder(path.parent)
    return path


def _next_free(path: Path) -> Path:
    while path.exists():
        unit, number, suffix = path.name.split(".")
        path = path.with_name(f"{unit}.{int(number) + 1}.{suffix}")
    return path
