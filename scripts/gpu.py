"""make gpu-check, make gpu-bench: what needs a CUDA device, in one line where there is none.

.venv/bin/python -m scripts.gpu check         tests/gpu, and the tests of the kernels once more, compiled
.venv/bin/python -m scripts.gpu bench         the kernel at the shapes of Llama 3.1 8B: analysis/out/bench-gpu.json
"""

import argparse
import subprocess
import sys

from runs.errors import UserError
from runs.registry import ROOT
from scripts import bench
from scripts._cli import run

TESTS = ("tests/gpu", "tests/cert/test_triton_decode.py", "tests/cert/test_kernels.py")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 where a test failed; 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu", description=__doc__)
    parser.add_argument("what", choices=("check", "bench"))
    options = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"make gpu-{options.what}: torch {torch.__version__} sees no CUDA device; expected one, and a CUDA build of "
            "torch (make setup TORCH_INDEX=...); make test runs the kernel's tests interpreted, on the CPU"
        )
    if options.what == "bench":
        return bench.main(["--only", "kernel", "--out", "bench-gpu"])
    return min(
        1, subprocess.run([sys.executable, "-m", "pytest", "-q", "-rs", *TESTS], cwd=ROOT, check=False).returncode
    )


if __name__ == "__main__":
    sys.exit(run(main, "interrupted"))
