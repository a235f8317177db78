"""make paper: figures, tables and numbers from stored rows, then paper/build/main.pdf. python -m scripts.paper"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from analysis.frame import write
from runs.errors import UserError
from runs.registry import ROOT
from scripts import figures
from scripts._cli import run

NEEDED = "latexmk, and pdflatex with booktabs, microtype and lmodern"
DEBIAN = "apt-get install latexmk texlive-latex-base texlive-latex-recommended lmodern"
ENDS = "latexmk says {} and the log names no error, as where the disk is full"
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
    """The PDF of a folder with main.tex and all that it names; LookupError says what is missing, or where LaTeX stopped.

    An older PDF is gone then. Raises UserError where the folder cannot be written.
    """
    made = paper / "build" / "main.pdf"
    try:
        made.unlink(missing_ok=True)  # it may be of other rows
        if not (shutil.which("latexmk") and shutil.which("pdflatex")):
            raise LookupError(f"needs {NEEDED} (Debian: {DEBIAN})")
        made.parent.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=made.parent) as fresh:  # what a killed run left, or another one writes, stops LaTeX
            return write(made, _typeset(paper, Path(fresh)).read_bytes())
    except OSError as error:
        raise UserError(f"cannot write {made}: {error.strerror or error}; expected room and write permission") from None


def _typeset(paper: Path, out: Path) -> Path:
    done = subprocess.run(
        ["latexmk", "-Werror", "-quiet", f"-outdir={out.relative_to(paper)}", "main.tex"],
        cwd=paper,
        env=os.environ | STILL,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        log = out / "main.log"
        text = log.read_text(errors="replace") if log.is_file() else done.stdout + done.stderr
        kept = write(out.parent / "main.log", text.encode())
        errors = re.findall(r"^(?:\S+:\d+: .*|!.*)$", text, re.MULTILINE)
        said = [*errors, *re.findall(r"^LaTeX Warning: .*$", text, re.MULTILINE), ENDS.format(done.returncode)]
        raise LookupError(f"LaTeX stopped: {said[0]}; all of it in {kept}")
    return out / "main.pdf"


if __name__ == "__main__":
    sys.exit(run(main))
