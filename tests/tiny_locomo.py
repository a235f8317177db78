"""LoCoMo's form in small: made-up conversations, for tests and the smoke profile's size. No real text."""

import json
from pathlib import Path
from typing import Any

FRIENDS = (("Ada", "Ben"), ("Cleo", "Dan"), ("Eve", "Finn"))
THINGS = ("a red kite", "two old maps", "a tin whistle", "green paint", "a long rope", "three stamps")


def conversation(number: int, sessions: int = 3, messages: int = 2) -> dict[str, Any]:
    """One conversation; session s is about THINGS[s - 1], and one question of each category asks for it."""
    one, other = FRIENDS[number]
    talk: dict[str, Any] = {"speaker_a": one, "speaker_b": other}
    for s in range(1, sessions + 1):
        talk[f"session_{s}_date_time"] = f"{s}:05 pm on {s} May, 2023"
        talk[f"session_{s}"] = [
            {"speaker": (one, other)[i % 2], "dia_id": f"D{s}:{i + 1}", "text": f"Today I found {THINGS[s - 1]}, {i}."}
            for i in range(messages)
        ]
    asked = [
        {
            "question": f"What did {one} find on day {s}?",
            "answer": THINGS[s - 1],
            "evidence": [f"D{s}:1"],
            "category": c,
        }
        for s, c in zip((1, 2, 3, 1), (1, 2, 3, 4), strict=True)
    ]
    trap = {"question": f"What did {other} lose?", "adversarial_answer": "a hat", "evidence": ["D2:1"], "category": 5}
    return {"sample_id": f"talk-{number}", "conversation": talk, "qa": [*asked, trap], "event_summary": {}}


def write(folder: Path, *conversations: Any, name: str = "locomo.json") -> str:
    """The file with these conversations, as DATA= takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(list(conversations)), encoding="utf-8")
    return str(folder / name)
