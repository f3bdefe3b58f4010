"""Cache layout of a layer while it decodes, the source of caches and memory estimates."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


class CacheSpec:
    """Cache of one layer; layers with equal specs share tensors. Subclasses are frozen dataclasses."""

    @property
    def token_features(self) -> int:
        """Cached numbers per token."""
        return self.local_features(1)

    def sequence_bytes(self, width: int) -> int:
        """Return the cached bytes per sequence of any length, for a model dtype of `width` bytes."""
        return 0

    def local_features(self, tp: int) -> int:
        """Return the cached numbers per token of one of `tp` ranks, which split the heads or share one."""
        return 0


@dataclass(frozen=True)
class PagedRows(CacheSpec):
    """Keys and values of each token, in pages.

    Attributes:
        heads: key heads, each with a row of keys and a row of values per token.
        key_features, value_features: widths of these rows.
        values_in_keys: a value is the first `value_features` of its key, and not stored again.
    """

    heads: int
    key_features: int
    value_features: int
    values_in_keys: bool = False

    def local_features(self, tp: int) -> int:
        """See `CacheSpec.local_features`."""
        row = self.key_features + (0 if self.values_in_keys else self.value_features)
        return max(1, self.heads // tp) * row


@dataclass(frozen=True)
class RecurrentStates(CacheSpec):
    """One state per sequence, which every token changes.

    Attributes:
        inputs: shape of a convolution's last inputs, in the dtype of the model.
        matrices: shape of the recurrent state, in at least float32.
    """

    inputs: tuple[int, ...]
    matrices: tuple[int, ...]

    def sequence_bytes(self, width: int) -> int:
        """See `CacheSpec.sequence_bytes`."""
        return prod(self.inputs) * width + prod(self.matrices) * max(width, 4)
