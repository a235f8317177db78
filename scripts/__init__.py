"""Entry points: each module is one command, `python -m scripts.<name>`; make calls them."""

import sys
from types import TracebackType


def interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C while a command is still importing, which takes seconds: a line, where `_cli.run` is not there yet."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = interrupted
