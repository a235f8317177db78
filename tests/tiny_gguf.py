"""A GGUF file of a tiny random model, written as llama.cpp writes one, for tests that need MODEL=<file>.gguf."""

from pathlib import Path

import gguf
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

GEMMAS = ("gemma2", "gemma3")  # sentencepiece, sliding layers, and 1 + weight for the weight of a norm
WORDS = ["▁", "t", "h", "e", "▁t", "he", "▁the", "a", "▁a", "n", "i", "s", "o", "r"]


def write_gguf(model: PreTrainedModel, architecture: str, path: Path) -> Path:
    """Write `model` (llama.cpp's names, float32 weights) with the tokenizer its family has; returns the path."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture in GEMMAS:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        _sentencepiece(writer, config.vocab_size)
    else:
        _byte_level(writer)
    (arch,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        one_more = architecture in GEMMAS and "norm" in name
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", (weight.float() + one_more).contiguous().numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _byte_level(writer: gguf.GGUFWriter) -> None:
    """Qwen's kind of tokenizer: the 256 bytes and one merge."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*bytes_to_unicode().values(), "th"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["t h"])


def _sentencepiece(writer: gguf.GGUFWriter, size: int) -> None:
    """Gemma's kind: special tokens, 256 bytes to fall back to, a few words."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    kinds = [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(WORDS)
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    kinds += [gguf.TokenType.NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types(kinds)
    for number, name in enumerate(("pad", "eos", "bos", "unk")):
        getattr(writer, f"add_{name}_token_id")(number)
