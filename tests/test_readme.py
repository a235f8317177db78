"""README keeps its promises: its example runs, its commands and files exist."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_library_example_runs_as_printed() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(code, names)
    assert names["r"].shape == names["err"].shape == (8,)
    assert (names["err"] <= names["r"]).all() and (names["err"] > 0).all()


def test_every_command_it_names_is_a_target_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    helped = set(re.findall(r"^##   make ([\w-]+)", makefile, re.MULTILINE))
    for name in re.findall(r"make ([a-z]+(?:-[a-z]+)*(?:-\d)?)\b", README):
        general = re.sub(r"-\d$", "-N", name)
        assert general in helped, name


def test_every_folder_of_the_house_exists() -> None:
    house = README.split("## The house")[1]
    for name in re.findall(r"^    ([a-z]+)/", house, re.MULTILINE):
        assert (ROOT / name).is_dir(), name
