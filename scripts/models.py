"""Write docs/models.md, which models the library serves: python -m scripts.models. --check: exit 1 where it is stale."""

import argparse
import sys

import yaml

from cert.hf.families import REFUSED, TESTED
from runs.registry import ROOT
from scripts._cli import run

PATH = ROOT / "docs" / "models.md"
MODELS = {  # model type -> models that have it, where the type does not say it
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A; sliding layers stay as they are",
    "ernie4_5": "ERNIE 4.5, dense",
    "exaone4": "EXAONE 4; sliding layers stay as they are",
    "gemma2": "Gemma 2; soft-capped logits, with `attn_implementation='eager'`; sliding layers stay as they are",
    "gemma3_text": "Gemma 3; sliding layers stay as they are",
    "gpt_neox": "Pythia, GPT-NeoX",
    "hunyuan_v1_dense": "Hunyuan, dense",
    "llama": "Llama 2 to 3.3, SmolLM and SmolLM2, Falcon 3, Yi, TinyLlama",
    "llama4_text": "Llama 4; chunked layers stay as they are",
    "ministral": "Ministral; sliding layers stay as they are",
    "mistral": "Mistral 7B v0.2 and later, Mistral Nemo; v0.1 is refused, every layer of it is sliding",
    "olmo3": "OLMo 3; sliding layers stay as they are",
    "phi": "Phi 1 to 2",
    "phi3": "Phi 3 to 4, where the config sets no sliding window; longrope: see below",
    "phimoe": "Phi 3.5 MoE; longrope: see below",
    "qwen2": "Qwen2 and Qwen2.5",
    "smollm3": "SmolLM3; layers without positions (NoPE)",
    "starcoder2": "StarCoder2, where the config sets no sliding window",
    "vaultgemma": "VaultGemma; soft-capped logits, with `attn_implementation='eager'`",
}
RULES = """\
Whatever the type, refused by name before any work:

* every layer is sliding: nothing to compress
* attention does not go through transformers' attention interface, or the model does not take an implementation it is given
* layers share their keys and values, learn sink logits, attend in both directions, or have another kind of cache
* soft-capped logits under `sdpa`, which leaves the cap out or stops

Refused while serving: a text that grows past the length from which longrope (Phi 3, Phi 3.5 MoE and others) rotates all
keys otherwise, in whatever mode. Keys cached before no longer fit, and transformers drops the cache of Phi 3 there. Texts
that end at that length, and prompts or contexts that are longer from their first forward on, are served. With
transformers 5.3 Phi 3 loses its cache at every step beyond it, which is refused too."""
REPLAY = """\
The replay (claims 1 and 2, extensions 4 and 6) refuses the same types and settings, in one line and before any work, and
soft-capped logits (Gemma 2, VaultGemma) as well: it computes full and retained attention from the captured queries, keys
and values without a cap, so that what it compared would not be the model's attention. It takes {layers} layers with
full attention and {heads} query heads at least, {smoke_layers} and {smoke_heads} with `PROFILE=smoke`, and steps that do
not cross the length of longrope. The task grids serve what `certified()` serves; an example that crosses that length is a
failed row that says so."""


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 1 where --check finds another page than the tables give."""
    parser = argparse.ArgumentParser(prog="python -m scripts.models", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where docs/models.md is stale")
    if parser.parse_args(argv).check:
        fresh = PATH.is_file() and PATH.read_text() == page()
        print(f"{PATH.name}: {'up to date' if fresh else 'stale, run: python -m scripts.models'}")
        return int(not fresh)
    PATH.write_text(page())
    return 0


def page() -> str:
    """The page, from the tables of cert.hf.families."""
    served = [f"| `{name}` | {MODELS.get(name, '')} |" for name in sorted(TESTED)]
    refused = [f"| `{name}` | {REFUSED[name]} |" for name in sorted(REFUSED)]
    lines = [
        "## Models that `certified()` serves",
        "",
        "Written by `python -m scripts.models`; `tests/cert/hf/test_hf_families.py` is the evidence. By `model_type` of",
        "the config (of its text part). A tiny random model of each type equals dense attention with the evicted columns",
        "masked and the same offset added to 1e-5 in float32, question-aware, question-agnostic, streaming and while",
        "generating, and is bit-equal to itself at budget 1.0. Any other type is refused by name. `make test-matrix` runs",
        "them with the oldest transformers too, which does not know every one.",
        "",
        "| `model_type` | models |",
        "|---|---|",
        *served,
        "",
        "| refused | because |",
        "|---|---|",
        *refused,
        "",
        RULES,
        "",
        REPLAY.format(**_least("laptop"), **_least("smoke", "smoke_")),
    ]
    return "\n".join(lines) + "\n"


def _least(profile: str, prefix: str = "") -> dict[str, int]:
    """Layers and query heads that the replay of a profile takes."""
    block = yaml.safe_load((ROOT / "configs" / "profile" / f"{profile}.yaml").read_text(encoding="utf-8"))["replay"]
    return {prefix + name: block[name] for name in ("layers", "heads")}


if __name__ == "__main__":
    sys.exit(run(main))
