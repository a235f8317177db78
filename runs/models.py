"""Loading a model and its tokenizer: float32, safetensors only, no remote code; GGUF converted once into a cache."""

import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
from huggingface_hub.utils import logging as hub_logging
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cert.hf.families import longrope_length
from runs.data import Tokenizer
from runs.errors import UserError
from runs.sources import TINY, Source, cache_folder, file_sha256

transformers_logging.set_verbosity_error()
hub_logging.set_verbosity_error()  # ten lines of retries before our one line
transformers_logging.disable_progress_bar()


TOLD = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # weights that do not fit: named by us
MOST_LAYERS = 10_000  # a damaged file can say billions, which would fill the memory before anything else is looked at


class ByteTokenizer:
    """UTF-8 bytes as tokens, for the tiny model: real text without a vocabulary file."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002 - it has no special tokens
        """Token ids 0..255, one a byte."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002 - likewise
        """Text of the bytes; broken characters at a cut become U+FFFD."""
        return bytes(ids).decode(errors="replace")


@dataclass(frozen=True)
class Shape:
    """What the plan needs to know of a model before its weights are loaded."""

    layers: tuple[int, ...]  # the layers with full attention, which are the ones compressed
    heads: int
    kv_heads: int
    positions: int
    vocabulary: int
    longrope: int | None  # the length beyond which all keys are rotated otherwise, where there is one


def shape(source: Source) -> Shape:
    """Layers, heads and positions of a model, from its config alone.

    Raises UserError for an architecture that is not a causal language model, and for one without full attention.
    """
    config = text_config(source)
    with explained(source, "config"):
        return _shape(source, config)


def _shape(source: Source, config: PreTrainedConfig) -> Shape:
    count, kinds = getattr(config, "num_hidden_layers", 0), getattr(config, "layer_types", None)
    if not getattr(config, "num_attention_heads", None):
        raise UserError(f"model {source.name}: {config.model_type} has no attention heads, so no cache to compress")
    if count > MOST_LAYERS:
        raise UserError(f"model {source.name}: its config has {count:,} layers; expected at most {MOST_LAYERS:,}")
    layers = tuple(i for i in range(count) if kinds is None or kinds[i] == "full_attention")
    if not layers or (kinds is None and getattr(config, "sliding_window", None)):
        raise UserError(f"model {source.name}: no layer with full attention, so nothing to compress")
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    numbers = (count, config.num_attention_heads, kv_heads, config.max_position_embeddings, config.vocab_size)
    if not all(isinstance(x, int) and x >= 1 for x in numbers) or config.num_attention_heads % kv_heads:
        raise UserError(f"model {source.name}: its config has layers, heads, KV heads, positions, words {numbers}")
    return Shape(layers, *numbers[1:], longrope_length(config))


def load_tokenizer(source: Source) -> Tokenizer:
    """The model's tokenizer. Raises UserError where the source has none."""
    if source.kind == "tiny":
        return ByteTokenizer()
    path, revision = location(source)
    with explained(source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        return cast(Tokenizer, tokenizer)


def load_model(source: Source, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in eval mode on the CPU, or on the GPU where there is one. Raises UserError, naming the file."""
    if source.kind == "tiny":
        return _tiny(dtype).eval()
    path, revision = location(source)
    with explained(source, "weights"):
        load: Any = AutoModelForCausalLM.from_pretrained  # its stub knows nothing of output_loading_info
        known = {"revision": revision, "use_safetensors": True, "trust_remote_code": False}
        model, loaded = load(path, dtype=dtype, **known, **TOLD)
        _refuse_random(source, loaded)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def check_weights(source: Source) -> None:
    """Read the headers of a folder's safetensors files. Raises UserError naming one that is damaged."""
    if source.kind == "folder":
        for path in sorted(Path(source.path).glob("*.safetensors")):
            with explained(source, f"weights ({path.name})"), safe_open(path, "pt"):
                pass


def _refuse_random(source: Source, loaded: dict[str, Any]) -> None:
    """transformers fills weights that a file lacks, or has in another shape, with random numbers, and only warns."""
    for odd, what in (("missing_keys", "lack"), ("mismatched_keys", "have in another shape")):
        if found := sorted(map(str, loaded[odd])):
            raise UserError(
                f"model {source.name}: its files {what} {len(found)} weights of its config, such as {found[0][:80]}"
            )


class explained:
    """Turns what a library raises for a user's file into our one line, the cause kept for debuggers."""

    def __init__(self, source: Source, what: str) -> None:
        self.source, self.what = source, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UserError) or not isinstance(error, Exception):
            return
        said = shorten(str(error), 300, placeholder=" ...")
        if not isinstance(error, OSError | ValueError | ImportError) or not said:  # "'added_tokens'" says nothing
            said = f"{type(error).__name__}: {said}".rstrip(": ")
        raise UserError(f"model {self.source.path or self.source.name}: cannot load its {self.what}: {said}") from error


def _tiny(dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY["seed"])
        return AutoModelForCausalLM.from_config(config_of(Source("tiny", "", "", "")), dtype=dtype)


def text_config(source: Source) -> PreTrainedConfig:
    """The config of a model's text part. Raises UserError where there is none, and as config_of does."""
    config = config_of(source)
    with explained(source, "config"):
        text: object = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):
        raise UserError(f"model {source.name}: its config has a {type(text).__name__} as its text part")
    return text


