"""Every figure in the one style of paper/matplotlibrc: one a claim and those of several; equal rows give equal bytes.

A claim's figure is an entry of DRAWN in one of the modules figures_*.py; any other figure one of PICTURES there.
"""

import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis import figures_gated, figures_replay, figures_scores, figures_tasks
from analysis.figures_tasks import MARK, Result, nothing
from analysis.frame import write
from analysis.study import SYNTHETIC, Picture, Study, numbers
from analysis.text import sentence
from runs.errors import UserError
from runs.registry import ROOT, Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import LayoutEngine

STYLE = ROOT / "paper" / "matplotlibrc"
GRID = 2.0**20  # places to a millionth of a figure
WORD = re.compile(r"(\S{24})\S{3,}(\S{23})")  # longer than a label has room for
METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # no clock in a file
DRAWN: dict[str, Callable[["Figure", pd.DataFrame, Result], None]] = {
    **figures_replay.DRAWN,
    **figures_tasks.DRAWN,
    **figures_gated.DRAWN,
}
POINTS: dict[str, Callable[[Study], pd.DataFrame]] = {
    **figures_replay.POINTS
}  # of a claim whose figure shows its cells
PICTURES: dict[str, Picture] = {**figures_replay.PICTURES, **figures_scores.PICTURES}


def draw(claim_id: str, frame: pd.DataFrame | None, result: Result, folder: Path) -> list[Path]:
    """Draw the claim's figure as <id>.png and <id>.pdf in folder; [] where there is nothing to draw.

    What was drawn from an equal result by an equal style stays as it is. Raises UserError where folder cannot be written.
    """
    if claim_id not in DRAWN or frame is None or not any(result["beside"].values()):
        return []
    paths = [folder / f"{claim_id}.{kind}" for kind in ("png", "pdf")]
    stamp, key = folder / f".{claim_id}.key", _key(result)
    if all(path.is_file() for path in (*paths, stamp)) and stamp.read_bytes() == key.encode():
        return paths

    def paint(figure: "Figure") -> None:
        DRAWN[claim_id](figure, frame[frame["status"] == "ok"], result)
        title = textwrap.wrap(f"{result['title']}: {sentence(result)}", 110)
        figure.suptitle("\n".join(title), x=0.01, ha="left")

    images = rendered(paint, ("png", "pdf"), bool(result.get("synthetic")))
    write(stamp, b"")
    for path, image in zip(paths, images, strict=True):
        write(path, image)
    write(stamp, key.encode())
    return paths


def pictures(registry: Registry) -> dict[str, Picture]:
    """Every figure by name: one for each claim, also where nothing can be drawn of it yet, and those of several."""
    return {
        name: _of_claim(name, figures_gated.CAPTIONS.get(name, f"{claim.title}. {claim.question}"))
        for name, claim in registry.claims.items()
    } | PICTURES


def _of_claim(claim_id: str, caption: str) -> Picture:
    def points(study: Study) -> pd.DataFrame:
        return POINTS[claim_id](study) if claim_id in POINTS else numbers(study.result(claim_id))

    def paint(figure: "Figure", study: Study, _: pd.DataFrame) -> None:
        if claim_id in DRAWN:
            DRAWN[claim_id](figure, study.rows(claim_id), study.result(claim_id))
        else:
            nothing(figure, f"{claim_id}: no figure shows it")

    return Picture((claim_id,), caption, points, paint)


def drawn(study: Study, picture: Picture, points: pd.DataFrame, kinds: Sequence[str] = ("pdf",)) -> list[bytes]:
    """A picture of its points as files of some kinds (pdf, svg, png).

    Where its claims have no rows it says so, and what is missing; where they lack some, that stands above it.
    """

    def paint(figure: "Figure") -> None:
        if lacks := study.lacks(picture.claims):
            nothing(figure, "\n".join(lacks))
        elif points.empty:
            nothing(figure, "the rows allow no point of this figure")
        else:
            picture.draw(figure, study, points)
        if marks := study.marks(picture.claims):
            figure.suptitle("; ".join(marks), x=0.01, ha="left", color=MARK)

    return rendered(paint, kinds, SYNTHETIC in study.marks(picture.claims))


def rendered(paint: Callable[["Figure"], None], kinds: Sequence[str], synthetic: bool) -> list[bytes]:
    """What paint puts on an empty figure in the project's style, as files; synthetic: of made-up rows, it says so.

    Raises UserError where matplotlib refuses the environment.
    """
    try:
        import matplotlib as mpl  # here, because it takes longer to import than to judge
    except ValueError as error:
        raise UserError(f"matplotlib does not start: {error}; expected no MPLBACKEND=, or one of these") from None
    from matplotlib.figure import Figure

    with mpl.rc_context(fname=STYLE):
        figure = Figure(layout=_layout())
        paint(figure)
        _spell(figure)
        if synthetic:
            mark: dict[str, Any] = {
                "ha": "center",
                "va": "center",
                "rotation": 20,
                "color": MARK,
                "alpha": 0.25,
                "zorder": 10,
            }
            figure.text(0.5, 0.5, SYNTHETIC, fontsize=24, **mark)
        return [_image(figure, kind) for kind in kinds]


def files(study: Study) -> Iterator[tuple[str, bytes]]:
    """Every figure as a PDF for the paper: file name, content."""
    for name, picture in pictures(study.registry).items():
        (image,) = drawn(study, picture, points_of(study, picture))
        yield f"{name}.pdf", image


def points_of(study: Study, picture: Picture) -> pd.DataFrame:
    """The rows behind a picture; none where its claims have none."""
    return pd.DataFrame() if study.lacks(picture.claims) else picture.points(study)


def _key(result: Result) -> str:
    known = {name: value for name, value in result.items() if name not in ("store", "next")}
    drawing = sorted(Path(__file__).parent.glob("figures*.py"))
    parts = [json.dumps(known, sort_keys=True), *(path.read_text("utf-8") for path in (*drawing, STYLE))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _spell(figure: "Figure") -> None:
    """Names are data: a dollar begins no formula, what the font lacks is told by its code, a long word loses its middle."""
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    font = get_font(findfont(FontProperties()))

    def spelled(text: str) -> str:
        has = {char: char == "\n" or (char.isprintable() and font.get_char_index(ord(char))) for char in set(text)}
        known = (char if has[char] else f"U+{ord(char):04X}" for char in text)
        return WORD.sub(r"\1…\2", "".join(known)).replace("$", r"\$")

    for text in figure.findobj(Text):
        text.set_text(spelled(text.get_text()))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        named = axis.get_major_formatter()
        if isinstance(named, FuncFormatter):  # of labels that were given: it writes them anew
            axis.set_major_formatter(FuncFormatter(lambda x, k, named=named: spelled(named(x, k))))


def _layout() -> "LayoutEngine":
    """Constrained layout on GRID: its solver orders terms by their addresses, so sums differ in their last digits."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.transforms import Bbox

    class Layout(ConstrainedLayoutEngine):
        def execute(self, figure: "Figure") -> None:
            super().execute(figure)
            for part in figure.subfigs:
                part.bbox_relative.set_points(np.round(GRID * part.bbox_relative.get_points()) / GRID)
            for axes in figure.axes:
                axes.set_position(Bbox(np.round(GRID * axes.get_position(original=True).get_points()) / GRID))
                axes.set_in_layout(True)  # it has its place by hand now, and must be laid out for the next kind of file

    return Layout()


def _image(figure: "Figure", kind: str) -> bytes:
    out = BytesIO()
    figure.savefig(out, format=kind, metadata=METADATA.get(kind))
    return out.getvalue()
