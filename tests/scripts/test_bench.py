"""make bench on a tiny model: what it writes, says and refuses. Its seconds are never looked at."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from analysis.bench import TARGETS, goal, met, page
from runs.errors import UserError
from scripts import _bench, bench, bench_peers

# Stable: others read bench.json by these names.
STABLE = (
    "decode_cert_over_plain", "decode_plain_over_full", "cache_bytes_fraction", "arms12_over_separate",
    "replay_over_loop", "arm_over_kvpress", "arms12_over_kvpress", "kernel_cert_over_plain", "kernel_over_bandwidth",
)  # fmt: skip
FIELDS = {"name", "ratio", "low", "high", "unit", "of", "over", "why"}
CPU = "decode,arms,replay,growth,kernel"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(bench.json, what was printed, the folder) of one quick run without peers."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ROOT", folder)
        patch.delenv("MODEL", raising=False)
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *x, **k: lines.append(" ".join(map(str, x))))
        assert bench.main(["--quick", "--only", CPU]) == 0
    out = folder / "analysis" / "out"
    return json.loads((out / "bench-quick.json").read_text()), "\n".join(lines), out


def test_every_stable_name_is_there_with_a_ratio_or_a_reason(run) -> None:
    result, _, _ = run
    assert tuple(entry["name"] for entry in result["entries"]) == STABLE and set(TARGETS) <= set(STABLE)
    for entry in result["entries"]:
        assert set(entry) == FIELDS
        if entry["why"]:
            assert entry["ratio"] is entry["low"] is entry["high"] is None
        else:
            assert 0 < entry["low"] <= entry["ratio"] <= entry["high"] < math.inf and entry["of"] and entry["over"]
    why = {entry["name"]: entry["why"] for entry in result["entries"]}
    assert {name for name in STABLE if why[name] is None} >= set(STABLE[:5])
    assert why["arm_over_kvpress"] == why["arms12_over_kvpress"] == f"not asked for: --only {CPU}"
    if not torch.cuda.is_available():
        assert why["kernel_cert_over_plain"] == why["kernel_over_bandwidth"] == "no CUDA device"


def test_what_is_no_second_is_what_it_should_be(run) -> None:
    """Bytes by hand, equal texts, the cells of the smoke grid, sizes of the growth."""
    result, _, _ = run
    beside = result["beside"]
    (share,) = (entry["ratio"] for entry in result["entries"] if entry["name"] == "cache_bytes_fraction")
    assert 0.25 < share < 0.6  # a quarter of 300 tokens, of rows of 16 floats with five scalars, and padding
    assert beside["arms"]["equal_texts"] == beside["arms"]["texts"] == 12
    assert beside["replay"]["cells"] == 2 * 3 * 2 * 2
    assert beside["growth"]["ctx_tokens"] == [100, 200] and beside["growth"]["arms"] == [1, 3]
    assert set(beside["growth"]["step_ms_per_1000_tokens"]) == {"full", "plain", "cert"}
    assert list(result["wall_s"]) == CPU.split(",") and result["model"] == "tiny"
    if not torch.cuda.is_available():
        assert beside["kernel"]["kernel"] == "moments"


def test_the_table_and_the_figure_show_it(run) -> None:
    result, printed, out = run
    for entry in result["entries"]:
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{entry['name']} "))
        assert (entry["why"] in line) if entry["why"] else (f"{entry['ratio']:.3g} [" in line)
    assert "12 of 12" in printed and "the replay's arithmetic takes" in printed
    assert "a tiny random model: these figures mean nothing" in printed
    for name in ("bench-quick.png", "bench-quick.pdf"):
        assert (out / name).stat().st_size > 5000 and f"analysis/out/{name}" in printed


def test_a_ratio_meets_its_bound_or_says_no() -> None:
    entry = {"name": "replay_over_loop", "ratio": 19.9}
    assert met(entry) is False and goal(entry) == "at least 20: NO"
    assert goal(entry | {"ratio": 20.0}) == "at least 20: yes"
    entry = {"name": "decode_cert_over_plain", "ratio": 1.16}
    assert goal(entry) == "at most 1.15: NO" and goal(entry | {"ratio": 1.15}) == "at most 1.15: yes"
    assert goal(entry | {"ratio": None}) == "at most 1.15" and goal({"name": "cache_bytes_fraction", "ratio": 9}) == ""


def test_a_section_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="--only speed: expected some of decode, arms, replay, growth, peers, kernel"):
        bench.main(["--only", "decode,speed"])


# ---------------------------------------------------------------- progress


def test_the_time_left_follows_the_published_run() -> None:
    """This machine is 3 times slower by the first section; 10 s into the second of 20."""
    progress = bench.Progress(
        ["decode", "arms", "growth"], {"decode": 10, "arms": 20, "growth": 5, "peers": 9}, began=0
    )
    progress.section = "decode"
    assert progress.left(4.0) == "; about 31 s left"
    progress.done(30.0)
    progress.section = "arms"
    assert progress.left(40.0) == "; about 65 s left"
    assert progress.left(400.0) == "; about 15 s left"
    assert bench.Progress(["decode"], {}, section="decode").left(1.0) == ""


def test_progress_is_seldom_where_nobody_watches(capsys, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    progress = bench.Progress(["arms"], {"arms": 60}, section="arms", began=100.0)
    for _ in range(25):
        now[0] += 1
        progress("turn 1 of 3: alone")
    lines = capsys.readouterr().err.splitlines()
    shown = [re.fullmatch(r" +(\d+) s  arms: turn 1 of 3: alone; about (\d+) s left", line) for line in lines]
    assert [one and one.groups() for one in shown] == [("1", "59"), ("12", "48"), ("23", "37")]


# ---------------------------------------------------------------- the page


def test_no_page_of_a_run_of_some_sections(run, monkeypatch, tmp_path) -> None:
    result, _, out = run
    monkeypatch.setattr(bench, "ROOT", out.parents[1])
    monkeypatch.setattr(bench, "DOCS", tmp_path)
    with pytest.raises(UserError, match="the last run was a quick one, whose figures mean nothing"):
        bench.main(["--publish", "--quick"])
    real = result | {"model": "another"}
    (out / "bench.json").write_text(json.dumps(real))
    with pytest.raises(UserError, match="the last run left peers out; expected one of make bench"):
        bench.main(["--publish"])
    assert not list(tmp_path.iterdir())
    bench.publish(real | {"wall_s": dict.fromkeys(_bench.RUN, 30.0)})
    text = (tmp_path / "speed.md").read_text()
    assert text == page(json.loads((tmp_path / "speed.json").read_text())) and "another; 3 minutes" in text
    assert all(f"| `{name}` |" in text for name in STABLE) and (tmp_path / "speed.png").is_file()
    with pytest.raises(UserError, match=r"nothing\.json: no such file"):
        bench.main(["--publish", "--out", "nothing"])


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ('{"entries": [', "Expecting value"),
        ("[]", "expected the keys machine, model, wall_s"),
        ("[" * 100_000, "maximum recursion"),
        ({"wall_s": 3}, "wall_s: expected seconds"),
        ({"wall_s": dict.fromkeys(_bench.RUN, "3")}, "wall_s: expected seconds"),
        ({"entries": [{"name": "replay_over_loop"}]}, "no whole result"),
        ({"entries": [dict.fromkeys(FIELDS, "1")]}, "no whole result"),
        ({"machine": []}, "no whole result"),
        ({"beside": {"growth": 3}}, "no whole result"),
        ({"beside": {"decode_s": {"full": "slow"}}}, "no whole result"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_a_damaged_result_is_one_line_and_publishes_nothing(run, monkeypatch, tmp_path, damaged, said) -> None:
    whole = run[0] | {"model": "another", "wall_s": dict.fromkeys(_bench.RUN, 30.0)}
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "DOCS", tmp_path / "docs")
    path = tmp_path / "analysis" / "out" / "bench.json"
    path.parent.mkdir(parents=True)
    path.write_text(damaged if isinstance(damaged, str) else json.dumps(whole | damaged))
    with pytest.raises(UserError, match=rf"{said}.*; make bench writes it anew"):
        bench.main(["--publish"])
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize("name", ["", "../x", "/tmp/x", "a/b", ".", "..", "a\n", "-x"])
def test_the_name_of_the_files_is_no_path(name: str) -> None:
    for more in (["--publish"], ["--quick", "--only", "decode"]):
        with pytest.raises(UserError, match=r"--out .*: expected a name"):
            bench.main([f"--out={name}", *more])


def test_what_cannot_be_written_is_shown_all_the_same(run, monkeypatch, tmp_path, capsys) -> None:
    """A file where the folder should be: the table is printed, then one line says what was in the way."""
    (tmp_path / "analysis").write_text("")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "measured", lambda *_: run[0])
    with pytest.raises(UserError, match="cannot write"):
        bench.main(["--quick"])
    assert "decode_cert_over_plain" in capsys.readouterr().out


def test_the_published_page_and_figure_are_of_the_published_run() -> None:
    published = json.loads((ROOT / "docs" / "speed.json").read_text())
    assert tuple(entry["name"] for entry in published["entries"]) == STABLE
    assert (ROOT / "docs" / "speed.md").read_text() == page(published)
    assert set(published["wall_s"]) == set(_bench.RUN) and (ROOT / "docs" / "speed.png").is_file()


# ---------------------------------------------------------------- peers


FAKE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    assert request["do"] == "one" and 0 < request["budget"] < 1
    print(json.dumps({"seconds": 2.0, "peak_bytes": 5, "cache_bytes": 7, "answer": [65] * request["tokens"]}), flush=True)
"""


