"""The Makefile: what a user types is never executed, unknown names are refused, setup resumes and names its fault."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SETTINGS

HOSTILE = (
    "$(shell touch pwned)",
    "${shell touch pwned}",
    "$(touch pwned)",
    "`touch pwned`",
    "a; touch pwned",
    "a && touch pwned #",
    "' ; touch pwned ; '",
    '" ; touch pwned ; "',
    "x\ntouch pwned\n",
    "$$(touch pwned)",
    "$(error no)",
    "$(eval SHELL := touch pwned)",
    "a$$b $HOME $(HOME) %",
    "back\\slash\\ \\n end\\",
    "spaces  in   it ",
    "naïve ×",
    "#hash",
)
REPORT = """#!{python}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}))
"""


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | (env or {})
    command = ["make", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The real Makefile over a .venv that is ready and whose python reports its arguments and environment."""
    for name in ("Makefile", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    write_script(tmp_path / ".venv/bin/python", REPORT.format(python=sys.executable))
    (tmp_path / ".venv/ready").touch()
    return tmp_path


def reports(done: subprocess.CompletedProcess[str]) -> list[dict]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def commands() -> list[str]:
    database = subprocess.run(["make", "-pqrR", "help"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", database, re.MULTILINE)
    return phony.split()


# ---------------------------------------------------------------- what a user types


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("way", ["command line", "environment"])
def test_settings_reach_python_as_typed_and_nothing_runs(checkout: Path, value: str, way: str) -> None:
    typed = dict.fromkeys(SETTINGS, value)
    if way == "command line":
        done = make(checkout, "claim-1", *(f"{name}={text}" for name, text in typed.items()))
    else:
        done = make(checkout, "claim-1", env=typed)
    (report,) = reports(done)
    assert {name: report["env"].get(name) for name in SETTINGS} == typed
    assert report["argv"] == ["-m", "scripts.claim", "claim-1"]
    assert not (checkout / "pwned").exists()
    assert not done.stderr


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_names_are_refused_without_running(checkout: Path, value: str) -> None:
    for arguments in ([f"claim-{value}"], [f"judge-{value}"], ["claim-1", f"MODLE={value}"]):
        assert make(checkout, *arguments).returncode == 2
        assert not (checkout / "pwned").exists()
    (checkout / ".venv/ready").unlink()  # now setup has to look at PYTHON
    assert make(checkout, "setup", f"PYTHON={value}").returncode == 2
    assert not (checkout / "pwned").exists()


def test_unset_settings_stay_unset(checkout: Path) -> None:
    (report,) = reports(make(checkout, "claim-1", "MODEL=x"))
    assert {name for name in SETTINGS if name in report["env"]} == {"MODEL"}


def test_every_worker_gets_one_thread_and_a_fixed_hash_seed(checkout: Path) -> None:
    (report,) = reports(make(checkout, "status"))
    wanted = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    assert wanted.items() <= report["env"].items()


def test_targets_run_one_after_another_whatever_j_says(checkout: Path) -> None:
    write_script(checkout / ".venv/bin/python", '#!/bin/sh\necho "start $3"; sleep 0.2; echo "end $3"\n')
    done = make(checkout, "-j4", "claim-1", "judge-1", "claim-2")
    steps = [line.split()[0] for line in done.stdout.splitlines()]
    assert steps == ["start", "end"] * 3


# ---------------------------------------------------------------- targets


def test_each_target_calls_its_script(checkout: Path) -> None:
    expected = {f"claim-{n}": ["scripts.claim", f"claim-{n}"] for n in range(1, 8)}
    expected |= {f"extension-{n}": ["scripts.claim", f"extension-{n}"] for n in range(1, 7)}
    expected |= {f"judge-{n}": ["scripts.judge", f"claim-{n}"] for n in range(1, 8)}
    expected |= {f"judge-claim-{n}": ["scripts.judge", f"claim-{n}"] for n in range(1, 8)}
    expected |= {f"judge-extension-{n}": ["scripts.judge", f"extension-{n}"] for n in range(1, 7)}
    plain = (
        "claims",
        "status",
        "plan",
        "explain",
        "gc",
        "readme",
        "verify",
        "freeze",
        "figures",
        "paper",
        "report",
        "demo",
        "bench",
    )
    expected |= {name: [f"scripts.{name}"] for name in plain}
    expected |= {f"gpu-{what}": ["scripts.gpu", what] for what in ("check", "bench")}
    expected |= {"judge-all": ["scripts.judge_all"]}
    expected |= {f"slurm-claim-{n}": ["scripts.slurm", f"claim-{n}"] for n in range(1, 8)}
    expected |= {f"slurm-extension-{n}": ["scripts.slurm", f"extension-{n}"] for n in range(1, 7)}
    expected |= {"slurm-all": ["scripts.slurm", "all"], "slurm-status": ["scripts.slurm_status"]}
    expected |= {
        "retry-failed": ["scripts.retry_failed"],
        "test": ["pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"],
    }
    got = {target: reports(make(checkout, target))[0]["argv"] for target in expected}
    assert got == {target: ["-m", *argv] for target, argv in expected.items()}
    assert set(commands()) == {*expected, "help", "setup", "check", "test-matrix"}


def test_the_matrix_makes_its_environment_once_and_runs_both_ends(checkout: Path) -> None:
    shutil.copy(ROOT / "requirements.oldest", checkout)
    python = checkout / ".venv/bin/python"
    packages = "lib/python3.11/site-packages"
    write_script(
        python,
        f"""#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p .venv-matrix/bin .venv-matrix/{packages}; cp "$0" .venv-matrix/bin/python ;;
  *) echo "$0 $*" ;;
esac
""",
    )
    done, again = make(checkout, "test-matrix"), make(checkout, "test-matrix")
    made, *runs = done.stdout.splitlines()
    assert made.startswith(".venv/bin/python -m pip --python .venv-matrix/bin/python install")
    assert made.endswith("--no-deps -r requirements.oldest")
    (line,) = (checkout / ".venv-matrix" / packages / "base.pth").read_text().splitlines()
    assert (checkout / ".venv-matrix" / packages / line).resolve() == checkout / ".venv" / packages
    tests = [f"{name}/bin/python -m pytest -q tests/cert/hf" for name in (".venv", ".venv-matrix") for _ in "12"]
    assert again.stdout.splitlines() == runs == tests  # each as make prints it, and as it is run


def test_each_script_of_a_target_exists() -> None:
    for target in commands():
        for script in re.findall(r"-m scripts\.(\w+)", make(ROOT, "-n", target).stdout):
            assert (ROOT / "scripts" / f"{script}.py").is_file(), f"make {target}: scripts/{script}.py is missing"


def test_help_is_the_default_and_lists_every_target() -> None:
    page = make(ROOT, "help").stdout
    assert make(ROOT).stdout == page
    listed = set(re.findall(r"^  make ([\w-]+)", page, re.MULTILINE))
    pattern = r"^(judge|slurm-claim)-(?:extension-|claim-)?\d$|^(claim|extension)-\d$"
    general = {re.sub(pattern, r"\1\2-N", name.replace("slurm-extension", "slurm-claim")) for name in commands()}
    assert listed == general
    for name in SETTINGS:
        assert f"{name}=" in page


@pytest.mark.parametrize(
    "target",
    [
        "claim-0",
        "claim-8",
        "claim-9",
        "claim-10",
        "claim-",
        "extension-7",
        "judge-9",
        "judge-extension-9",
        "slurm-claim-8",
    ],
)
def test_unknown_claims_are_refused_in_one_line_before_anything_runs(checkout: Path, target: str) -> None:
    done = make(checkout, "claim-1", target)
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert f"{target}: no such claim; there are claim-1 to claim-7 and extension-1 to extension-6" in line


def test_a_misspelt_setting_is_refused_in_one_line(checkout: Path) -> None:
    done = make(checkout, "claim-1", "PROFIL=smoke")
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert "PROFIL: no such setting" in line and "PROFILE" in line


def test_a_failing_script_fails_make_with_2(checkout: Path) -> None:
    write_script(checkout / ".venv/bin/python", "#!/bin/sh\necho 'error: MODEL nowhere' >&2; exit 1\n")
    done = make(checkout, "claim-1")
    assert done.returncode == 2
    assert "error: MODEL nowhere" in done.stderr


# ---------------------------------------------------------------- setup

# Stands for a Python 3.11: `-m venv` makes a .venv with itself inside; pip calls are recorded, and fail while
# `broken` exists.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *sys.version_info*) echo {version} ;;
  *"import ensurepip"*) {ensurepip} ;;
  *"import pip"*) test -e .venv/pip ;;
  *"--without-pip .venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/pip ;;
  *"-m pip --python"*) {basepip} ;;
  *"-m pip"*) echo "$*" >> pip-calls; if test -e broken; then echo "no route to the index"; exit 1; fi ;;
