"""An interpreter that has loaded the libraries and forks for each command, whose start then costs its own modules alone.

One request a line of stdin, JSON: module, arguments, folder, environment, out, err (files). Answers the exit status.
"""

import gc
import importlib
import json
import os
import runpy
import sys

# transformers loads by itself only what is asked for
LIBRARIES = ("torch", "transformers.modeling_utils", "transformers.models.llama.modeling_llama",
             "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "safetensors.torch",
             "pandas", "pyarrow.parquet", "pyarrow.dataset", "scipy.stats", "scipy.optimize", "sklearn.metrics", "hydra",
             "matplotlib.figure", "nltk")  # fmt: skip


def become(request: dict) -> None:
    """Turn this process into `python -m module arguments`, as the interpreter would have it; returns when it ends."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.argv[1:] = request["arguments"]
    sys.path[0] = request["folder"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def serve() -> None:
    """Fork for each request, until stdin ends; a fork leaves by what its command raises, as any script does."""
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # a fork that collects garbage would copy all of it
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
    return None


if __name__ == "__main__":
    serve()
