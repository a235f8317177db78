"""The certified KV cache inside transformers: `certified()` opens a session on a model, nothing else changes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from transformers import PreTrainedModel

from cert.certificate import DELTA
from cert.hf import arguments, checks
from cert.hf.cache import CertifiedCache
from cert.hf.session import Session
from cert.hf.state import Callback, Options
from cert.kernels import AUTO
from cert.policy import Policy

OPENING = Lock()  # two threads must not both find a model free
__all__ = ["CertifiedCache", "Session", "certified"]


@contextmanager
def certified(  # noqa: PLR0913 - the public surface; all but model and policy have defaults
    model: PreTrainedModel,
    policy: Policy,
    delta: float | None = DELTA,
    seed: int = 0,
    document: int | str | None = None,
    audit: bool = False,
    compress_every: int | None = None,
    callback: Callback | None = None,
    arms: Iterable[Policy] = (),
    signals: bool = False,
    kernel: str = AUTO,
) -> Iterator[Session]:
    """Serve this model from certified caches until the block ends, also by an exception; then it is as it was.

    delta: level of the certificates; None switches them off, and they then cost nothing. seed, document: address of
    the coins; document defaults to the SHA-256 of the token ids at the first compression. audit: keep every row ever
    written aside and report the served error. compress_every: once compressed, compress again after so many new tokens
    (streaming, or a cache that outgrows its budget while generating). callback: is given each step's certificate.
    arms: other policies that a prefilled cache will be forked to: what their scores need is kept as well.
    signals: note the deterministic self-signals of cert.silent too; summary() has their means, `entropy` and `margin`.
    kernel: what serves retained rows, by name (cert.kernels); certificates and signals need the reference.
    Raises CertError, naming what is not supported, before any work.
    """
    others: Any = tuple(arms) if isinstance(arms, Iterable) else arms
    options = Options(policy, delta, seed, document, audit, compress_every, callback, others, signals, kernel)
    usable = all(hasattr(model, name) for name in ("config", "generate", "modules"))
    arguments.expect(usable, "model", model, "a transformers model with generate()")
    with OPENING:
        checks.check_model(model)
        session = Session(model, options)
        try:
            session._open()
        except BaseException:
            session._close()
            raise
    try:
        yield session
    finally:
        session._close()
