"""An arm: how the cache of one request is served. Planning reads it, so no torch here."""

import re
from dataclasses import dataclass

from runs.errors import UserError

POLICIES, MODES = ("full", "topk", "poisson"), ("full", "aware", "agnostic")
EXAMPLES = "'full', 'full again', 'topk aware 0.25', 'poisson agnostic 0.25', 'poisson aware 0.25 draw 2'"
_NAME = re.compile(r"full(?P<again> again)?|(?P<policy>\w+) (?P<mode>\w+) (?P<budget>[\d.]+)(?P<second> draw 2)?")


@dataclass(frozen=True)
class Arm:
    """One way to serve a request: policy, when it is compressed, and to what fraction of the length.

    mode: "aware" compresses after the whole prompt, "agnostic" at the end of the context. budget: 1.0 for full. draw:
    0, or 1 for other coins (poisson) or the same computation once more (full). Raises UserError for anything else.
    """

    policy: str
    mode: str
    budget: float
    draw: int = 0

    def __post_init__(self) -> None:
        whole = self.policy == "full"
        known = self.policy in POLICIES and self.mode in MODES and whole == (self.mode == "full")
        if not known or not 0 < self.budget <= 1 or (whole and self.budget != 1):
            raise UserError(f"arm {self.name!r}: unknown; expected one like {EXAMPLES}, its budget above 0, at most 1")
        if self.draw not in (0, 1) or (self.draw and self.policy == "topk"):
            raise UserError(f"arm {self.name!r}: topk has no second draw, and no policy a third; expected {EXAMPLES}")

    @property
    def name(self) -> str:
        """As the registration writes it; parse(name) is the arm again."""
        if self.policy == "full":
            return "full again" if self.draw else "full"
        return f"{self.policy} {self.mode} {float(self.budget)!r}" + (f" draw {self.draw + 1}" if self.draw else "")


def parse(text: str) -> Arm:
    """The arm of a name; UserError for a text that is not exactly the name of one."""
    found = _NAME.fullmatch(text)
    if found and found["policy"] is None:
        return Arm("full", "full", 1.0, int(found["again"] is not None))
    if found and re.fullmatch(r"\d+\.\d+", found["budget"]):
        arm = Arm(found["policy"], found["mode"], float(found["budget"]), int(found["second"] is not None))
        if arm.name == text:
            return arm
    raise UserError(f"arm {text!r}: unknown; expected one like {EXAMPLES}")