def test_peers_take_turns_with_ours(monkeypatch, tmp_path) -> None:
    """A process stands for kvpress; ours is real, on a tiny folder."""
    from tiny_folder import tiny_folder

    fake, size = tmp_path / "fake.py", bench_peers.Size(200, 3, 2, 1, 1)
    fake.write_text(FAKE)
    folder = tiny_folder(tmp_path / "model", max_position_embeddings=2048)
    real = bench_peers.worker

    def worker(command):
        return real([sys.executable, str(fake)] if "scripts._peer_kvpress" in command else command)

    monkeypatch.setattr(bench_peers, "worker", worker)
    monkeypatch.setattr(bench_peers, "environment", lambda: Path(sys.executable))
    entries, beside = bench_peers.compare(str(folder), size, lambda _: None)
    assert [entry.name for entry in entries] == list(bench_peers.NAMES) and all(entry.ratio > 0 for entry in entries)
    assert list(beside["one"]) == ["certified", "snapkv", "kvpress"] and set(beside["score"]) == {
        *beside["one"],
        "full",
    }
    assert beside["one"]["kvpress"] == {"seconds": [2.0, 2.0], "peak_bytes": 5, "cache_bytes": 7}
    assert len(beside["one"]["certified"]["seconds"]) == 2 and beside["one"]["certified"]["cache_bytes"] > 0
    assert beside["twelve"]["kvpress"] == [24.0] and len(beside["twelve"]["ours"]) == 1
    text = bench_peers.table(beside)
    assert "twelve, kvpress: 24.0 s" in text and "kvpress" in text.splitlines()[3]


