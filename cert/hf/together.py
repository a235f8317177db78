"""Caches of one logical length as the rows of a batch: a step reads the weights once, attention is each cache's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from cert.errors import CertError
from cert.hf.cache import CertifiedCache


@dataclass
class Row:
    """A cache that goes on, the request it belongs to, and the steps that were recorded of it."""

    cache: CertifiedCache
    request: int
    step: int


def check_asked(rows: Any, size: Any) -> None:
    """Raise CertError for what are no rows of a session, or no number of them."""
    listed = isinstance(rows, list | tuple) and all(isinstance(row, Row) for row in rows)
    if not listed or type(size) is not int:
        raise CertError("together: expected a list of what session.row() gives, and a whole number as size")


class TogetherLayer(CacheLayerMixin):
    """One layer of all rows. `seen`: what each row's own layer gives its attention at this step."""

    def __init__(self, rows: "list[Row | None]", index: int) -> None:
        super().__init__()
        self.rows, self.index = rows, index
        self.seen: list[tuple[Tensor, Tensor] | None] = []
        self.is_sliding = getattr(self._any(), "is_sliding", False)

    def _of(self, row: Row) -> Any:
        return row.cache.layers[self.index]

    def _any(self) -> Any:
        return next(self._of(row) for row in self.rows if row is not None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append each row's new tokens to its own cache; what is returned is not looked at.

        Raises CertError once the session has ended: nothing would then look at the rows' own layers.
        """
        if any(row is not None and row.cache.terms.closed for row in self.rows):
            raise CertError("together: the session of these caches has ended")
        self.seen = [
            None
            if row is None
            else self._of(row).update(key_states[b : b + 1], value_states[b : b + 1], *args, **kwargs)
            for b, row in enumerate(self.rows)
        ]
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the rows' own layers hold what there is."""

    def get_seq_length(self) -> int:
        """The logical length, the same in every row."""
        return int(self._any().get_seq_length())

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Of a row that has evicted nothing; the others do not look at the mask."""
        sizes: tuple[int, int] = self._any().get_mask_sizes(query_length)
        return sizes

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.14


class Together(Cache):
    """What session.together() gives a forward of ids [size, m]: one cache a row; rows[b] = None where there is none.

    A row's result depends on `size` and on nothing else of the batch, as far as the device's matrix products compute
    the rows of one shape alike; so `size` stays, and rows that have ended, or never were, are fed and ignored.
    """

    def __init__(self, rows: Sequence[Row], size: int) -> None:
        if len({id(row.cache) for row in rows}) != len(rows):
            raise CertError("together: a cache stands in it twice; expected one a row")
        if not 1 <= len(rows) <= size or any(row.cache.ids is None or len(row.cache.ids) != 1 for row in rows):
            raise CertError(f"together: {len(rows)} rows; expected 1 to {size}, each a cache of one row that was fed")
        if any(not row.cache.events or row.cache.length != rows[0].cache.length for row in rows):
            raise CertError(f"together: expected compressed caches, all of {rows[0].cache.length} tokens")
        self.rows: list[Row | None] = [*rows, *[None] * (size - len(rows))]
        self.own = [TogetherLayer(self.rows, i) for i in range(len(rows[0].cache.layers))]
        super().__init__(layers=[*self.own])

    def feed(self, ids: Tensor) -> None:
        """Note the tokens [size, m] of a forward that is about to run."""
        if len(ids) != len(self.rows):
            raise CertError(
                f"together: a batch of {len(ids)}; expected {len(self.rows)}, those without a cache included"
            )
        there = [(b, row.cache) for b, row in enumerate(self.rows) if row is not None]
        if len(lengths := {cache.length for _, cache in there}) > 1:
            raise CertError(f"together: its caches have parted, at {min(lengths)} and {max(lengths)} tokens")
        for _, cache in there:
            cache.check_whole()
        for b, cache in there:
            cache.feed(ids[b : b + 1])

    def attend(self, index: int, attend: Callable[[Row, int, Tensor, Tensor], Tensor]) -> Tensor:
        """Rows [size, m, heads, d] of attend(row, its number, keys, values), zeros where there is no cache."""
        outs = [
            None if row is None or seen is None else attend(row, b, *seen)
            for b, (row, seen) in enumerate(zip(self.rows, self.own[index].seen, strict=True))
        ]
        nothing = torch.zeros_like(next(out for out in outs if out is not None))
        return torch.cat([nothing if out is None else out for out in outs])
