"""One run and the sweeps: every sweep composes, one example of each of its runs is computed in the smoke profile."""

import json

import pytest

from runs.errors import UserError
from runs.registry import load
from scripts import run
from scripts.compose import CONFIGS, expand

SWEEPS = sorted(path.stem for path in (CONFIGS / "sweep").glob("*.yaml"))
DEVELOPMENT = [
    "replay.seed=1000",
    "tasks.seed=1000",
    "tasks.text_seed=1000",
    "synthetic.seed=1000",
    "synthetic.text_seed=1000",
]


@pytest.mark.parametrize("sweep", SWEEPS)
def test_each_run_of_each_sweep_computes_one_example_in_the_smoke_profile(sweep: str) -> None:
    seen = set()
    for line in expand(sweep):
        small = [text for text in line if not text.startswith(("profile=", "model="))]
        if tuple(small) in seen:  # of another model alone
            continue
        seen.add(tuple(small))
        rows, failed = run.example([*small, "profile=smoke", *DEVELOPMENT])
        assert rows and failed is None and len({row["example"] for row in rows}) == 1
        assert {row["status"] for row in rows} == {"ok"}
        json.dumps(rows, allow_nan=False)


def test_sweeps_name_registered_grids_and_models() -> None:
    grids = load().grids
    for sweep in SWEEPS:
        lines = [dict(text.split("=") for text in line) for line in expand(sweep)]
        for profile, grid in {(line["profile"], line.get("grid", "replay")) for line in lines}:
            mine = [line["model"] for line in lines if line.get("grid", "replay") == grid and "model" in line]
            assert mine in ([], list(grids[grid].profiles[profile].models))
        command = (CONFIGS / "sweep" / f"{sweep}.yaml").read_text().splitlines()[0]
        assert f"python -m scripts.run --sweep {sweep}" in command


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "three.yaml").write_text("grid: [tasks]\nprofile: [smoke]\ntasks.seed: [-1, 1000, -2]\n")
    monkeypatch.setattr("scripts.compose.CONFIGS", tmp_path)
    done = []
    monkeypatch.setattr(run, "_computed", lambda _, line: done.append(line) or _fail(line))
    assert run.main(["--sweep", "three", "tasks.documents=1"]) == 1
    assert [line[-2:] for line in done] == [[f"tasks.seed={seed}", "tasks.documents=1"] for seed in (-1, 1000, -2)]
    said = capsys.readouterr().err
    assert said.count("failed: grid=tasks") == 2 and "run 3 of 3" in said


def _fail(line: list[str]) -> int:
    if "tasks.seed=1000" in line:
        return 0
    raise UserError("tasks.seed: below 0")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["grid=poems"], "grid=poems: expected one of replay, architectures, tasks, synthetic"),
        (["profile=huge"], "profile=huge: expected one of"),
        (["profile=smoke", "grid=tasks", "tasks.documents=0"], "at least 1"),
        (["profile=smoke", "grid=tasks", "tasks.tasks=[poems]"], "expected one of planted_facts"),
    ],
)
def test_a_run_that_cannot_be_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match="(?s)" + says.replace("[", r"\[")):
        run.example(overrides)


def test_an_example_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="the run has 2; expected 0 to 1"):
        run.main(["profile=smoke", "grid=tasks", "--example", "2", *DEVELOPMENT])


def test_a_failed_example_is_one_line_and_exit_1(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "example", lambda *_: ([], "IndexError: planted"))
    assert run.main(["profile=smoke"]) == 1
    out, said = capsys.readouterr()
    assert out == "" and said == "failed: IndexError: planted\n"


def test_answers_are_summed_up_one_a_line_and_in_json_with_every_column(monkeypatch, capsys) -> None:
    answer = {
        "example": "e",
        "model": "m",
        "request": 0,
        "kind": "lookup",
        "arm": "full",
        "official": 1.0,
        "wall_s": 2.0,
    }
    rows = [
        answer | {"certificate": None, "prediction": "a\nb" + "c" * 60},
        answer | {"arm": "topk", "certificate": 0.12345},
    ]
    rows[1]["prediction"] = "no"
    monkeypatch.setattr(run, "example", lambda *_: (rows, None))
    assert run.main(["--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert run.main([]) == 0
    first, head, full, topk, last = capsys.readouterr().out.splitlines()
    assert first == "example e, m" and last == "2 rows, not stored; --json: all columns"
    assert head.split() == ["request", "kind", "arm", "official", "certificate", "prediction"]
    assert full.split() == ["0", "lookup", "full", "1", "-", "a\\nb" + "c" * 36] and "0.123" in topk


def test_the_cells_of_a_replay_are_summed_up_by_layer_and_budget() -> None:
    cell = {"example": "e", "model": "m", "layer": 0, "budget": 0.5}
    values = [
        (1.0, 2.0),
        (3.0, 2.0),
        (2.0, 2.0),
        (9.0, None),
    ]  # error and radius: two are covered, of one nothing is known
    rows = [cell | {"err": err, "radius_empirical_bernstein": radius} for err, radius in values]
    rows.append(cell | {"layer": 3, "err": 1.0, "radius_empirical_bernstein": None})
    _, head, first, second, _ = run.summary(rows)
    assert head.split("  ")[0] == "layer" and first.split() == ["0", "0.5", "4", "2", "2", "2"]
    assert second.split() == ["3", "0.5", "1", "0", "-", "-"]
    assert run.summary([]) == []