def test_peak_memory_is_that_of_the_process_itself() -> None:
    """Started by one that holds more; 64 MiB that it takes itself count."""
    code = "from scripts._peer import peak_bytes as p; a = p(); x = bytearray(b'1' * 2**26); print(a, p())"
    held = bytearray(b"1" * 2**29)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 1e6 < before < after - 2**26 + 1e6 < len(held) / 2


def test_a_process_that_dies_is_said() -> None:
    dies = [sys.executable, "-c", "raise SystemExit(3)"]
    with bench_peers.worker(dies) as ask, pytest.raises(UserError, match="ended with 3"):
        ask({"do": "one", "ids": list(range(50_000))})


def test_without_kvpress_its_entries_say_why(monkeypatch, tmp_path, capsys) -> None:
    """A package that no index has: one line, no stamp, and the entries of bench.json carry the reason."""
    pins = tmp_path / "pins"
    pins.write_text("--no-index\nkvpress==0\n")
    monkeypatch.setattr(bench_peers, "PINS", pins)
    monkeypatch.setattr(bench_peers, "ENVIRONMENT", tmp_path / "venv")
    told = _bench.Bench(_bench.QUICK, bench.Watch(lambda _: None))
    _bench.peers(told)
    assert [entry.name for entry in told.entries] == list(bench_peers.NAMES)
    for entry in told.entries:
        assert entry.ratio is None and re.match("kvpress could not be installed: .*kvpress==0", str(entry.why))
        assert "\n" not in entry.why
    assert not (tmp_path / "venv" / "ready").exists() and not told.beside


def test_an_environment_is_taken_for_ready_only_with_its_python_and_pins(monkeypatch, tmp_path) -> None:
    """A stamp of other pins, or beside no Python, is none; pins that are gone or no text are one line."""
    pins, venv = tmp_path / "pins", tmp_path / "venv"
    monkeypatch.setattr(bench_peers, "PINS", pins)
    monkeypatch.setattr(bench_peers, "ENVIRONMENT", venv)
    packages = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    made: list[list[str]] = []
    monkeypatch.setattr(bench_peers, "_told", made.append)
    for wanted, python, again in (("1", False, True), ("1", True, False), ("1", False, True), ("2", True, True)):
        pins.write_text(f"kvpress=={wanted}\n")
        (venv / "bin" / "python").touch() if python else (venv / "bin" / "python").unlink(missing_ok=True)
        made.clear()
        bench_peers.environment()
        assert bool(made) is again and (venv / "ready").read_text() == pins.read_text()
    pins.write_bytes(b"\xff")
    with pytest.raises(UserError, match="pins: cannot be read"):
        bench_peers.environment()
    pins.unlink()
    with pytest.raises(UserError, match="pins: cannot be read"):
        bench_peers.environment()


def test_a_model_that_kvpress_cannot_load_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(bench_peers, "environment", lambda: Path(sys.executable))
    with pytest.raises(UserError, match=r"model tiny: kvpress is asked about a \.gguf file or a folder"):
        bench_peers.compare("tiny", bench_peers.Size(), lambda _: None)


def test_pins_of_kvpress_are_exact_and_needed() -> None:
    """Each is a pin, of another version than requirements.lock has or absent there."""

    def pins(name: str) -> dict[str, str]:
        lines = [x.split(";")[0].strip() for x in (ROOT / name).read_text().splitlines() if x and not x.startswith("#")]
        return dict(line.split("==") for line in lines)

    theirs, lock = pins("requirements.kvpress"), pins("requirements.lock")
    assert theirs["kvpress"] and theirs["transformers"] != lock["transformers"]
    assert all(lock.get(name) != version for name, version in theirs.items())
