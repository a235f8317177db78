"""The other end of scripts.bench_peers: a process that answers requests, in JSON lines, as certified() serves them.

python -m scripts._peer MODEL
"""

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def clock() -> float:
    """CPU seconds of this process, or where torch has a CUDA device seconds by the wall, once its work is done."""
    import torch

    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes() -> int:
    """The most memory that this process has held so far.

    On Linux not getrusage's: its number outlives exec, and is at least that of the process which started this one.
    """
    status = Path("/proc/self/status")
    if status.is_file() and (held := re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)):
        return 1024 * int(held[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(answers: Mapping[str, Callable[[Mapping[str, Any]], Any]]) -> None:
    """Answer each line of stdin by the function it names: what was found, seconds, peak host memory so far in bytes."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        began = clock()
        found = answers[request["do"]](request)
        seconds = clock() - began
        print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes(), **found}), file=out, flush=True)


def main() -> None:
    """Serve one arm alone, or several on one prefill."""
    import torch

    from cert.policy import Policy
    from runs.models import load_model
    from runs.sources import resolve
    from runs.speed import alone, arms, held_bytes, together

    torch.set_num_threads(1)
    model = load_model(resolve(sys.argv[1]))

    def one(request: Mapping[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([request["ids"]], device=model.device)
        name, budget = request["policy"], request["budget"]
        policy = Policy.preset(name) if name == "full" else Policy.preset(name, budget=budget)
        answer, summary = alone(model, ids, policy, request["tokens"])
        return {"answer": answer, "cache_bytes": held_bytes(summary)}

    def several(request: Mapping[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([request["ids"]], device=model.device)
        return {"answers": together(model, ids, arms(request["arms"]), request["tokens"])}

    serve({"one": one, "several": several})


if __name__ == "__main__":
    main()
