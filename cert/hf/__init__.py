"""The certified KV cache inside transformers: `certified()` opens a session on a model, nothing else changes."""

from cert.hf.cache import CertifiedCache
from cert.hf.session import Session, certified

__all__ = ["CertifiedCache", "Session", "certified"]
