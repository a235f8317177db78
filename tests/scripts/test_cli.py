"""What every command does where the terminal is the trouble: an interrupt while it imports, letters that cannot be shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import command

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command, environment = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_an_interrupt_while_importing_is_one_line_and_all_else_is_a_traceback() -> None:
    done = python("import scripts; raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (-2, "interrupted\n")  # as a shell expects of a program that it interrupts
    assert "Traceback" in python("import scripts; raise ValueError").stderr


def test_letters_that_the_locale_lacks_are_shown_as_codes() -> None:
    done = python("from scripts import _cli; _cli.run(lambda: print('Zoë \\ufffd') or 0)", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Zo\\xeb \\ufffd\n", "")


def test_a_command_that_stores_nothing_does_not_say_so_when_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    from scripts import _cli

    def stopped() -> int:
        raise KeyboardInterrupt

    assert _cli.run(stopped, "interrupted") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_test_that_ends_the_interpreter_of_the_commands_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "ends.py").write_text("import os\nos.kill(os.getppid(), 9)\n")
    (tmp_path / "scripts" / "says.py").write_text("print('here')\n")
    with pytest.raises(TimeoutError, match=r"scripts\.ends"):
        command(tmp_path, "ends")
    assert command(tmp_path, "says").stdout == "here\n"
