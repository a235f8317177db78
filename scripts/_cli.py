"""What every command shares: settings from the environment, one line for a user's mistake, exit codes."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cert.errors import CertError
from runs.errors import UserError
from runs.registry import ROOT
from runs.sources import user_path

PROFILES = ("smoke", "laptop", "desktop", "paper")


@dataclass(frozen=True)
class Settings:
    """The user's variables, as typed; an empty one is unset."""

    profile: str
    model: str | None
    data: str | None
    store: Path
    workers: int
    ctx: int | None
    args: tuple[str, ...]
    models: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()  # overrides of the group launcher: they change no number, so no plan either

    def require_store(self) -> None:
        """Raises UserError where a STORE that the user typed is not there: nothing would be found in it."""
        if _variable("STORE") and not self.store.is_dir():
            raise UserError(f"STORE={self.store}: no such folder; expected one that an earlier run has filled")

    @property
    def request(self) -> dict[str, str | int | None]:
        """What makes this population another than the registered one; it names the plan."""
        named = {"model": self.model, "data": self.data, "ctx": self.ctx, "args": shlex.join(self.args) or None}
        return named | ({"models": shlex.join(self.models)} if self.models else {})

    def of(self, profile: str, request: Mapping[str, Any]) -> "Settings":
        """These settings with the profile and the request of a stored plan."""
        return replace(
            self,
            profile=profile,
            **{key: request[key] for key in ("model", "data", "ctx")},
            args=tuple(shlex.split(request["args"] or "")),
            models=tuple(shlex.split(request.get("models") or "")),
        )


def settings() -> Settings:
    """Settings from PROFILE, MODEL, MODELS, DATA, STORE, WORKERS, CTX, ARGS, LAUNCHER; UserError for what does not fit."""
    profile = _variable("PROFILE") or "laptop"
    if profile not in PROFILES:
        raise UserError(f"PROFILE={profile}: expected one of {', '.join(PROFILES)}")
    if _variable("MODEL") and _variable("MODELS"):
        raise UserError("MODEL= and MODELS=: expected one of them")
    words = _words("ARGS", "overrides such as replay.documents=4")
    launcher = [word for word in words if re.match(r"launcher[.=]", word)]
    if not any(word.startswith("launcher=") for word in launcher):
        launcher.insert(0, f"launcher={_variable('LAUNCHER') or 'slurm'}")
    elif _variable("LAUNCHER"):
        raise UserError("LAUNCHER= and launcher= in ARGS=: expected one of them")
    return Settings(
        profile=profile,
        model=_variable("MODEL"),
        data=_variable("DATA"),
        store=user_path(_variable("STORE") or str(ROOT / "runs" / "store"), "STORE"),
        workers=_whole("WORKERS") or os.cpu_count() or 1,
        ctx=_whole("CTX"),
        args=tuple(word for word in words if word not in launcher),
        models=_words("MODELS", "models separated by spaces, a path with spaces in quotes"),
        launcher=tuple(launcher),
    )


def dry_run() -> bool:
    """Whether DRY_RUN=1 is set. Raises UserError for another value."""
    text = _variable("DRY_RUN")
    if text not in (None, "0", "1"):
        raise UserError(f"DRY_RUN={text}: expected 1, or nothing")
    return text == "1"


STORED = "interrupted; what was finished is stored, the same command goes on from there"


def run(main: Callable[[], int], interrupted: str = STORED) -> int:
    """The exit code of main; a user's mistake is one line on stderr and code 2, an interrupt 130 and a line of its own."""
    if isinstance(sys.stdout, TextIOWrapper):  # where the locale lacks a letter, its code is shown
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return main()
    except (UserError, CertError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _variable(name: str) -> str | None:
    text = os.environ.get(name, "").strip()
    try:
        text.encode()
    except UnicodeEncodeError:  # parquet takes no such path, and a plan no such text
        raise UserError(f"{name}={text!r:.200}: expected text in UTF-8") from None
    return text or None


def _words(name: str, expected: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(_variable(name) or ""))
    except ValueError as error:
        raise UserError(f"{name}={_variable(name)}: {error}; expected {expected}") from None


def _whole(name: str) -> int | None:
    text = _variable(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise UserError(f"{name}={text[:40]}: expected a whole number of at least 1")
    return int(text)
