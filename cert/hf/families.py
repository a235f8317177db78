"""Which decoders are served, by model type: those that pass tests/cert/hf/test_hf_families.py; others are refused."""

TESTED = {
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "gpt_neox", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "internlm3", "llama", "llama4_text",
    "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
}  # fmt: skip
LATENT = "latent attention (MLA), whose cache holds neither keys nor values"
_BECAUSE = {
    "does not follow transformers' attention interface": "bloom mpt",
    "layers that keep a state instead of keys and values": "falcon_h1 jamba lfm2 mamba qwen3_next",
    "layers share their keys and values (KV sharing)": "gemma3n_text",
    "learned sink logits": "gpt_oss mimo_v2_flash",
    "its attention reads other keys or values than its cache returns": "diffllama jetmoe",
    "a learned mask of its own, which evicted layers would not see": "doge",
    LATENT: "deepseek_v3 minicpm3",
}
REFUSED = {name: why for why, names in _BECAUSE.items() for name in names.split()}
