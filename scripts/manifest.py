"""The registered documents of the laptop profile, as hashes: python -m scripts.manifest planted_facts, before a freeze."""

import argparse
import json
import platform
import sys
from typing import Any

from runs import assistant, locomo_rows
from runs.data import pydoc_corpus, pydoc_documents, text_sha256
from runs.grid import parts
from runs.models import load_tokenizer
from runs.registry import ROOT
from runs.sources import file_sha256, resolve
from runs.synthetic import make
from scripts._cli import run, settings
from scripts.compose import compose

FOLDER = ROOT / "prereg" / "manifests"
BLOCK = {"planted_facts": "tasks", "synthetic": "synthetic"}  # manifest -> the profile's block


def main(argv: list[str] | None = None) -> int:
    """Write the manifests that are named, of pydoc topics and the laptop model's tokenizer; LoCoMo's from DATA=."""
    parser = argparse.ArgumentParser(prog="python -m scripts.manifest", description=__doc__)
    parser.add_argument("names", nargs="+", choices=["pydoc_topics", *BLOCK, "assistant", "locomo"])
    for name in parser.parse_args(argv).names:
        manifest = manifest_of(name)
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(manifest, indent=1) + "\n")
        count, source = len(manifest["documents"]), manifest["source"]
        print(f"{count} documents of {source} in {path.relative_to(ROOT)}; next: make freeze")
    return 0


def manifest_of(name: str) -> dict[str, Any]:
    """The documents of the laptop profile by SHA-256, and what they were made from."""
    if name == "locomo":
        files = locomo_rows.locomo_files(data := settings().data or "")
        known = {path.name: file_sha256(path) for path in files}
        return {"source": "LoCoMo", "files": known, "documents": [one.document for one in locomo_rows.load(data)]}
    config = compose(["profile=laptop"])
    source = resolve(config.model.source)
    tokenizer = load_tokenizer(source)
    made_from = {
        "source": "pydoc_data.topics",
        "python": platform.python_version(),
        "corpus_sha256": text_sha256(pydoc_corpus()),
        "tokenizer": source.digest,
    }
    if name == "pydoc_topics":
        found = pydoc_documents(tokenizer, config.replay.ctx_tokens, config.replay.documents)
        hashes = [document.sha256 for document in found]
        return {**made_from, "ctx_tokens": config.replay.ctx_tokens, "documents": hashes}
    if name == "assistant":
        (part,) = parts([config], None, name)
        sizes = {key: getattr(config.assistant, key) for key in ("facts", "ctx_tokens")} | {
            "seed": config.assistant.text_seed
        }
        return {**made_from, **sizes, "documents": [one.document for one in assistant.conversations(part)]}
    grid = getattr(config, BLOCK[name])
    made = [
        example
        for task in grid.tasks
        for limit in grid.ctx_tokens
        for example in make(task, tokenizer, limit, grid.documents, grid.text_seed)
    ]
    generator = {"tasks": list(grid.tasks), "ctx_tokens": list(grid.ctx_tokens), "seed": grid.text_seed}
    return {**made_from, **generator, "documents": [example.document for example in made]}


if __name__ == "__main__":
    sys.exit(run(main))
