"""make demo: a conversation kept in a tenth of its cache, asked through the gate, in the terminal. python -m scripts.demo

Turns are fed one by one and compressed after each; then come questions on what was said, each with its certificate, the
gate's decision and, where that is to recompute, what the full cache answers. MODEL= and PROFILE= as for make.
"""

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cert.gate import Gate, quantile_threshold
from runs.digests import read_text
from runs.errors import UserError
from runs.grid import parts
from runs.registry import ROOT, load
from scripts._cli import run, settings
from scripts._grid import configs

if TYPE_CHECKING:
    from runs.demo import Heard

GRID, CLAIM = "assistant", "extension-2"
WIDTH, ASKED = 80, 5  # columns; questions shown, from the youngest fact's to the oldest's
PUBLISHED = ROOT / "analysis" / "published" / f"{CLAIM}.json"


def main(argv: list[str] | None = None) -> int:
    """Print the conversation, its answers and what they cost."""
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__)
    parser.parse_args(argv)
    chosen, registry, began = settings(), load(), time.monotonic()
    rho = float(registry.claims[CLAIM].params["rho"])  # type: ignore[arg-type] # a number, as registered
    (part,) = parts(configs(chosen, registry, GRID)[:1], chosen.data, GRID)
    import torch  # seconds: the help and a mistake in the settings do not wait for them

    from runs.demo import Scene
    from runs.models import load_model

    torch.set_num_threads(1)
    scene = Scene(part)
    said(
        f"{part.model}: a conversation of {len(scene.conversation.turns)} turns. After each its cache is compressed to "
        f"{100 * (scene.policy.budget or 1):g} % of what was said, never below {scene.least} tokens a head: the first, "
        "the latest, and some to sample. Kept: tokens a head, on average."
    )
    with scene.open(load_model(part.source)) as session:
        for number, told in enumerate(scene.streamed(session), 1):
            text = textwrap.shorten(f"{told.user} / {told.reply}", WIDTH - 32, placeholder=" ...")
            line(f"turn {number:2}  {text:{WIDTH - 32}}  {told.tokens:5,} fed {told.kept:4,} kept")
        (end,) = session.cache_kwargs.values()
        shown, others = divided(scene.conversation.questions)
        threshold, source = published(part.model, chosen.profile), f"the calibration of {CLAIM}, as published"
        if threshold is None:
            known = scene.certificates(session, end, others)
            threshold, source = quantile_threshold(known, rho), f"{len(known)} of the other questions, asked just now"
        said(
            f"Questions, each on a fork of that cache. The gate recomputes above {threshold:.4f}: by {source}, about "
            f"{100 * rho:g} % of the certificates lie there."
        )
        heard = [answered(scene.heard(session, end, question, Gate(threshold))) for question in shown]
        table(heard, end.prefix_bytes, time.monotonic() - began)
    return 0


def divided(questions: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The questions that are shown, evenly over the ages, and the others."""
    last = len(questions) - 1
    places = {round(i * last / (ASKED - 1)) for i in range(ASKED)}
    ordered = sorted(questions, key=lambda question: question.age or 0)
    return [ordered[i] for i in sorted(places)], [one for i, one in enumerate(ordered) if i not in places]


def published(model: str, profile: str) -> float | None:
    """The calibrated threshold of this model in the published result, where there is one of this profile.

    Raises UserError for a result that cannot be read.
    """
    if not PUBLISHED.is_file():
        return None
    try:
        result = json.loads(read_text(PUBLISHED.parent, PUBLISHED.name))
        found = result["beside"].get(model, {}).get("threshold") if result["profile"] == profile else None
        return None if found is None else Gate(found).threshold
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{PUBLISHED}: {error!r}; expected the JSON that judging writes, or no such file") from error


def answered(heard: "Heard") -> "Heard":
    """Print one question: both answers, the certificate, and what the gate decided."""
    certificate, recomputed = heard.gated.certificate, heard.gated.decision == "recompute"
    measured = "undefined" if certificate is None else f"{certificate:.4f}"
    ago = f"said {heard.age} turn{'s' * (heard.age != 1)} ago: {heard.value}"
    line()
    line(f"{heard.question:{WIDTH - len(ago) - 1}} {ago}")
    names = ["compressed", "full cache"]
    notes = [f"certificate {measured}: {'recompute' if recomputed else 'answer'}", ""]
    for name, answer, right, note in zip(names, heard.answers, heard.right, notes, strict=False):
        line(
            f"  {name}  {textwrap.shorten(answer, 28, placeholder=' ...'):28}  {'right' if right else 'wrong'}  {note}"
        )
    return heard


def table(heard: Sequence["Heard"], history: tuple[int, int], wall_s: float) -> None:
    """Print what was answered, and what that took."""
    line()
    line(f"{'':12}{'questions':>10}{'right':>10}{'right before':>14}{'prefill tokens fed again':>28}")
    for name, decision in (("answered", "answer"), ("recomputed", "recompute")):
        own = [one for one in heard if one.gated.decision == decision]
        counts = [len(own), sum(one.right[-1] for one in own), sum(one.right[0] for one in own)]
        spent = sum(one.gated.rerun_prefill_tokens for one in own)
        line(f"{name:12}{counts[0]:10}{counts[1]:10}{counts[2]:14}{spent:28,}")
    whole, kept = history
    peak = max((one.gated.peak_bytes or 0 for one in heard), default=0)
    line()
    line(f"cache of the history     {kept / 1e6:6.1f} MB compressed, {whole / 1e6:.1f} MB in full")
    line(
        f"at most in memory        {peak / 1e6:6.1f} MB: compressed, the question's copy, in full"
        if peak
        else "nothing recomputed"
    )
    line(f"time                     {wall_s:6.0f} s, loading included")


def said(text: str) -> None:
    """Print a paragraph, with empty lines around it."""
    line("\n" + textwrap.fill(text, WIDTH) + "\n")


def line(text: str = "") -> None:
    """Print at once, also into a pipe: the conversation is to be followed."""
    print(text.rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(run(main, "interrupted"))