def config_of(source: Source) -> PreTrainedConfig:
    """The config of a model. Raises UserError for an architecture that is not a causal language model."""
    if source.kind == "tiny":
        fields = {k: v for k, v in TINY.items() if k != "seed"}
        return AutoConfig.for_model("llama", **fields)
    with explained(source, "config"):
        if source.kind == "gguf" and not _folder_of(source).is_dir():  # what is refused by its config is not converted
            gguf = Path(source.path)
            config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        else:
            path, revision = location(source)
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        if type(config) not in AutoModelForCausalLM._model_mapping:  # the public class has no public lookup
            raise UserError(f"model {source.name}: {config.model_type} is not a causal language model")
    return config


def location(source: Source) -> tuple[str, str | None]:
    """(folder, None), or (hub id, commit): where transformers reads a model from."""
    if source.kind == "hub":
        name, revision = source.path.split("@")
        return name, revision
    return (str(_converted(source)) if source.kind == "gguf" else source.path), None


def _converted(source: Source) -> Path:
    """The safetensors folder of a GGUF file: converted once, published by rename, its weights verified by hash."""
    folder = _folder_of(source)
    if not (folder / "kvcert.json").is_file():
        _convert(source, folder)
    return folder


def _folder_of(source: Source) -> Path:
    return cache_folder() / "models" / source.digest[:32]


def verify_converted(source: Source) -> None:
    """Raise UserError where a converted model's weights are not the bytes that were written."""
    if source.kind != "gguf":
        return
    folder = _converted(source)
    try:
        files = dict(json.loads((folder / "kvcert.json").read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"converted model {folder}: damaged (kvcert.json); delete {folder} and run again") from error
    for name, digest in files.items():
        if not (folder / name).is_file() or file_sha256(folder / name) != digest:
            raise UserError(
                f"converted model {folder / name}: damaged (SHA-256 differs); delete {folder} and run again"
            )


def _convert(source: Source, folder: Path) -> None:
    print(f"converting {source.name} to safetensors, once, into {folder} (about 20 s) ...", file=sys.stderr, flush=True)
    gguf = Path(source.path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"cache folder {folder.parent}: {error.strerror}; set KVCERT_CACHE to a writable folder"
        ) from error
    try:
        with explained(source, "weights"):
            load: Any = AutoModelForCausalLM.from_pretrained
            packed, loaded = load(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **TOLD)
            _refuse_random(source, loaded)
            config = copy.deepcopy(packed.config)
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # the weights are dense float32 now
            dense = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            dense.load_state_dict(packed.state_dict())  # strict: names a weight that stayed packed
            dense.generation_config = packed.generation_config
            dense.save_pretrained(temporary)
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(temporary)
        files = {p.name: file_sha256(p) for p in sorted(temporary.iterdir())}
        (temporary / "kvcert.json").write_text(json.dumps({"source": source.digest, "files": files}, indent=1))
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "kvcert.json").is_file():  # else another process was first, with the same content
                raise
    except OSError as error:
        raise UserError(
            f"cache folder {folder}: {error.strerror or error}; set KVCERT_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
