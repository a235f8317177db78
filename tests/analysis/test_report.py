"""The page of make report: what is in it, and what a browser makes of it. python -m pytest tests/analysis/test_report.py"""

import base64
import json
import os
import re
import shutil
from dataclasses import replace
from functools import cache
from io import BytesIO

import pandas as pd
import planted
import planted_tasks
import pytest
import small_store
from chromium import browser, installed
from conftest import ROOT

from analysis import figures, report
from analysis.study import Study, study
from runs import prereg
from runs.errors import UserError

RULES = replace(prereg.load().rules, resamples=100)
EVIL = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\" onfocus=\"window.pwned = 3"
TABLE = "document.getElementById('table-by-task')"


@cache
def studied() -> Study:
    return study("smoke", store=small_store.FOLDER, rules=RULES)


@cache
def page() -> str:
    return report.page(studied()).decode()


def href(name: str) -> bytes:
    (found,) = re.findall(rf'<a download="{re.escape(name)}" href="data:[\w/]+;base64,([^"]+)"', page())
    return base64.b64decode(found)


def test_it_asks_for_nothing_and_lets_nothing_be_asked() -> None:
    named = re.findall(r"""(?:\s(?:src|href|action)=|url\()["']?([^"'\s>)]+)""", page())
    assert named and all(one.startswith(("data:", "#")) for one in named)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page())
    assert policy.startswith("default-src &#39;none&#39;; img-src data:;") and "unsafe" not in policy


def test_every_verdict_threshold_interval_figure_and_digest_is_there() -> None:
    text = " ".join(page().replace("\u00a0", " ").split())
    for claim_id in prereg.IDS:
        result = studied().result(claim_id)
        assert f'<article id="{claim_id}">' in text and f'id="figure-{claim_id}"' in text
        assert json.loads(href(f"{claim_id}.json")) == json.loads(json.dumps(result))
        assert result["design"] in text and result["judging"] in text
        assert result["rules"]["supported_if"].replace(">", "&gt;").replace("<", "&lt;") in text
        for stratum in result["strata"]:
            for of in stratum["measures"].values():
                assert f"[{of['low']:.3f}, {of['high']:.3f}]" in text
        assert all(reason.replace("'", "&#39;") in text for reason in result["reasons"])
    assert all(f'id="figure-{name}"' in text for name in figures.PICTURES)
    assert "10,000 resamples" not in text and f"{RULES.resamples:,} resamples, seed {RULES.seed}" in text


def test_the_rows_behind_a_figure_are_its_points() -> None:
    for name in ("claim-2", "error", "roc"):
        points = figures.points_of(studied(), figures.pictures(studied().registry)[name])
        pd.testing.assert_frame_equal(pd.read_csv(BytesIO(href(f"{name}.csv"))), points, check_dtype=False)


def test_made_up_rows_are_named_above_everything() -> None:
    banner = page().index("<strong>Synthetic rows.</strong>")
    assert banner < page().index('id="verdicts"')


def test_equal_rows_give_an_equal_page() -> None:
    again = study("smoke", store=small_store.FOLDER, rules=RULES)
    assert report.page(again).decode() == page()


