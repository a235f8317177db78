"""The command line that computes, or computes again, the rows of a stored plan."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def typed(header: Mapping[str, Any]) -> str:
    """The settings a plan was made with, as the user would type them; those left at their default are not named."""
    profile = "" if header["profile"] == "laptop" else header["profile"]
    settings = {"PROFILE": profile} | {name.upper(): value for name, value in header["request"].items()}
    return " ".join(f"{name}={shlex.quote(str(value))}" for name, value in settings.items() if value not in (None, ""))


def command(claim: str, header: Mapping[str, Any], store: Path | None = None) -> str:
    """`make` for a claim with the settings of a plan, into a store where that is not the usual one."""
    where = f"STORE={shlex.quote(str(store))}" if store else ""
    return " ".join(part for part in ("make", claim, typed(header), where) if part)
