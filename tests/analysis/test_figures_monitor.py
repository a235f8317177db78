"""The monitors' figure: equal paths give equal bytes, what it shows is what was found, and nothing breaks it."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from test_monitor import conversations, row

from analysis.figures import STYLE, _image
from analysis.figures_monitor import monitors
from analysis.monitor import monitored


def drawn(found):
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(7.2, 2.1 * len(found) + 0.3))
        monitors(figure, found)
        return figure, [_image(figure, kind) for kind in ("png", "pdf")]


@pytest.fixture(scope="module")
def found():
    rng = np.random.default_rng(1)
    return {
        "one": monitored(conversations(rng, 20, 0.1, strict=0.1, audit=1.0)),
        "another": monitored(conversations(rng, 12, 0.5, strict=0.0)),
    }


def test_equal_paths_give_equal_bytes(found):
    (_, once), (_, twice) = drawn(found), drawn(found)
    assert once == twice
    assert once[0].startswith(b"\x89PNG") and once[1].startswith(b"%PDF") and b"CreationDate" not in once[1]
    other = {"one": found["one"] | {"delta": 0.2}, "another": found["another"]}
    assert drawn(other)[1] != once


def test_it_shows_what_was_found(found):
    figure, _ = drawn({"one": found["one"]})
    shares, bets, sums = figure.axes
    assert shares.lines[0].get_ydata().tolist() == [point["share"] for point in found["one"]["betting"]]
    for line, key in zip(bets.lines, ("log10_alarm", "log10_evidence"), strict=False):
        assert line.get_ydata().tolist() == [0.0, *(point[key] for point in found["one"]["betting"])]
    assert [line.get_ydata()[0] for line in (shares.lines[-1], bets.lines[-1], sums.lines[-1])] == [
        0.05, found["one"]["log10_threshold"], found["one"]["log10_threshold"],
    ]  # fmt: skip
    rising = [own for own in found["one"]["trajectories"] if own["at"]]
    assert len(sums.lines) == len(rising) + 1 and len(rising) > 10
    for line, own in zip(sums.lines, rising, strict=False):
        np.testing.assert_allclose(10 ** line.get_ydata(), [*own["e"], own["e"][-1]])
        assert line.get_xdata().tolist() == [*own["at"], own["steps"]]


def test_it_fits_beside_other_panels(found):
    with mpl.rc_context(fname=STYLE):
        figure = Figure(figsize=(7.2, 5))
        upper, lower = figure.subfigures(2, 1)
        upper.subplots()
        monitors(lower, found)
        assert len(_image(figure, "pdf")) > 10_000


@pytest.mark.parametrize(
    "rows",
    [[row("a", audited=False)], [row("a", [0.0], [0.0])], [row("a", [1.0], [1.0])]],
    ids=["none", "clean", "one"],
)
def test_few_conversations_break_nothing(rows):
    assert len(drawn({"only": monitored(pd.DataFrame(rows))})[1][0]) > 5_000
