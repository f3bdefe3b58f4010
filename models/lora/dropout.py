"""LoRA dropout: y = W x + scale * b a dropout(x), in training only, as in PEFT.

Masks are no state of a random generator but a hash of (seed, step, tokens up to and including this one, matrix, input
feature). Recomputation, resuming, every layout and every split into micro-batches therefore drop the same elements, and
documents with a shared prefix drop the same elements in it, so that the prefix can be computed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def hash_text(text: str) -> int:
    """Return 63 bits of the SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class LoRADropout:
    """Dropout of one matrix: the probability of dropping an input feature, and the hash of the matrix's name."""

    probability: float
    salt: int

    def keep(self, keys: Tensor, first_feature: int, features: int) -> Tensor:
        """Return bool [T, features], whether a token with key int64 [T] keeps features from `first_feature` on."""
        columns = torch.arange(first_feature, first_feature + features, device=keys.device)
        rows, columns = ((_mixed(x ^ self.salt) >> 32).int() for x in (keys, _mixed(columns)))
        x = rows.unsqueeze(1) ^ columns
        # A 32-bit finalizer (github.com/skeeto/hash-prospector); in 64 bits the hash of a long batch takes twice the
        # memory. The shift of a signed integer is arithmetic, hence the masks.
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
            x ^= (x >> shift) & ((1 << (32 - shift)) - 1)
            x *= factor
        x ^= (x >> 16) & 0xFFFF
        return x >= round(self.probability * 2**32) - 2**31

    def apply(self, x: Tensor, keys: Tensor, first_feature: int) -> Tensor:
        """Return x [T, features] with dropped elements set to 0; the caller scales by 1 / (1 - probability)."""
        return torch.where(self.keep(keys, first_feature, x.shape[1]), x, 0)


def token_keys(tokens: Tensor, lengths: Sequence[int], seed: int) -> Tensor:
    """Return int64 [T]: for each token, a hash of `seed` and its document's tokens up to and including it."""
    ends = torch.tensor(lengths).cumsum(0)
    starts = (ends - torch.tensor(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.arange(len(tokens)) - starts
    sums = torch.nn.functional.pad(_mixed(_mixed(tokens) + positions).cumsum(0), (1, 0))  # wraps around
    return _mixed((sums[1:] - sums[starts]) ^ seed)


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64 values, as in SplitMix64 (Steele et al. 2014)."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * (factor - 2**64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))
