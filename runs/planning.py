"""What a user sees of a plan that takes long to make. No torch."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

from tqdm import tqdm

Text = TypeVar("Text")
PATIENCE = 10.0  # seconds without a word


def shown(items: Sequence[Text], what: str) -> Iterable[Text]:
    """The items one after the other, with progress on stderr once that has taken PATIENCE."""
    pause = 0.5 if sys.stderr.isatty() else PATIENCE
    return cast("Iterable[Text]", tqdm(items, desc=f"planning {what}", delay=PATIENCE, mininterval=pause, leave=False))
