"""Which decoders are served, by model type: those that pass tests/cert/hf/test_hf_families.py; others are refused."""

from typing import Any

TESTED = {
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "gpt_neox", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "internlm3", "llama", "llama4_text",
    "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
}  # fmt: skip
SHARED = "layers share their keys and values (KV sharing)"
LATENT = "latent attention (MLA), whose cache holds neither keys nor values"
_BECAUSE = {
    "does not follow transformers' attention interface": "bloom mpt",
    "layers that keep a state instead of keys and values": "falcon_h1 jamba lfm2 mamba qwen3_next",
    SHARED: "gemma3n_text",
    "learned sink logits": "gpt_oss mimo_v2_flash",
    "its attention reads other keys or values than its cache returns": "diffllama jetmoe",
    "a learned mask of its own, which evicted layers would not see": "doge",
    LATENT: "deepseek_v3 minicpm3",
}
REFUSED = {name: why for why, names in _BECAUSE.items() for name in names.split()}


def refusal(config: Any) -> str | None:
    """Why the attention of a config (of its text part) is not served, by its type or by what it sets; None: it may be."""
    if getattr(config, "num_kv_shared_layers", 0) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        return SHARED
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention is set, which the retained attention does not support"
    return LATENT if getattr(config, "kv_lora_rank", None) else None


def untested(config: Any) -> str | None:
    """That nobody tested the config's type, or None."""
    kind = config.model_type
    return None if kind in TESTED else f"model type {kind!r} is not among the tested ones (docs/models.md)"


def longrope_length(config: Any) -> int | None:
    """The length up to which longrope takes its short factors, and beyond which its long ones; None for other rotations."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return next((x["original_max_position_embeddings"] for x in kinds if x.get("rope_type") == "longrope"), None)
