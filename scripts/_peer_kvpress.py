"""The same as scripts._peer under kvpress, in the environment that scripts.bench_peers makes for it.

.venv-kvpress/bin/python -m scripts._peer_kvpress FOLDER        a folder with config.json and safetensors
"""

import sys
from collections.abc import Mapping
from typing import Any

from scripts._peer import serve


def main() -> None:
    """Serve SnapKV as kvpress's own pipeline does: compressed at the end of the prefill, greedy, positions logical."""
    import torch
    from kvpress import SnapKVPress
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(sys.argv[1], dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")

    @torch.no_grad()
    def one(request: Mapping[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([request["ids"]], device=model.device)
        cache: Any = DynamicCache()
        with SnapKVPress(compression_ratio=1 - request["budget"])(model):
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        answer = [int(logits[0, -1].argmax())]
        while len(answer) < request["tokens"]:
            at = torch.tensor([[ids.shape[1] + len(answer) - 1]], device=model.device)
            fed = torch.tensor([answer[-1:]], device=model.device)
            logits = model(input_ids=fed, past_key_values=cache, position_ids=at, logits_to_keep=1).logits
            answer.append(int(logits[0, -1].argmax()))
        return {"answer": answer, "cache_bytes": held}

    serve({"one": one})


if __name__ == "__main__":
    main()
