"""A Hugging Face folder of a tiny random model with a byte-level tokenizer, for tests that need MODEL=<folder>."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def tiny_folder(folder: Path, family: str = "llama", seed: int = 0, **changes: object) -> Path:
    """Write config, safetensors and tokenizer of a random model of a family; `changes` go to its config."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
