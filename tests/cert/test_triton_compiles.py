"""The Triton kernels compile to machine code of the GPUs they are for; no GPU is needed for that, nor is one used."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton", reason="Triton is for Linux; requirements.lock pins it there")

# What decode() launches is compiled as it is launched: its arguments are looked at in place of being run.
CODE = """
import re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from cert.kernels import triton_decode
from cert.kernels.packed import pack

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
dtype, d, group, packed, certificate, target = sys.argv[1:]
d, group, certificate = int(d), int(group), certificate == "True"


def typed(value):
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, num_stages=3, **sizes):
        names = self.kernel.arg_names
        values = dict(zip(names, arguments)) | sizes
        signature = {name: "constexpr" if name in sizes else typed(values[name]) for name in names}
        constants = {(names.index(name),): value for name, value in sizes.items()}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", int(target), 32), options={"num_stages": num_stages})
        products = len(re.findall("mma.sync|wgmma", made.asm["ptx"]))
        print(self.kernel.__name__, len(made.asm["cubin"]), products, made.metadata.shared)


for name in ("_share", "_together"):
    setattr(triton_decode, name, Compiled(getattr(triton_decode, name)))
q = torch.randn(1, 2 * group, d, dtype=getattr(torch, dtype))
k = torch.randn(1, 2, 40, d, dtype=q.dtype)
offset = torch.rand(1, 2, 40)
if packed == "True":
    triton_decode.decode(q, pack(k, k, offset), 0.1, None, certificate)
else:
    triton_decode.decode_padded(q, k, k, offset, 0.1, 30.0, certificate)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "d", "group", "packed", "certificate", "target"),
    [("bfloat16", 128, 4, True, True, 90), ("bfloat16", 128, 4, True, False, 90), ("float16", 256, 2, True, True, 80),
     ("float32", 64, 3, False, True, 90)],
    ids=["Llama 3.1 8B, certified", "Llama 3.1 8B", "wide heads, A100", "SmolLM2, padded and capped"],
)  # fmt: skip
def test_it_compiles(tmp_path, dtype, d, group, packed, certificate, target) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE, *map(str, (dtype, d, group, packed, certificate, target))]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}  # nothing is taken from an earlier compilation
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    share, together = (line.split() for line in done.stdout.splitlines())
    assert (share[0], together[0]) == ("_share", "_together") and min(int(share[1]), int(together[1])) > 1000
    assert (int(share[2]) > 0) == (dtype != "float32"), "half precision is for the tensor cores, float32 stays float32"
    assert int(share[3]) <= 99 * 1024, "more shared memory than the smallest of these GPUs gives a program"