def test_without_rows_the_page_says_what_is_missing(tmp_path) -> None:
    empty = report.page(study("smoke", store=tmp_path / "nowhere", rules=RULES)).decode()
    assert "There are no rows." in empty and "<strong>Synthetic rows." not in empty
    assert empty.count("not evaluated") > 2 * len(prereg.IDS) and "96 of 96 cells missing" in empty


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A browser; a test loads what it wants."""
    if not installed():
        why = "chromium is absent: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def shown(opened, tmp_path):
    """The page of the small store, on a desk."""
    (tmp_path / "report.html").write_text(page())
    opened.said.clear()
    opened.size(1280)
    opened.open((tmp_path / "report.html").as_uri())
    return opened


def column(shown, name: str) -> list[str]:
    """The texts of a column of the table by task, of the rows that are shown."""
    script = f"""(() => {{ const at = [...{TABLE}.tHead.rows[0].cells].findIndex((c) => c.textContent === {name!r});
      return [...{TABLE}.tBodies[0].rows].filter((r) => !r.hidden).map((r) => r.cells[at].textContent); }})()"""
    return shown.ask(script)


def heading(name: str) -> str:
    return f"[...{TABLE}.tHead.rows[0].cells].find((c) => c.textContent === {name!r}).firstChild"


@pytest.mark.slow
def test_it_loads_without_an_error_and_without_a_network(shown) -> None:
    assert shown.said == []
    asked = [one["params"]["request"]["url"] for one in shown.fired if one["method"] == "Network.requestWillBeSent"]
    assert asked and all(url.startswith(("file:", "data:")) for url in asked)
    broken = shown.ask("[...document.images].filter((i) => !(i.complete && i.naturalWidth)).length")
    assert broken == 0 and shown.ask("document.images.length") == len(prereg.IDS) + len(figures.PICTURES)


@pytest.mark.slow
def test_a_table_sorts_by_number_and_by_text_with_what_is_undefined_last(shown) -> None:
    before = column(shown, "certificate")
    assert "–" in before and before != sorted(before)
    for descending in (False, True):
        shown.ask(f"{heading('certificate')}.click()")
        got = column(shown, "certificate")
        known = [float(one) for one in got if one != "–"]
        assert known == sorted(known, reverse=descending) and set(got[len(known) :]) == {"–"}
        sorted_by = shown.ask(f"{heading('certificate')}.parentNode.ariaSort")
        assert sorted_by == ("descending" if descending else "ascending")
    shown.ask(f"{heading('policy')}.click()")
    assert column(shown, "policy") == sorted(column(shown, "policy"))
    assert shown.ask(f"{heading('certificate')}.parentNode.ariaSort") is None


@pytest.mark.slow
def test_sorting_needs_no_mouse(shown) -> None:
    shown.ask(f"{heading('official')}.focus()")
    shown.press("Enter", 13, "\r")
    got = [float(one) for one in column(shown, "official")]
    assert got == sorted(got)
    shown.press("Tab", 9)
    assert shown.ask("document.activeElement.textContent") == "corrected"


@pytest.mark.slow
def test_a_filter_keeps_the_rows_that_hold_every_word(shown) -> None:
    rows = len(column(shown, "mode"))
    shown.ask("document.getElementById('filter-table-by-task').focus()")
    shown.send("Input.insertText", text="POISSON agnostic")
    assert set(column(shown, "policy")) == {"poisson"} and set(column(shown, "mode")) == {"agnostic"}
    left = len(column(shown, "mode"))
    assert 0 < left < rows
    assert shown.ask("document.querySelector('#filter-table-by-task + output').textContent") == f"{left} of {rows} rows"


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 375, 768])
def test_a_narrow_window_has_no_overflow(shown, width) -> None:
    shown.size(width)
    assert shown.ask("innerWidth") == width
    assert shown.ask("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll('p, h1, h2, h3, dl, li, summary, .filter, .cards td')]
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll:not(:has(.cards))')).length"""
    assert shown.ask(outside) == 0
    heights = "[...document.querySelectorAll('th button')].map((one) => one.getBoundingClientRect().height)"
    assert min(filter(None, shown.ask(heights))) >= 24, "WCAG 2.2, target size"
    assert float(shown.ask("getComputedStyle(document.querySelector('.lead')).fontSize").removesuffix("px")) >= 16


CONTRAST = """(() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.tagName === 'SCRIPT') continue;
    const [x, y] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((a, b) => b - a);
    const ratio = (x + 0.05) / (y + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.outerHTML.slice(0, 90)];
  }
  return worst; })()"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag(shown, scheme) -> None:
    shown.scheme(scheme)
    paper = shown.ask("getComputedStyle(document.body).backgroundColor")
    ratio, where = shown.ask(CONTRAST)
    shown.scheme("light")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert ratio >= 4.5, where


@pytest.mark.slow
def test_it_prints(shown, tmp_path) -> None:
    assert shown.pdf().startswith(b"%PDF")
    shown.size(690)  # what A4 leaves between the margins
    shown.send("Emulation.setEmulatedMedia", media="print")
    gone = shown.ask("['nav', '.filter', '.downloads'].map((s) => getComputedStyle(document.querySelector(s)).display)")
    assert gone == ["none"] * 3
    assert shown.ask("document.documentElement.scrollWidth") <= 690
    wide = shown.ask("[...document.images].filter((i) => i.getBoundingClientRect().right > 690).length")
    shown.send("Emulation.setEmulatedMedia", media="")
    assert wide == 0


@pytest.mark.slow
def test_a_name_or_an_answer_cannot_be_a_command(opened, tmp_path) -> None:
    """A model, a task and a population that want to be HTML are shown as they are; a script that came in would not run."""
    header = {"profile": "smoke", "population": EVIL, "population_notes": [EVIL], "synthetic": True}
    made = planted_tasks.plan(ROOT, 4, 2, tasks=(EVIL,), models=(EVIL,), **header)
    planted.fill(tmp_path, made, planted_tasks.world(made), failing={f"{EVIL} 1"})
    found = study("smoke", store=tmp_path / "runs" / "store", rules=RULES)
    evil = tmp_path / "evil.html"
    evil.write_bytes(report.page(found))
    opened.said.clear()
    opened.open(evil.as_uri())
    assert opened.said == [] and opened.ask("window.pwned") is None
    assert EVIL in opened.ask("document.querySelector('#table-by-task td').textContent")
    assert opened.ask("document.scripts.length") == 1
    opened.ask(
        "{ const s = document.createElement('script'); s.textContent = 'window.pwned = 4'; document.body.append(s) }"
    )
    assert opened.ask("window.pwned") is None and "Content Security Policy" in opened.said[0]


def test_the_command_writes_the_page(tmp_path, monkeypatch) -> None:
    from scripts import report as command

    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "study", lambda *_: studied())
    monkeypatch.setattr(command, "page", lambda of: page().encode() if of is studied() else b"")
    monkeypatch.setenv("PROFILE", "smoke")
    monkeypatch.setenv("STORE", str(small_store.FOLDER))
    assert command.main([]) == 0
    assert (tmp_path / "analysis" / "out" / "report.html").read_text() == page()
    shutil.rmtree(tmp_path / "analysis")
    monkeypatch.setenv("STORE", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="STORE="):
        command.main([])
    assert not (tmp_path / "analysis").exists()
