"""make paper: figures, tables and numbers from stored rows, then paper/build/main.pdf. python -m scripts.paper"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from runs.registry import ROOT
from scripts import figures
from scripts._cli import run

NEEDED = "latexmk, and pdflatex with booktabs, microtype and lmodern"
DEBIAN = "apt-get install latexmk texlive-latex-base texlive-latex-recommended lmodern"
STILL = {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1"}  # no clock in the file: equal rows give equal bytes


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where LaTeX is missing or stops, after everything else was made; 2 as make figures."""
    code = figures.main(argv)
    try:
        made = build(ROOT / "paper")
    except LookupError as error:
        print(f"no PDF: {error}; figures, tables and numbers are in paper/", file=sys.stderr)
        return 1
    print(f"{made.relative_to(ROOT)}: {made.stat().st_size / 1024:.0f} KiB")
    return code


def build(paper: Path) -> Path:
    """The PDF of a folder with main.tex and all that it names; LookupError says what is missing, or where LaTeX stopped."""
    if not (shutil.which("latexmk") and shutil.which("pdflatex")):
        raise LookupError(f"needs {NEEDED} (Debian: {DEBIAN})")
    done = subprocess.run(
        ["latexmk", "-Werror", "-quiet", "main.tex"],
        cwd=paper,
        env=os.environ | STILL,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        log = paper / "build" / "main.log"
        text = log.read_text(errors="replace") if log.is_file() else done.stdout + done.stderr
        errors = re.findall(r"^(?:\S+:\d+: .*|!.*)$", text, re.MULTILINE)
        said = [*errors, *re.findall(r"^LaTeX Warning: .*$", text, re.MULTILINE), f"latexmk says {done.returncode}"]
        raise LookupError(f"LaTeX stopped: {said[0]}; all of it in {log}")
    return paper / "build" / "main.pdf"


if __name__ == "__main__":
    sys.exit(run(main))
