"""The registered documents of the laptop replay, as hashes: python -m scripts.manifest, before a freeze."""

import json
import platform
import sys

from runs.data import pydoc_corpus, pydoc_documents, text_sha256
from runs.models import load_tokenizer
from runs.registry import ROOT
from runs.sources import resolve
from scripts._cli import run
from scripts.compose import compose

PATH = ROOT / "prereg" / "manifests" / "pydoc_topics.json"


def main() -> int:
    """Write the manifest from this Python's pydoc topics and the laptop model's tokenizer."""
    config = compose(["profile=laptop"])
    source = resolve(config.model.source)
    found = pydoc_documents(load_tokenizer(source), config.replay.ctx_tokens, config.replay.documents)
    manifest = {
        "source": "pydoc_data.topics",
        "python": platform.python_version(),
        "corpus_sha256": text_sha256(pydoc_corpus()),
        "tokenizer": source.digest,
        "ctx_tokens": config.replay.ctx_tokens,
        "documents": [document.sha256 for document in found],
    }
    PATH.write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{len(found)} documents of CPython {manifest['python']} in {PATH.relative_to(ROOT)}; next: make freeze")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
