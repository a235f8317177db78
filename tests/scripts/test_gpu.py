"""make gpu-check and make gpu-bench without a GPU: one clear line, exit 2, and nothing is run."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from scripts import gpu


@pytest.mark.parametrize("what", ["check", "bench"])
def test_without_a_gpu_they_say_so_in_one_line(what: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(gpu.UserError, match=f"make gpu-{what}: torch .* sees no CUDA device; expected one"):
        gpu.main([what])


def test_the_command_ends_with_2() -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu", "check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: make gpu-check: torch ") and "make test" in line


@pytest.mark.parametrize(("code", "wanted"), [(0, 0), (1, 1), (5, 1)])
def test_with_one_the_tests_run_and_their_failure_is_1(code: int, wanted: int, monkeypatch) -> None:
    ran = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        gpu.subprocess, "run", lambda *x, **_: ran.append(x[0]) or subprocess.CompletedProcess(x[0], code)
    )
    assert gpu.main(["check"]) == wanted
    assert ran[0][1:4] == ["-m", "pytest", "-q"] and all((ROOT / path).exists() for path in gpu.TESTS)
    asked = []
    monkeypatch.setattr(gpu.bench, "main", lambda argv: asked.append(argv) or 0)
    assert gpu.main(["bench"]) == 0 and asked == [["--only", "kernel", "--out", "bench-gpu"]]
