"""Model folders that would load other files than their digest knows, or fail in the middle: one line before any work."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_folder import tiny_folder

from runs import chat, models, sources
from runs.architectures import check_architecture
from runs.errors import UserError

WEIGHTS, INDEX = "model.safetensors", sources.INDEX


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "small")


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        sources.resolve(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sharded(folder: Path, place: str) -> dict[str, str]:
    """The folder's weights moved to `place`, an index that says so, and a file that keeps it from looking empty."""
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / WEIGHTS).rename(folder / place)
    shutil.copy(folder / place, folder / "other.safetensors")
    names = dict.fromkeys(models.safe_open(str(folder / place), "pt").keys(), place)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


@pytest.mark.parametrize("place", ["../elsewhere.safetensors", "below/model.safetensors"])
def test_weights_outside_the_folder_are_refused_since_its_digest_would_not_change_with_them(folder, place) -> None:
    sharded(folder, place)
    assert f"'{place}' is no file of" in refused(folder)


def test_a_shard_that_is_missing_is_named_before_any_work(folder) -> None:
    names = sharded(folder, "model-00001-of-00002.safetensors")
    assert sources.resolve(str(folder)).kind == "folder"
    names[next(iter(names))] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert "'model-00002-of-00002.safetensors' is no file of" in refused(folder)
    for text in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'):
        (folder / INDEX).write_text(text)
        assert "no weight_map" in refused(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": 3}}')
    assert "'3' is no file of" in refused(folder)


def test_an_index_beside_whole_weights_is_never_read(folder) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    assert sources.resolve(str(folder)).kind == "folder"


def test_what_would_load_another_model_is_refused(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "below/other.safetensors"}))
    assert "transformers_weights" in refused(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    assert "adapter" in refused(folder)


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("/nowhere/at/all"), Path.mkdir, os.mkfifo],
    ids=["broken link", "folder", "pipe"],
)
def test_weights_that_are_no_file_are_named(folder, make: Callable[[Path], object]) -> None:
    """A hub cache that was cleared in part has such links; a pipe would keep the reader waiting for ever."""
    make(folder / "model-00002-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors: no regular file" in refused(folder)


def with_config(folder: Path, **changes: object) -> sources.Source:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return sources.resolve(str(folder))


def test_configs_that_no_library_refuses_are_one_line(folder) -> None:
    with pytest.raises(UserError, match="1,000,000,000 layers"):  # before its memory is asked for
        models.shape(with_config(folder, num_hidden_layers=10**9))
    source = with_config(folder, text_config={"model_type": "llama"})
    for asked in (models.shape, check_architecture):
        with pytest.raises(UserError, match="text part"):
            asked(source)


def test_weights_of_another_shape_are_named(folder) -> None:
    with pytest.raises(UserError, match=r"have in another shape 2 weights of its config, such as \('lm_head.weight'"):
        models.load_model(with_config(folder, vocab_size=300))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 2.0 ** 99999 }}", "out of range"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ('{{ "\\ud800" }}{% for m in messages %}{{ m.content }}{% endfor %}', "surrogate"),
    ],
)
def test_a_chat_template_fails_in_one_line_whatever_it_raises(folder, template, says) -> None:
    tokenizer = models.load_tokenizer(sources.resolve(str(folder)))
    tokenizer.chat_template = template  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=f"chat template fails: .*{says}"):
        chat.prompt_of(tokenizer)


def test_a_name_is_one_that_figures_latex_html_and_terminals_take(folder, tmp_path) -> None:
    odd = shutil.copytree(folder, tmp_path / "we <b>ird$x_1{$\n|na`me|%&#\\\x1b[2J é (Q4_1)")
    found = sources.resolve(str(odd))
    assert found.name == "we _b_ird_x_1____na_me______[2J é (Q4_1)"
    assert found.digest == sources.resolve(str(folder)).digest
    assert sources.resolve(str(folder.rename(tmp_path / "$"))).name == "_"
