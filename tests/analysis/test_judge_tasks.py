"""Answers in a store to verdict, text and figure: claims 3 to 7 and extensions 1 and 5, end to end."""

import ast
from dataclasses import replace

import planted
import planted_tasks
import pytest
from conftest import ROOT

from analysis import figures, text
from analysis.judge import judged
from runs import prereg

RULES = replace(prereg.load().rules, resamples=300)
CLAIMS = ("claim-3", "claim-4", "claim-5", "claim-6", "claim-7", "extension-1")
EVERY = (*CLAIMS, "extension-5")
SUITE = ("needle", "multi_key", "key_value", "tracking")


def plans(root, requests=4, documents=24):
    suite = planted_tasks.plan(root, 40, 1, planted_tasks.SYNTHETIC, SUITE, grid="synthetic")
    return planted_tasks.plan(root, documents, requests), suite


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Both grids whole: the certificate tells lost answers apart, twice the budget loses fewer."""

    def change(cell, row):
        return row | ({"official": 1.0} if cell["arm"] == "poisson aware 0.5" else {})

    root = planted_tasks.study(tmp_path_factory.mktemp("study"))
    tasks, suite = plans(root)
    planted.fill(root, tasks, planted_tasks.world(tasks, known=0.7, apart=2.5, damage=0.4, change=change))
    planted.fill(root, suite, planted_tasks.world(suite, known=0.9, apart=2.5))
    return root, {claim: judged(claim, root=root, rules=RULES) for claim in EVERY}


@pytest.mark.parametrize(
    ("claim", "expected"),
    [("claim-4", "SUPPORTED"), ("claim-6", "SUPPORTED"), ("claim-7", "SUPPORTED"), ("extension-1", "SUPPORTED"),
     ("extension-5", "SUPPORTED"), ("claim-3", "INCONCLUSIVE"), ("claim-5", "SUPPORTED")],
)  # fmt: skip
def test_planted_answers_give_their_verdict(study, claim, expected) -> None:
    _, found = study
    result = found[claim].result
    assert (result["verdict"], result["missing"], result["failed"]) == (expected, 0, 0), result["reasons"]


@pytest.mark.parametrize("claim", EVERY)
def test_the_text_says_sizes_intervals_what_is_left_out_and_what_words_mean(study, claim) -> None:
    _, found = study
    result = found[claim].result
    said = text.render(result)
    plain = " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 100
    for stratum in result["strata"]:
        assert f"{stratum['n']:,} {result['unit']}, {stratum['clusters']} documents" in plain
        assert all(f"{count} {name}" in plain for name, count in stratum["classes"].items())
        for of in stratum["measures"].values():
            assert f"{of['low']:.4f} to {of['high']:.4f}" in said
    assert "left out failed" in plain and result["unit"] in ("pairs", "answers", "failures")
    registered = prereg.load().claim(claim)
    for name in registered.beside:
        assert f"{name.replace('_', ' ')}: {' '.join(registered.beside[name].split())}" in plain or name == "draw_noise"
    for beside in result["beside"].values():
        for value in beside.values():
            if isinstance(value, dict) and value.get("low") is not None and "estimate" in value:
                assert f"{value['estimate']:.3f} [{value['low']:.3f}, {value['high']:.3f}]" in plain


def test_each_thing_that_stands_beside_is_registered(study) -> None:
    _, found = study
    for claim in EVERY:
        for beside in found[claim].result["beside"].values():
            unnamed = beside.keys() - prereg.load().claim(claim).beside.keys()
            assert unnamed <= {"left_out", "notes", "curve"}, (claim, unnamed)


def test_a_note_is_printed_with_its_stratum(study) -> None:
    _, found = study
    result = found["claim-6"].result
    assert "512 tokens: no room" not in text.render(result)
    noted = result | {"beside": {"512 tokens": result["beside"]["512 tokens"] | {"notes": ["no room: nobody could"]}}}
    assert "note         512 tokens: no room: nobody could" in text.render(noted)


def test_failed_answers_reach_the_estimand_as_failed_pairs(tmp_path) -> None:
    root = planted_tasks.study(tmp_path)
    made, _ = plans(root)
    planted.fill(root, made, planted_tasks.world(made), failing={"facts 3"})
    result = judged("claim-3", root=root, rules=RULES).result
    assert result["verdict"] == "NOT_EVALUATED" and result["failed"] == 48
    assert "512 tokens, budget 25 %: 4 of 96 pairs have a failed member (4.2%, at most 1%)" in result["reasons"]
    assert [(s["n"], s["clusters"]) for s in result["strata"]] == [(92, 23)] * 2
    assert [of["left_out"] for of in result["beside"].values()] == [{"failed pairs": 4}] * 2


def test_a_missing_unit_forbids_a_verdict_and_what_there_is_is_shown(tmp_path) -> None:
    root = planted_tasks.study(tmp_path)
    made, _ = plans(root)
    planted.fill(root, made, planted_tasks.world(made), units=list(made.units)[:-1])
    result = judged("claim-7", root=root, rules=RULES).result
    assert result["verdict"] == "NOT_EVALUATED" and "192 of 1,152 cells missing" in result["reasons"]
    assert result["strata"][0]["estimate"] > 0.5


@pytest.mark.parametrize("claim", EVERY)
def test_equal_answers_give_equal_figures(study, claim, tmp_path) -> None:
    _, found = study
    frame, result = found[claim].frame, found[claim].result
    once, twice = (figures.draw(claim, frame, result, tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in twice]
    assert all(path.stat().st_size > 8_000 for path in once) and len(once) == 2


@pytest.mark.parametrize("documents", [1, 3])
def test_figures_survive_answers_of_few_documents(tmp_path, documents) -> None:
    """One document: no interval. No failure at all: no AUC, no class."""
    root = planted_tasks.study(tmp_path / "study")
    for made in (planted_tasks.plan(root, documents), plans(root)[1]):
        planted.fill(root, made, planted_tasks.world(made, known=1.0, damage=0.0 if documents == 3 else 0.5))
    for claim in EVERY:
        found = judged(claim, root=root, rules=RULES)
        whole = claim == "extension-5" and documents == 1  # its own plan has all documents
        assert found.result["verdict"] == ("SUPPORTED" if whole else "NOT_EVALUATED") and text.render(found.result)
        assert len(figures.draw(claim, found.frame, found.result, tmp_path)) == 2


def test_all_failed_has_a_text_and_a_verdict(tmp_path) -> None:
    root = planted_tasks.study(tmp_path / "study")
    made = planted_tasks.plan(root, 3)
    planted.fill(root, made, planted_tasks.world(made), failing={f"facts {k}" for k in range(3)})
    for claim in CLAIMS:
        found = judged(claim, root=root, rules=RULES)
        assert found.result["verdict"] == "NOT_EVALUATED" and "counts" in text.render(found.result)
        assert len(figures.draw(claim, found.frame, found.result, tmp_path)) == 2


@pytest.mark.parametrize("claim", [*EVERY, "claim-1", "claim-2", "extension-6"])
def test_the_judging_digest_covers_every_module_a_verdict_rests_on(claim) -> None:
    of = prereg.load().claim(claim)
    todo, reached = [f"analysis/estimands/{of.estimand}.py"], set()
    while todo:
        path = todo.pop()
        reached.add(path)
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("analysis"):
                stem = (node.module or "").replace(".", "/")
                target = f"{stem}.py" if (ROOT / f"{stem}.py").exists() else f"{stem}/__init__.py"
                todo += [target] if target not in reached else []
    assert reached - set(prereg.JUDGING) == set(of.judging)
