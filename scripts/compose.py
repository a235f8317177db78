"""configs/ and overrides to one checked RunConfig. The only module that knows Hydra, of which nothing else is used."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runs.build import build
from runs.config import ROLES, PolicyConfig, RunConfig
from runs.errors import UserError
from runs.registry import ROOT, YAML_ERRORS

CONFIGS = ROOT / "configs"


def compose(overrides: Sequence[str] = (), literal: Mapping[str, str] | None = None) -> RunConfig:
    """The configuration of one run from configs/run.yaml and Hydra overrides.

    literal: values by dotted key ("model.source") that are text whatever they hold; Hydra's grammar never sees them.
    Interpolations stay text too; one that leads nowhere is refused. Leaves no global state behind.
    Raises UserError, one line, for whatever Hydra or the dataclasses refuse: an unknown group option, an unknown key, a
    wrong type, a value out of range, an extra or a missing key.
    """
    for text in overrides:
        if text.lstrip("+~").startswith("hydra"):
            raise UserError(f"override {text!r}: Hydra only composes here; expected keys and groups of configs/")
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra_compose("run", list(overrides))
        data: Any = OmegaConf.to_container(composed, resolve=False)
        missing = OmegaConf.missing_keys(composed)  # looks where interpolations lead
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: Hydra's, for odd group choices
        raise UserError(_one_line(error, overrides)) from None
    except (*YAML_ERRORS, OSError) as error:
        raise UserError(f"a file of configs/: {' '.join(str(error).split())}; expected YAML that can be read") from None
    for key, value in (literal or {}).items():
        section, _, name = key.partition(".")
        if isinstance(data.get(section), dict):  # otherwise build names what is wrong
            data[section][name] = value
    for key in missing - set(literal or {}):
        raise UserError(f"config.{key}: no value; expected one (MODEL= gives model.source)")
    return build(RunConfig, _arms(data), "config")


def expand(sweep: str) -> list[list[str]]:
    """The override lists of configs/sweep/<sweep>.yaml: every combination of its keys' values, the last key fastest.

    Raises UserError for a sweep that is not there.
    """
    path = CONFIGS / "sweep" / f"{sweep}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise UserError(f"sweep {sweep!r} is not there; expected one of {known}; in configs/sweep")
    axes = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [[f"{key}={value}" for key, value in zip(axes, values, strict=True)] for values in product(*axes.values())]


def _arms(data: dict[str, Any]) -> dict[str, Any]:
    """The arms as RunConfig holds them, each named by its role where it does not fit."""
    arms, roles = data.get("policies"), (*ROLES, "full")
    if not isinstance(arms, dict) or set(arms) != set(roles):
        raise UserError(f"config.policies: expected {', '.join(roles)}, each once")
    built = {role: build(PolicyConfig, arms[role], f"config.policies.{role}") for role in roles}
    return {**data, "policies": [built[role] for role in ROLES], "full": built["full"]}


def _one_line(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's words without line breaks, links and advice that would be refused here."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = str(error.missing_cfg_file).partition("/")
        return f"{group}={option}: no such option; expected {_options(group, option)}; in configs/{group}"
    text = " ".join((str(error) or str(error.__cause__)).split())
    for advice in (" To append to your", " See https://", " Either remove", " 3. To sweep"):
        text = text.partition(advice)[0]
    text = text.rstrip(".")
    return f"overrides {' '.join(overrides)!r}: {text}; expected key=value for the keys and groups of configs/"


def _options(group: str, option: str) -> str:
    known = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    close = get_close_matches(option, known, n=1)
    return f"one of {', '.join(known)}" + (f" (did you mean {close[0]}?)" if close else "")
