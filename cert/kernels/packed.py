"""Retained rows of every head behind one another, without padding, and with room for the tokens that follow."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cert.errors import CertError


@dataclass
class Packed:
    """Rows of batch x kv_heads heads in one buffer: head h has rows start[h] .. start[h] + count[h] - 1 of it.

    k [rows, d], v [rows, dv], log_weight [rows] float32, start and count [batch * kv_heads] int64; most: rows that any
    head has or has room for, which the host knows without asking the device.
    """

    k: Tensor
    v: Tensor
    log_weight: Tensor
    start: Tensor
    count: Tensor
    most: int

    def append(self, k: Tensor, v: Tensor) -> None:
        """One new row a head, k and v [batch, kv_heads, d], with prob = 1; nothing is read back from the device.

        Where a head has no room left its neighbour's first row would be overwritten: the caller counts to `spare`.
        """
        at = self.start + self.count
        self.k.index_copy_(0, at, k.flatten(0, -2))
        self.v.index_copy_(0, at, v.flatten(0, -2))
        self.log_weight.index_fill_(0, at, 0.0)
        self.count += 1


def pack(k: Tensor, v: Tensor, log_weight: Tensor, spare: int = 0) -> Packed:
    """Padded rows [batch, kv_heads, n, d], log_weight -inf at padding, as Packed with `spare` rows of room a head.

    Raises CertError for a head without a row.
    """
    real = (log_weight > -torch.inf).flatten(0, -2)
    count = real.sum(-1)
    if not bool((count > 0).all()):
        raise CertError("pack: a head has no retained row")
    room = count + spare
    start = room.cumsum(0) - room
    head, row = real.nonzero(as_tuple=True)
    at = start[head] + (real.cumsum(-1) - 1)[head, row]
    total, most = int(room.sum()), int(room.max())

    def moved(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return flat.new_zeros(total, *flat.shape[2:]).index_copy_(0, at, flat[head, row])

    return Packed(moved(k), moved(v), moved(log_weight.float()), start, count, most)
