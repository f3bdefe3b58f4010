"""Hugging Face tensors that hold several parameters, or one in another orientation, and where each lies in them.

A family declares such a tensor in its adapter's map. The orientation is part of the declaration and is never taken from
a shape, since a square matrix has the same shape in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from archon.schema.errors import CheckpointError

Slices = tuple[slice, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fused:
    """A Hugging Face tensor that holds `parts`, one after the other along a dimension, or in turns.

        Fused(("….wq.weight", "….wk.weight", "….wv.weight"))        # qkv_proj: rows of q, then of k, then of v
        Fused(("….w1", "….w3"), dim=1)                              # [E, 2F, dim]: each expert's gate, then its up
        Fused(("….w1", "….w3"), dim=1, interleaved=True, transposed=True)   # [E, dim, 2F]: gate even, up odd columns
        Fused(("….wq.weight", "….wz.weight"), blocks=lambda args: args.n_kv_heads)    # q and z of head 0, of head 1, …
        Fused(("….w2",), transposed=True)                           # [E, F, dim] for a parameter [E, dim, F]

    Attributes:
        parts: templates of the parameters' names, in the order of the tensor. If the Hugging Face template has one `{}`
            more than they have, that is the index of a row of each.
        dim: the parameters' dimension along which they lie, from 0; of a row's if the tensor holds a row of each.
        blocks: number of equal blocks that each part is cut into; the tensor holds the first block of each part, then
            the second of each. A number, or a function of the model's arguments.
        interleaved: each row is a block of its own: row 0 of each part, then row 1 of each.
        transposed: the tensor's last two dimensions are the parameters' in reverse.
    """

    parts: tuple[str, ...]
    dim: int = 0
    blocks: int | Callable[[Any], int] = 1
    interleaved: bool = False
    transposed: bool = False


class Selection(NamedTuple):
    """What a rank reads of a Hugging Face tensor for its part of a parameter.

    Attributes:
        shape: the tensor's shape, with the dimension of the blocks as two.
        region: a slice for each dimension of `shape`.
        target: a view of the rank's part, of the region's shape.
    """

    shape: Shape
    region: Slices
    target: Tensor


@dataclass(frozen=True)
class Placement:
    """Where a parameter, or a row of a stacked one, lies in a Hugging Face tensor.

    Along `dim`, the tensor has `blocks` blocks of `block_size`; rows `start` to `start + size` of each are the
    parameter's. `transposed` is as in `Fused`; `dim` is the parameter's.
    """

    dim: int
    blocks: int
    start: int
    size: int
    block_size: int
    transposed: bool

    def hf_shape(self, shape: Sequence[int]) -> Shape:
        """Returns the shape of the Hugging Face tensor for that of the parameter."""
        full = [*shape[: self.dim], self.blocks * self.block_size, *shape[self.dim + 1 :]]
        return (*full[:-2], full[-1], full[-2]) if self.transposed else tuple(full)

    def hf_view(self, tensor: Tensor) -> Tensor:
        """Returns the parameter's elements of a Hugging Face tensor as a view, with `dim` as (block, row)."""
        blocks = (tensor.mT if self.transposed else tensor).unflatten(self.dim, (self.blocks, self.block_size))
        return blocks.narrow(self.dim + 1, self.start, self.size)

    def extract(self, tensor: Tensor) -> Tensor:
        """Returns the parameter's elements of a Hugging Face tensor, as a view where strides allow it."""
        return self.hf_view(tensor).flatten(self.dim, self.dim + 1)

    def insert(self, parameter: Tensor, tensor: Tensor) -> None:
        """Copy the parameter into its elements of a Hugging Face tensor."""
        self.hf_view(tensor).copy_(parameter.unflatten(self.dim, (self.blocks, self.size)))

    def selections(self, shape: Shape, own: Slices, local: Tensor, *, transposed: bool) -> Iterator[Selection]:
        """Yields what to read for `local`, a rank's part of a parameter of `shape`, which is its region `own`.

        Args:
            transposed: whether the file's tensor is; a quantized one may be stored otherwise than declared.
        """
        dim, first = self.dim, own[self.dim].start
        for blocks, rows in _rectangles(first, own[dim].stop, self.size):
            counts = (blocks.stop - blocks.start, rows.stop - rows.start)
            target = local.narrow(dim, blocks.start * self.size + rows.start - first, counts[0] * counts[1])
            inside = slice(self.start + rows.start, self.start + rows.stop)
            # Each dimension of the parameter, as one or two of the file's: (size, slice) pairs.
            axes = [[pair] for pair in zip(shape, own, strict=True)]
            axes[dim] = [(self.block_size, inside)]
            if self.blocks > 1:
                target = target.unflatten(dim, counts)
                axes[dim].insert(0, (self.blocks, blocks))
            if transposed:
                order = [*range(target.dim())]
                last, width = len(axes[-1]), len(axes[-2]) + len(axes[-1])
                target = target.permute(*order[:-width], *order[-last:], *order[-width:-last])
                axes[-2:] = axes[:-3:-1]
            pairs = [pair for axis in axes for pair in axis]
            yield Selection(tuple(size for size, _ in pairs), tuple(part for _, part in pairs), target)


def place_parts(fused: Fused, shapes: Sequence[Shape], args: Any) -> list[Placement]:
    """Returns where each part of a fused tensor lies, for the shapes of the parts, or of one row of each.

    Raises CheckpointError where they cannot be fused as declared, which is a mistake in the family's map.
    """
    dim = fused.dim
    blocks = fused.blocks(args) if callable(fused.blocks) else fused.blocks
    if not all(dim < len(shape) and len(shape) >= 1 + fused.transposed for shape in shapes):
        raise CheckpointError(f"{fused} cannot hold parameters of shapes {shapes}: they have too few dimensions")
    if fused.interleaved:
        blocks = shapes[0][dim]
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise CheckpointError(f"{fused} cannot hold parameters of shapes {shapes}: they differ outside dimension {dim}")
    if blocks < 1 or any(shape[dim] % blocks for shape in shapes):
        raise CheckpointError(f"{fused} cannot hold parameters of shapes {shapes}: {blocks} blocks do not divide them")
    if fused.interleaved and len({*shapes}) > 1:
        raise CheckpointError(f"{fused} cannot hold parameters of shapes {shapes}: rows in turns need equal sizes")
    sizes = [shape[dim] // blocks for shape in shapes]
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        Placement(dim, blocks, start, size, sum(sizes), fused.transposed)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _rectangles(first: int, stop: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yields (blocks, rows within each) that cover rows `first` to `stop` of blocks of `size` rows, in order."""
    while first < stop:
        block, row = divmod(first, size)
        if row == 0 and stop - first >= size:
            count = (stop - first) // size
            yield slice(block, block + count), slice(0, size)
            first += count * size
        else:
            end = min(stop, (block + 1) * size)
            yield slice(block, block + 1), slice(row, row + end - first)
            first = end
