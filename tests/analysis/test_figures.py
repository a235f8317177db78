"""Figures: equal rows give equal bytes, nothing is drawn twice, and odd rows do not break them."""

import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import planted
import pytest
from conftest import ROOT

from analysis import figures
from analysis.judge import judged
from runs import prereg
from runs.errors import UserError

RULES = replace(prereg.load().rules, resamples=200)
CLAIMS = ("claim-1", "claim-2", "extension-6")
RADII = ("empirical_bernstein", "normal", "conservative", "assisted")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Some radii undefined, some cells with nothing evicted: what a logarithmic axis cannot show."""

    def change(cell, row):
        if cell["step"] == 1 and cell["layer"] == 9:
            row |= {"radius_empirical_bernstein": None, "radius_conservative": None}
        if cell["document"].endswith(" 2") and cell["budget"] == 0.5:
            row |= {"err": 0.0, "radius_empirical_bernstein": 0.0, "exact": True}
        return row

    root = planted.study(tmp_path_factory.mktemp("study"))
    made = planted.plan(root, documents=6, models=("one", "another with a long name"))
    planted.fill(root, made, planted.rows(made, 0.9, 0.5, change=change), failing={"one 3"})
    return {claim: judged(claim, root=root, rules=RULES) for claim in CLAIMS}


def draw(study, claim, folder, **over):
    found = study[claim]
    return figures.draw(claim, found.frame, found.result | over, folder)


def test_the_study_of_these_tests_is_odd_enough(study) -> None:
    frame = study["claim-1"].frame
    assert frame["radius_empirical_bernstein"].isna().any() and (frame["err"] == 0).any()
    assert set(frame["status"]) == {"ok", "failed"} and frame["model"].nunique() == 2


@pytest.mark.parametrize("claim", CLAIMS)
def test_equal_rows_give_equal_bytes(study, claim, tmp_path) -> None:
    once, twice = draw(study, claim, tmp_path / "a"), draw(study, claim, tmp_path / "b")
    assert [path.name for path in once] == [f"{claim}.png", f"{claim}.pdf"]
    for one, other in zip(once, twice, strict=True):
        assert one.read_bytes() == other.read_bytes()
    png, pdf = (path.read_bytes() for path in once)
    assert png.startswith(b"\x89PNG") and pdf.startswith(b"%PDF") and b"CreationDate" not in pdf
    assert min(len(png), len(pdf)) > 10_000


def test_the_last_digits_of_the_layout_are_no_part_of_a_figure(monkeypatch) -> None:
    """They differ between two runs, and even between two drawings: its solver sorts by addresses in memory."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    def paint(figure) -> None:
        upper, lower = figure.subfigures(2, 1)
        figure.colorbar(upper.subplots(1, 2)[0].scatter([0, 1], [0, 1], c=[1, 2]))
        lower.subplots().plot([0, 1])

    def shifted(self, figure) -> None:
        laid_out(self, figure)
        for axes in figure.axes:
            axes.set_position([place + 1e-11 for place in axes.get_position().bounds])
            axes.set_in_layout(True)
        for part in figure.subfigs:
            part.bbox_relative.set_points(part.bbox_relative.get_points() + 1e-11)

    kinds = ("pdf", "svg", "png")
    before, laid_out = figures.rendered(paint, kinds, True), ConstrainedLayoutEngine.execute
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", shifted)
    assert figures.rendered(paint, kinds, True) == before


