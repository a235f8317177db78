"""What every test shares: one thread, fixed seeds, executed shapes, and real data that CI may not silently lack."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from jaxtyping import install_import_hook

# Before anything imports cert: from here on a wrong shape or dtype in a call raises.
install_import_hook("cert", "beartype.beartype")

import torch  # noqa: E402  the hook comes first

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("PROFILE", "MODEL", "MODELS", "DATA", "STORE", "WORKERS", "CTX", "ARGS", "CELL", "LAUNCHER", "DRY_RUN")
SETTINGS += ("TORCH_INDEX", "PYTHON")
# A test sees neither what its caller typed nor the make above it, and loads nothing from a hub.
for _name in (*SETTINGS, "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):
    os.environ.pop(_name, None)
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is loaded

torch.set_num_threads(1)
torch.set_num_interop_threads(1)
hypothesis.settings.register_profile("kvcert", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("kvcert")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cluster's tests first: they wait more than they compute, and nothing shall wait for them alone in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Global generators start equal in every test, whichever ran before (our code takes its seeds as arguments)."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  the global one is what a library would draw from


@pytest.fixture
def need() -> Callable[[Path, str], Path]:
    """need(path, why) returns the path; where it is absent the test is skipped with `why`, or fails when CI=true."""

    def check(path: Path, why: str) -> Path:
        if not path.exists():
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{path} is absent: {why}")
        return path

    return check


@pytest.fixture
def shared_data(need: Callable[[Path, str], Path]) -> Callable[[str], Path]:
    """shared_data("longbench") is that folder of real data: ../shared/data beside the checkout, or KVCERT_TEST_DATA."""
    folder = Path(os.environ.get("KVCERT_TEST_DATA") or ROOT.parent / "shared" / "data")
    return lambda name: need(folder / name, "real data, never shipped; KVCERT_TEST_DATA names its folder")