esac
"""


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    for name in ("Makefile", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def fake_python(folder: Path, version: str = "3.11", ensurepip: str = "true", basepip: str = "touch .venv/pip") -> str:
    return str(
        write_script(folder / "my python", FAKE_PYTHON.format(version=version, ensurepip=ensurepip, basepip=basepip))
    )


def pip_calls(folder: Path) -> list[str]:
    return (folder / "pip-calls").read_text().splitlines()


def locked_torch() -> str:
    (pin,) = re.findall(r"^torch==.*$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    return pin


def test_setup_installs_torch_then_the_lock_once(fresh: Path) -> None:
    python = fake_python(fresh)
    done = make(fresh, "-j2", "setup", "status", "claims", f"PYTHON={python}", "TORCH_INDEX=https://example.org/a b")
    assert done.returncode == 0, done.stderr
    assert pip_calls(fresh) == [
        f"-m pip install --progress-bar off --index-url https://example.org/a b {locked_torch()}",
        "-m pip install --progress-bar off --no-deps -r requirements.lock",
    ]
    assert (fresh / ".venv/ready").exists()
    assert len(done.stdout.splitlines()) == 4  # three steps and the last word
    again = make(fresh, "setup", f"PYTHON={python}")
    assert again.stdout.splitlines() == ["setup: .venv is ready"]
    assert len(pip_calls(fresh)) == 2


def test_interrupted_setup_says_why_and_goes_on(fresh: Path) -> None:
    python = fake_python(fresh)
    (fresh / "broken").touch()
    done = make(fresh, "claim-1", f"PYTHON={python}")
    assert done.returncode == 2
    assert "no route to the index" in done.stderr and ".venv/setup.log" in done.stderr
    assert not (fresh / ".venv/ready").exists()
    (fresh / "broken").unlink()
    done = make(fresh, "setup", f"PYTHON={python}")
    assert done.returncode == 0
    assert "setup 1/3" not in done.stdout  # the environment is there, the packages were not
    assert (fresh / ".venv/ready").exists()


def test_a_new_lock_means_a_new_setup(checkout: Path) -> None:
    python = fake_python(checkout)
    os.utime(checkout / ".venv/ready", (1, 1))
    assert make(checkout, "setup", f"PYTHON={python}").returncode == 0
    assert len(pip_calls(checkout)) == 2


@pytest.mark.parametrize("version", ["3.10", "3.12", "2.7"])
def test_another_python_is_refused(fresh: Path, version: str) -> None:
    done = make(fresh, "setup", f"PYTHON={fake_python(fresh, version)}")
    assert done.returncode == 2
    assert f"not a Python 3.11 (its version: {version})" in done.stderr.splitlines()[0]
    assert not (fresh / ".venv").exists()


def test_no_python_at_all_is_said(fresh: Path) -> None:
    tools = fresh / "bin"
    tools.mkdir()
    for name in ("make", "sh", "sed", "grep", "touch", "tail"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = make(fresh, "setup", env={"PATH": str(tools)})
    assert done.returncode == 2
    assert "no Python 3.11 found" in done.stderr.splitlines()[0]


def test_without_ensurepip_the_pip_that_is_there_serves(fresh: Path) -> None:
    assert make(fresh, "setup", f"PYTHON={fake_python(fresh, ensurepip='false')}").returncode == 0
    assert len(pip_calls(fresh)) == 2


def test_without_ensurepip_and_pip_the_missing_package_is_named(fresh: Path) -> None:
    done = make(fresh, "setup", f"PYTHON={fake_python(fresh, ensurepip='false', basepip='exit 1')}")
    assert done.returncode == 2
    assert "apt-get install python3.11-venv" in done.stderr.splitlines()[0]
    assert not (fresh / ".venv/ready").exists()