def test_only_another_result_is_drawn_again(study, tmp_path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setitem(figures.DRAWN, "claim-1", lambda *_: drawn.append(1))
    draw(study, "claim-1", tmp_path)
    draw(study, "claim-1", tmp_path, store="elsewhere", next="make tea")
    assert len(drawn) == 1
    draw(study, "claim-1", tmp_path, rows_digest="other rows")
    assert len(drawn) == 2
    (tmp_path / "claim-1.pdf").unlink()
    draw(study, "claim-1", tmp_path, rows_digest="other rows")
    assert len(drawn) == 3 and (tmp_path / "claim-1.pdf").exists()


def test_a_damaged_key_only_draws_again(study, tmp_path) -> None:
    draw(study, "extension-6", tmp_path)
    (tmp_path / ".extension-6.key").write_bytes(b"\xff\xfe")
    assert len(draw(study, "extension-6", tmp_path)) == 2
    assert (tmp_path / ".extension-6.key").read_bytes() != b"\xff\xfe"


def test_another_style_is_drawn_again(study, tmp_path, monkeypatch) -> None:
    style = tmp_path / "matplotlibrc"
    shutil.copy(ROOT / "paper" / "matplotlibrc", style)
    monkeypatch.setattr(figures, "STYLE", style)
    before = [hashlib.sha256(path.read_bytes()).digest() for path in draw(study, "extension-6", tmp_path)]
    with style.open("a") as file:
        file.write("savefig.dpi: 90\n")
    after = [hashlib.sha256(path.read_bytes()).digest() for path in draw(study, "extension-6", tmp_path)]
    assert before[0] != after[0]


def test_the_readers_own_style_is_not_touched(study, tmp_path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    draw(study, "extension-6", tmp_path)
    assert dict(mpl.rcParams) == before


def test_without_rows_there_is_no_figure(study, tmp_path) -> None:
    found = study["claim-1"]
    assert figures.draw("claim-1", None, found.result, tmp_path) == []
    assert figures.draw("claim-1", found.frame, found.result | {"beside": {}}, tmp_path) == []
    assert figures.draw("extension-7", found.frame, found.result, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(study, tmp_path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="cannot write"):
        draw(study, "extension-6", tmp_path / "out")


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize(
    ("documents", "change"),
    [
        (1, {}),  # one document: no interval, every bound is undefined
        (3, {"err": 0.0, "exact": True} | {f"radius_{rule}": 0.0 for rule in RADII}),  # nothing evicted anywhere
        (3, {f"radius_{rule}": None for rule in RADII}),  # nothing certified anywhere
    ],
    ids=["one document", "all exact", "all undefined"],
)
def test_what_is_undefined_is_left_out_of_a_figure(tmp_path, claim, documents, change) -> None:
    root = planted.study(tmp_path / "study")
    made = planted.plan(root, documents=documents)
    planted.fill(root, made, planted.rows(made, 0.9, 0.5, change=lambda _, row: row | change))
    found = judged(claim, root=root, rules=RULES)
    assert len(figures.draw(claim, found.frame, found.result, tmp_path)) == 2


def test_a_panel_without_a_cell_to_show_stays_empty(tmp_path) -> None:
    def change(cell, row):
        return row | ({"err": 0.0, "exact": True} if (cell["model"], cell["budget"]) == ("two", 0.125) else {})

    root = planted.study(tmp_path / "study")
    made = planted.plan(root, documents=3, models=("one", "two"))
    planted.fill(root, made, planted.rows(made, 0.9, 0.5, change=change))
    found = judged("claim-2", root=root, rules=RULES)
    assert len(figures.draw("claim-2", found.frame, found.result, tmp_path)) == 2


# ---------------------------------------------------------------- names, and the environment


def test_a_name_is_no_formula_and_is_told_where_the_font_lacks_it(tmp_path, monkeypatch) -> None:
    """In a title, a legend and at an axis; a text that turns the direction of writing would change what is read."""
    style = tmp_path / "matplotlibrc"
    style.write_text(f"{figures.STYLE.read_text()}\nsvg.fonttype: none\n")
    monkeypatch.setattr(figures, "STYLE", style)
    name = "a$b^{$ \\$ \u6a21\u202e\x07 " + "abcdefgh" * 20

    def paint(figure) -> None:
        axes = figure.subplots()
        axes.plot([1, 100], [0, 0], label=name)
        axes.set_xscale("log")
        axes.set_yticks([0], [name])
        axes.set_title(name)
        axes.legend()

    (image,) = figures.rendered(paint, ("svg",), synthetic=False)
    text = html.unescape(re.sub("<[^>]+>", "", image.decode()))
    assert text.count("a$b^{$ \\$ U+6A21U+202EU+0007 " + "abcdefgh" * 3 + "…" + "bcdefgh" + "abcdefgh" * 2) == 3
    assert "mathdefault" not in text, "the numbers at a logarithmic axis are formulas"


@pytest.mark.parametrize("claim", ["claim-3", "extension-4", "extension-5"])
def test_a_long_name_pushes_no_label_out_of_the_figure(claim) -> None:
    """An axis that is narrow beside its names is narrower than what stands below it."""
    name, seen = "DeepSeek-R1-Distill-Qwen-1.5B-Instruct-GGUF-Q4, 16,384 tokens", []
    estimate = dict(zip(("estimate", "low", "high"), (0.5, 0.4, 0.6), strict=True))
    of = dict.fromkeys(("difference", "coverage", "coverage_normal", "coverage_assisted"), estimate)
    of |= dict.fromkeys(("mean_auc", "mean_auc_logprob"), estimate)
    point = {f"{name}, key_value_retrieval": estimate}
    of |= {"auc_point": point, "auc_logprob_point": point}
    result = {"strata": [{"name": name, "measures": of}], "beside": {name: of}, "rules": {"supported_if": ""}}

    def paint(figure) -> None:
        figure.set_dpi(72)  # that of an SVG, in which its texts are measured
        figures.DRAWN[claim](figure, None, result)
        seen.append(figure)

    figures.rendered(paint, ("svg",), synthetic=False)
    for axes in seen[0].axes:
        label, all_of_it = axes.xaxis.label.get_window_extent(), seen[0].bbox
        assert axes.get_xlabel() and label.x0 >= 0 and label.x1 <= all_of_it.x1 + 1


def test_a_locale_without_letters_changes_nothing_and_a_backend_that_is_none_is_a_line() -> None:
    code = "from analysis import figures; print(figures._key({})); figures.rendered(print, (), False)"
    odd = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "MPLBACKEND": "nonsense"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | odd, capture_output=True, text=True, check=False)
    assert done.stdout == f"{figures._key({})}\n"
    assert "UserError: matplotlib does not start" in done.stderr.splitlines()[-1]
