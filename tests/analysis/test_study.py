"""From a store to every figure, table and number: equal bytes, what a deleted unit changes, what a seed changes."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest
import small_store
from conftest import ROOT
from matplotlib.backends.backend_pdf import RendererPdf

from analysis import figures, latex
from analysis.study import Picture, Study, asked, elsewhere, numbers, study
from analysis.tables_study import rows_of, tables
from runs import prereg
from runs.store import Store

RULES = replace(prereg.load().rules, resamples=100)
ON = {  # a grid -> what is made of its rows
    "replay": {"claim-1", "claim-2", "extension-6", "error"},
    "tasks": {"claim-3", "claim-4", "claim-5", "claim-6", "claim-7", "extension-1", "accuracy", "memory", "roc", "arms",
              "tasks", "gains", "aucs"},
}  # fmt: skip
TEXTS: dict[str, tuple[tuple[float, ...], list]] = {}
WHOLE = {"verdicts", "grids", "study"}  # of all grids


@cache
def studied(store: Path = small_store.FOLDER, seed: int = RULES.seed) -> Study:
    return study("smoke", store=store, rules=replace(RULES, seed=seed))


@cache
def files(store: Path = small_store.FOLDER) -> dict[str, bytes]:
    """What is made of a store; TEXTS: of each figure its size, and the texts of its PDF with the boxes they take."""
    found, boxes, size = {}, [], []

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None) -> None:
        wide, high, below = self.get_text_width_height_descent(s, prop, ismath)
        size[:] = (72 * self.width, 72 * self.height)
        if angle == 0:
            boxes.append((s, (x, y - below, x + wide, y - below + high)))
        elif angle == 90:
            boxes.append((s, (x + below - high, y, x + below, y + wide)))
        drawn(self, gc, x, y, s, prop, angle, ismath, mtext)

    drawn = RendererPdf.draw_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RendererPdf, "draw_text", draw_text)
        for name, image in figures.files(studied(store)):
            found[f"figures/{name}"] = image
            TEXTS[name] = (tuple(size), list(dict.fromkeys(boxes)))
            boxes.clear()
    return found | dict(latex.files(studied(store)))


def without_a_unit(grid: str, folder: Path) -> Path:
    copied = shutil.copytree(small_store.FOLDER, folder / "store")
    store = Store(copied)
    unit = next(file for file in store.unit_files() if store.meta(file.path)["plan"]["grid"] == grid)
    unit.path.unlink()
    return copied


@pytest.mark.slow
@pytest.mark.parametrize("grid", list(ON))
def test_a_deleted_unit_changes_what_is_made_of_it_and_nothing_else(grid, tmp_path) -> None:
    """What is equal was made twice from two folders: equal rows give equal bytes, whatever the clock and the path."""
    cut = without_a_unit(grid, tmp_path)
    before, after = files(), files(cut)
    assert before.keys() == after.keys()
    changed = {Path(name).stem for name in before if before[name] != after[name]}
    assert changed == ON[grid] | WHOLE
    for claim_id in (name for name in ON[grid] if name.startswith(("claim", "extension"))):
        result = studied(cut).result(claim_id)
        lack = f"{result['missing']:,} of {result['planned']:,} cells missing"
        assert result["missing"] and lack in result["reasons"]
        assert lack in after[f"tables/{claim_id}.tex"].decode()
        assert rf"\kvset{{{claim_id}.missing}}{{{result['missing']:,}}}" in after[f"numbers/{claim_id}.tex"].decode()
        assert lack in studied(cut).marks([claim_id])


def svg(monkeypatch, tmp_path, found: Study, name: str) -> str:
    """A picture as SVG whose texts are texts."""
    style = tmp_path / "matplotlibrc"
    style.write_text(f"{(ROOT / 'paper' / 'matplotlibrc').read_text()}\nsvg.fonttype: none\n")
    monkeypatch.setattr(figures, "STYLE", style)
    picture = figures.pictures(found.registry)[name]
    return figures.drawn(found, picture, figures.points_of(found, picture), ("svg",))[0].decode()


def test_every_figure_of_made_up_rows_says_so_and_what_is_missing(monkeypatch, tmp_path) -> None:
    cut = studied(without_a_unit("tasks", tmp_path))
    for name in ("claim-4", "memory"):
        drawn = svg(monkeypatch, tmp_path, cut, name)
        assert drawn.count("synthetic rows") == 2  # above it, and across it
        assert "1,152 of 2,304 cells missing" in drawn
    whole = svg(monkeypatch, tmp_path, cut, "error")
    assert whole.count("synthetic rows") == 2 and "missing" not in whole


def test_a_claim_of_which_only_the_calibration_is_left_shows_nothing_and_says_so(monkeypatch, tmp_path) -> None:
    """The stratum has rows and nothing is measured: no figure may look for what it lacks."""
    copied = Store(shutil.copytree(small_store.FOLDER, tmp_path / "store"))
    for file in copied.unit_files():
        if "assistant 0" in copied.meta(file.path)["run_of"]:  # the unit with the dialogues
            file.path.unlink()
    found = study("smoke", store=copied.root, rules=RULES, only=("extension-2",))
    assert found.rows("extension-2")["task"].unique().tolist() == ["assistant_calibration"]
    assert "extension-2 not evaluated" in " ".join(svg(monkeypatch, tmp_path, found, "extension-2").split())
    judged = found.judged["extension-2"]
    assert figures.draw("extension-2", judged.frame, judged.result, tmp_path / "out") == []


def test_no_text_of_a_figure_leaves_it_or_covers_another() -> None:
    """By the boxes of the texts that stand upright or on their side."""
    files()
    for name, ((wide, high), boxes) in TEXTS.items():
        for text, (left, bottom, right, top) in boxes:
            assert left > -1 and bottom > -1 and right < wide + 1 and top < high + 1, (name, text)
        for (one, (a, b, c, d)), (other, (e, f, g, h)) in combinations(boxes, 2):
            assert min(c, g) - max(a, e) < 1 or min(d, h) - max(b, f) < 1, (name, one, other)
    assert {"the gate", "turns since the fact was stated"} <= {text for text, _ in TEXTS["extension-2.pdf"][1]}


def test_without_rows_every_figure_table_and_number_says_what_is_missing(monkeypatch, tmp_path) -> None:
    empty = study("smoke", store=tmp_path / "nowhere", rules=RULES)
    for name, picture in figures.pictures(empty.registry).items():
        drawn = " ".join(svg(monkeypatch, tmp_path, empty, name).split())
        for claim_id in picture.claims:
            planned = empty.result(claim_id)["planned"]
            assert f"{claim_id} not evaluated" in drawn and f"{planned:,} of {planned:,} cells" in drawn, name
    made = {name: text.decode() for name, text in latex.files(empty)}
    for claim_id in prereg.IDS:
        assert made[f"tables/{claim_id}.tex"].startswith(f"{claim_id} not evaluated: ")
        assert rf"\kvset{{{claim_id}.verdict}}{{NOT\_EVALUATED}}" in made[f"numbers/{claim_id}.tex"]
    assert "not evaluated" in made["tables/gains.tex"] and made["tables/deviations.tex"] == "none\n"


def test_a_plan_is_found_wherever_its_data_lay_and_under_no_other_request(tmp_path) -> None:
    store = Store(shutil.copytree(small_store.FOLDER, tmp_path / "store"))
    (header,) = (one for one in store.plans() if one["grid"] == "locomo")
    typed = {"model": None, "data": None, "ctx": None, "args": None}
    assert header["request"]["data"] and asked(store, "locomo", "smoke", typed) == header["request"]
    assert asked(store, "locomo", "smoke", typed | {"model": "another"})["model"] == "another"
    assert asked(store, "locomo", "laptop", typed) == typed == asked(store, "replay", "smoke", typed)
    assert asked(store, "replay", "smoke", header["request"]) == typed
    made = store.read_plan("locomo", "smoke", header["request"])
    twice = made.header | {"inputs": {"texts": "1"}}, {"request": typed | {"data": "elsewhere.json"}}
    for header in (twice[0], twice[0] | twice[1]):
        store.write_plan(replace(made, header=header))
    assert asked(store, "locomo", "smoke", typed)["data"] == "elsewhere.json", "the same texts, typed in two ways"
    store.write_plan(replace(made, header=header | {"inputs": {"texts": "2"}}))
    assert asked(store, "locomo", "smoke", typed) == typed, "which of two is meant cannot be known"


def test_rows_of_other_data_than_were_asked_for_say_so() -> None:
    result = studied().result("extension-3")
    said = "extension-3: rows of DATA=locomo10.json"
    for data, expected in ((None, ""), ("locomo10.json", ""), ("other.json", said)):
        request = studied().request | {"data": data}
        assert elsewhere(request, result) == expected
        assert (said in replace(studied(), request=request).marks(["claim-1", "extension-3"])) == bool(expected)
    assert elsewhere({**studied().request, "data": "other.json"}, studied().result("claim-1")) == ""


def test_another_seed_changes_intervals_and_no_estimate() -> None:
    one, other = studied(), studied(seed=RULES.seed + 1)
    for claim_id in prereg.IDS:
        before, after = numbers(one.result(claim_id)), numbers(other.result(claim_id))
        pd.testing.assert_frame_equal(before.drop(columns=["low", "high"]), after.drop(columns=["low", "high"]))
        if len(before):
            assert not before[["low", "high"]].equals(after[["low", "high"]]), claim_id
            assert one.result(claim_id)["rows_digest"] == other.result(claim_id)["rows_digest"]
    for name, picture in figures.PICTURES.items():
        before, after = (figures.points_of(found, picture) for found in (one, other))
        ends = ["low", "high"]
        pd.testing.assert_frame_equal(before.drop(columns=ends), after.drop(columns=ends))
        assert not before[ends].equals(after[ends]), name


def test_the_points_of_a_figure_are_all_that_it_needs() -> None:
    """A picture drawn again from its points, through the CSV that a reader gets, is the same picture."""
    from io import StringIO

    found = studied()
    for name in ("error", "accuracy"):
        picture = figures.PICTURES[name]
        points = figures.points_of(found, picture)
        again = pd.read_csv(StringIO(points.to_csv(index=False)))
        assert figures.drawn(found, picture, again, ("svg",)) == figures.drawn(found, picture, points, ("svg",))


def test_a_curve_or_a_norm_that_is_not_there_leaves_the_rest() -> None:
    """Attribution without an inherent failure: the panel says so. Outputs of norm 0: no relative error."""
    found, roc = studied(), figures.PICTURES["roc"]
    points = figures.points_of(found, roc)
    assert figures.drawn(found, roc, points[points["claim"] == "claim-5"])
    judged = found.judged["claim-2"]
    without = {"claim-2": replace(judged, frame=judged.frame.assign(full_norm=0.0))}
    assert figures.points_of(replace(found, judged=without), figures.PICTURES["error"]).empty


def test_no_point_is_said_and_not_drawn() -> None:
    picture = Picture(("claim-1",), "", lambda _: pd.DataFrame(), lambda *_: pytest.fail("nothing to draw"))
    (image,) = figures.drawn(studied(), picture, pd.DataFrame(), ("png",))
    assert image.startswith(b"\x89PNG")


def test_every_claim_has_a_figure_and_a_table() -> None:
    registry = prereg.load()
    assert set(prereg.IDS) <= figures.pictures(registry).keys() & tables(registry).keys()
    assert all(claim_id in prereg.IDS for one in figures.PICTURES.values() for claim_id in one.claims)


# ---------------------------------------------------------------- tables and numbers


def test_a_table_of_tasks_has_a_row_a_task_and_the_mean_of_its_answers() -> None:
    found = studied()
    rows = rows_of(found, tables(found.registry)["tasks"])
    frame = found.rows("claim-3")
    assert set(rows["task"]) == {"planted_facts", "planted <lists>"} and len(rows.columns) == 3 + 11
    own = frame[(frame["task"] == "planted_facts") & (frame["arm"] == "poisson aware 0.25")]
    assert rows.set_index("task").loc["planted_facts", "poisson aware 25 %"] == pytest.approx(own["official"].mean())


def test_what_is_in_a_table_cannot_be_a_command() -> None:
    made = latex.tabular(pd.DataFrame({"a & b": ['50 % \\input{x} $1$ #_{}~^<>|"\n'], "n": [1234]}), [], [])
    assert r"a \& b & n \\" in made and r" & 1,234 \\" in made
    assert r"50 \% \textbackslash{}input\{x\} \$1\$ \#\_\allowbreak{}\{\}\textasciitilde{}\textasciicircum{}" in made
    assert made.count(r"\input") == 0
    assert latex.escaped("λ模\t\u202e–é") == "U+03BBU+6A21U+0009U+202E–é"


def test_a_long_table_goes_over_pages_and_broken_columns_fit_the_line() -> None:
    long = latex.tabular(pd.DataFrame({"n": range(latex.LONG + 1)}), [], ["synthetic rows"])
    assert long.startswith(r"\begin{longtable}") and "synthetic rows" in long
    texts = {name: ["x" * length] for name, length in (("a", 30), ("b", 300), ("c", 90), ("d", 2))}
    widths = re.findall(r"p\{([\d.]+)\\linewidth\}", latex.tabular(pd.DataFrame(texts), [], []))
    assert len(widths) == 3 and sum(map(float, widths)) <= 0.9


def test_a_table_of_more_columns_than_a_page_has_room_for_is_turned() -> None:
    wide = pd.DataFrame({"grid": ["one", "two"]} | {f"c{k}": [k, "long " * 30] for k in range(latex.MANY)})
    made = latex.tabular(wide, [], []).splitlines()
    assert made[2] == r"grid & one & two \\" and made[4].startswith("c0 & 0 & long long ")
    assert len(made) == 4 + latex.MANY + 2 and made[0].count("raggedright") == 1
    same = latex.tabular(wide.assign(grid="one"), [], [])
    assert "grid & 1: one & 2: one" in same, "two columns of one name"


def test_undefined_is_said_in_a_table_and_has_no_number() -> None:
    assert "undefined" in latex.tabular(pd.DataFrame({"auc": [float("nan")]}), [], [])
    result = dict(studied().result("claim-1"))
    stratum = result["strata"][0]
    undefined = {"estimate": None, "low": None, "high": None}
    result["strata"] = [stratum | {"measures": {"coverage": undefined}}]
    result["beside"] = {stratum["name"]: {}}
    assert not [key for key in latex.of_claim(result, "claim-1") if ".coverage" in key]


def test_numbers_are_those_of_the_verdict() -> None:
    result = studied().result("claim-1")
    found = latex.of_claim(result, "claim-1")
    one = result["strata"][0]["measures"]["coverage"]
    assert found["claim-1.budget-12.5.coverage"] == f"{one['estimate']:.3f}"
    assert found["claim-1.budget-12.5.coverage.percent"] == f"{100 * one['estimate']:.1f}"
    three = [f"{one[end]:.3f}" for end in ("estimate", "low", "high")]
    assert found["claim-1.budget-12.5.coverage.interval"] == f"{three[0]} [{three[1]}, {three[2]}]"
    every = [stratum["measures"]["coverage"]["estimate"] for stratum in result["strata"]]
    assert found["claim-1.coverage.lowest"] == f"{min(every):.3f}"
    assert found["claim-1.coverage.highest"] == f"{max(every):.3f}"
    assert found["claim-1.budget-12.5.exact"] == "0" and "claim-1.budget-12.5.exact.percent" not in found


@pytest.mark.slow
def test_latex_prints_a_number_and_says_where_there_is_none(tmp_path) -> None:
    if not shutil.which("pdflatex"):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("pdflatex is absent")
    for name, text in latex.files(studied()):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
    said = r"\typeout{[\kv{claim-1.rows}|\kv{claim-1.no-such}|\kv{claim-1.budget-12.5.coverage.interval}]}"
    packages = r"\usepackage[T1]{fontenc}\usepackage{booktabs,longtable,array}"
    inputs = "".join(rf"\input{{tables/{path.stem}}}\par" for path in sorted((tmp_path / "tables").iterdir()))
    inputs += latex.escaped("".join(map(chr, range(0xA0, 0x100))) + "–—‘’“”…λ模\x07")
    (tmp_path / "t.tex").write_text(
        rf"\documentclass{{article}}{packages}\input{{numbers/all}}\begin{{document}}{said}{inputs}\end{{document}}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    interval = latex.of_claim(studied().result("claim-1"), "claim-1")["claim-1.budget-12.5.coverage.interval"]
    assert f"[1,008|not evaluated|{interval}]" in done.stdout


# ---------------------------------------------------------------- commands


@pytest.mark.slow
def test_figures_and_judge_all_need_no_torch(tmp_path) -> None:
    """With torch absent both write what they say, into their own checkout."""
    ignored = shutil.ignore_patterns("store", "out", "figures", "tables", "numbers", "__pycache__")
    for folder in ("analysis", "cert", "configs", "paper", "prereg", "runs", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'datasets', 'hydra'): sys.modules[name] = None\n"
        "from scripts import figures, judge_all\n"
        "sys.exit(figures.main([]) + judge_all.main([]))\n"
    )
    environment = os.environ | {"PROFILE": "smoke", "STORE": str(small_store.FOLDER)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "synthetic rows" in done.stdout and "not evaluated" not in done.stdout
    assert all(claim_id in done.stdout for claim_id in prereg.IDS)
    for folder in ("figures", "tables", "numbers"):
        made = {f"{folder}/{path.name}" for path in (tmp_path / "paper" / folder).iterdir()}
        assert made == {name for name in files() if name.startswith(folder)}
    written = {path.name for path in (tmp_path / "analysis" / "out").glob("*.json")}
    assert written == {f"{claim_id}.json" for claim_id in prereg.IDS}


def test_a_store_that_is_not_there_is_named(tmp_path) -> None:
    environment = os.environ | {"STORE": str(tmp_path / "nowhere")}
    for script in ("figures", "judge_all"):
        command = [sys.executable, "-m", f"scripts.{script}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith("error: STORE="), done.stderr
