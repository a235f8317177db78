"""A site's settings: Slurm's way to write a limit, what cannot be meant is refused and named, the examples are whole."""

from dataclasses import fields, replace

import pytest
import yaml
from conftest import ROOT

from runs.build import build
from runs.config_launcher import LauncherConfig, limit_s
from runs.errors import UserError

SITE = LauncherConfig("site", time="01:00:00")
FILES = sorted((ROOT / "configs" / "launcher").glob("*.yaml"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),  # the table of sbatch(1): minutes first
        ("90:30", 5430),
        ("01:30:05", 5405),
        ("2-03", 183_600),
        ("2-03:04", 183_840),
        ("2-03:04:05", 183_845),
        ("0", 0),
        *((text, None) for text in ("infinite", "UNLIMITED", "", "-", "1-", "-5", "1:2:3:4", "4h", "1.5", "٣", "1-2:3:4:5")),
    ],
)  # fmt: skip
def test_limits_are_read_as_slurm_writes_them(text: str, seconds: int | None) -> None:
    assert limit_s(text) == seconds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("name", value) for value in ("", "moon base", "../site", "-x", "a\nb", "$(touch x)")),
        *((name, 0) for name in ("cpus", "tasks", "throttle", "warn_s")),
        *(("partition", value) for value in ("", " gpu", "gpu\n", "a\x00b")),
        ("memory", ""),
        *(("modules", (value,)) for value in ("", "cuda; touch x", "$(x)", "a b", "-f", "a//b", "/abs", "cuda/")),
        *(("container", (value,)) for value in ("", "a\nb")),
        *(("time", value) for value in ("soon", "", "4h")),
        ("warn_s", 3600),
    ],
)
def test_what_cannot_be_meant_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        replace(SITE, **{name: value})


def test_the_ends_of_the_range_are_taken() -> None:
    replace(SITE, warn_s=3599, cpus=1, tasks=1, throttle=1, modules=("cuda/12.4", "gcc", "a-b/c_d+e/1.0"))
    replace(SITE, container=("apptainer", "exec", "--nv", "an image; $(x).sif"), time="1", warn_s=59)
    replace(SITE, time=None, warn_s=10**6)


def test_a_limit_that_yaml_took_for_a_number_is_named() -> None:
    with pytest.raises(UserError, match=r"launcher\.time: 36000 where text was expected"):
        build(LauncherConfig, yaml.safe_load("name: x\ntime: 10:00:00"), "launcher")


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "local"], ids=lambda path: path.stem)
def test_a_site_file_is_named_after_its_site_and_has_every_key(path) -> None:
    site = build(LauncherConfig, yaml.safe_load(path.read_text()), path.stem)
    assert site.name == path.stem
    assert set(yaml.safe_load(path.read_text())) == {field.name for field in fields(LauncherConfig)}


def test_there_are_examples_of_a_gpu_cluster_and_of_one_cpu_node() -> None:
    sites = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
    assert {"h100", "h200", "cpu", "slurm"} <= set(sites)
    assert sites["h100"]["gres"] == "gpu:h100:1" and sites["h200"]["gres"] == "gpu:h200:1" and not sites["cpu"]["gres"]
    assert sites["local"] == {"name": "local"}
