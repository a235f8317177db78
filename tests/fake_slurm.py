"""Slurm's commands as stand-ins that answer what a test wrote down and record what they were asked; no cluster behind."""

import json
import sys
from pathlib import Path

TOOLS = ("sbatch", "scontrol", "sinfo", "squeue", "sacct", "scancel")
_SCRIPT = """#!{python} -IS
import json, os, sys
folder, tool = os.path.dirname(os.path.abspath(sys.argv[0])), os.path.basename(sys.argv[0])
with open(os.path.join(folder, "calls"), "a") as calls:
    calls.write(json.dumps([tool, *sys.argv[1:]]) + chr(10))
with open(os.path.join(folder, "answers")) as file:
    answers = json.load(file)
words = " ".join(sys.argv)
out, err, code = next(answer for tool_is, has, answer in answers if tool_is == tool and has in words)
if tool == "sbatch" and out == "JOB":
    with open(os.path.join(folder, "calls")) as calls:
        jobs = [json.loads(line) for line in calls]
    out = str(99 + sum(call[0] == "sbatch" and "--test-only" not in call for call in jobs)) + chr(10)
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
ANSWERS = [  # tool, words it is asked with, (stdout, stderr, exit code): the first that fits, a test's own before these
    [
        "sbatch",
        "--test-only",
        ["", "sbatch: Job 7 to start at 2026-11-30T00:24:21 using 1 processors on nodes n1\n", 0],
    ],
    ["sbatch", "", ["JOB", "", 0]],
    [
        "scontrol",
        "show config",
        ["Configuration data as of 2026\nMaxArraySize            = 1001\nMaxJobCount = 5\n", "", 0],
    ],
    ["scontrol", "requeue", ["", "", 0]],
    ["sinfo", "%T", ["up|idle\nup|mixed\nup|allocated+\nup|idle~\n", "", 0]],
    ["sinfo", "", ["main*|1:00:00\nurgent|infinite\n", "", 0]],
    ["squeue", "", ["", "", 0]],
    ["sacct", "", ["", "Slurm accounting storage is disabled\n", 1]],
    ["scancel", "", ["", "", 0]],
]


class FakeSlurm:
    """A folder for PATH; `answer` says what a command prints from now on, `calls` what was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._own = folder, []
        folder.mkdir()
        for tool in TOOLS:
            (folder / tool).write_text(_SCRIPT.format(python=sys.executable))
            (folder / tool).chmod(0o755)
        self._write()

    def answer(self, tool: str, words: str = "", out: str = "", err: str = "", code: int = 0) -> None:
        """From now on `tool`, asked with these words, answers so."""
        self._own.insert(0, [tool, words, [out, err, code]])
        self._write()

    def calls(self, tool: str, *without: str) -> list[list[str]]:
        """The arguments of each call of a tool, in order; those that have one of the words `without` left out."""
        path = self.folder / "calls"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [words for name, *words in lines if name == tool and not set(without) & set(words)]

    def _write(self) -> None:
        half = self.folder / "answers.new"  # a tool that runs meanwhile reads the old answers or the new
        half.write_text(json.dumps([*self._own, *ANSWERS]))
        half.replace(self.folder / "answers")
