"""GGUF files of other families than the laptop model's: loaded by path, exact, and taken through claim-1."""

import json
from pathlib import Path

import pytest
import torch
from checkout import checkout, command
from tiny_folder import SMALL
from tiny_gguf import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cert.hf import certified
from cert.policy import Policy
from runs import models, sources

QWEN2 = {**SMALL, "vocab_size": 257, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
# As Gemma 3 1B: five sliding layers to a full one, head_dim 256 in one KV head, whatever the hidden size.
GEMMA3 = {**SMALL, "vocab_size": 280, "num_hidden_layers": 12, "head_dim": 256, "num_key_value_heads": 1,
          "sliding_window": 24, "query_pre_attn_scalar": 256, "num_attention_heads": 4}  # fmt: skip
FILES = {"qwen2": ("qwen2", QWEN2, (0, 1)), "gemma3": ("gemma3_text", GEMMA3, (5, 11))}


@pytest.fixture(scope="module", params=FILES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, str, Path]:
    """(the model that was written, its architecture, the file)."""
    family, config, _ = FILES[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), dtype=torch.float32).eval()
    path = tmp_path_factory.mktemp("gguf") / f"tiny {request.param}.gguf"
    return model, request.param, write_gguf(model, request.param, path)


@torch.no_grad()
def test_loaded_as_written_and_served(made: tuple[PreTrainedModel, str, Path], tmp_path: Path, monkeypatch) -> None:
    model, architecture, path = made
    monkeypatch.setenv("KVCERT_CACHE", str(tmp_path))
    source = sources.resolve(str(path))
    shape = models.shape(source)
    assert not list(tmp_path.iterdir()), "a plan needs the config alone"
    loaded, tokenizer = models.load_model(source), models.load_tokenizer(source)
    assert models.shape(source) == shape
    ids = torch.randint(5, 250, (1, 90))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert shape.layers == FILES[architecture][2]
    text = "the cat is naïve"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False).strip() == text
    with certified(loaded, Policy.preset("certified", budget=0.6, sinks=2, recent=8, window=8)) as session:
        loaded.generate(ids, max_new_tokens=3, do_sample=False)
        assert tuple(session.cache.compressible) == FILES[architecture][2]
        assert session.summary()["realised_budget"] < 0.8 and session.summary()["certificate"]["value"] > 0


def test_claim_1_runs_on_it(made: tuple[PreTrainedModel, str, Path], tmp_path: Path) -> None:
    """In the smoke profile; a file's weights cannot be seen to be random, so what is judged says whose they are."""
    _, architecture, path = made
    variables = {
        "PROFILE": "smoke",
        "MODEL": str(path),
        "STORE": str(tmp_path),
        "KVCERT_CACHE": str(tmp_path / "cache"),
    }
    done = command(checkout(tmp_path / "copy"), "claim", "claim-1", "--json", **variables)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["rows"], result["missing"], result["failed"]) == (96, 0, 0)
    assert result["population"].startswith(f"tiny {architecture}") and result["verdict"] == "NOT_EVALUATED"


def test_a_soft_capped_one_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma2", **SMALL | {"vocab_size": 280, "head_dim": 8, "sliding_window": 24})
    path = write_gguf(AutoModelForCausalLM.from_config(config), "gemma2", tmp_path / "capped.gguf")
    variables = {"PROFILE": "smoke", "MODEL": str(path), "STORE": str(tmp_path / "rows")}
    cache = tmp_path / "cache"
    done = command(checkout(tmp_path / "copy"), "claim", "claim-1", KVCERT_CACHE=str(cache), **variables)
    assert done.returncode == 2 and not cache.exists() and not (tmp_path / "rows").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: model capped: the replay cannot measure it: soft-capped logits"), line
