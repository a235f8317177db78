"""What the replay measures, and what may enter extension 4: tested architectures, weights moved from where they start.

That weights were trained, no file can prove. What is checked is that they are not plainly fresh: `tiny` is refused by
name, and so are files in which every vector (norms, biases) is one repeated number, as all libraries initialise them.
"""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from cert.hf.families import refusal, untested
from runs.errors import UserError
from runs.models import explained, location, text_config
from runs.sources import Source

CAPPED = "soft-capped logits, whose cap its formulas leave out, so that they would not be the model's attention"


def check_architecture(source: Source) -> None:
    """Raise UserError, naming the model, for an architecture whose attention the replay would measure wrongly."""
    config = text_config(source)
    capped = CAPPED if getattr(config, "attn_logit_softcapping", None) else None
    if why := refusal(config) or untested(config) or capped:
        raise UserError(f"model {source.name}: the replay cannot measure it: {why}")


def admit(source: Source) -> None:
    """Raise UserError, naming the model, for weights that are plainly random."""
    if not source.trained:
        raise UserError(f"model {source.name}: random weights are never evidence; expected trained ones")
    with explained(source, "weights"):
        constant = [bool((vector == vector[0]).all()) for vector in _vectors(source)]
    if constant and all(constant):
        raise UserError(
            f"model {source.name}: each of its {len(constant)} norms and biases is one repeated number, as before any "
            "training; random weights are never evidence"
        )


def _vectors(source: Source) -> Iterator[Tensor]:
    """The tensors of one dimension in a model's files; a file is opened, not read."""
    path, revision = location(source)
    if revision is not None:
        path = snapshot_download(path, revision=revision, allow_patterns=["*.safetensors"])
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                if len(weights.get_slice(name).get_shape()) == 1:
                    yield weights.get_tensor(name)
