"""Fused Hugging Face tensors: several parameters in one tensor, or one parameter transposed.

A family declares such a tensor in its adapter's map. The declaration includes the orientation, because the shape of a
square matrix does not reveal it.
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
    """Hugging Face tensor that concatenates or interleaves `parts` along a dimension.

        Fused(("….wq.weight", "….wk.weight", "….wv.weight"))        # qkv_proj: rows of q, then of k, then of v
        Fused(("….w1", "….w3"), dim=1)                              # [E, 2F, dim]: each expert's gate, then its up
        Fused(("….w1", "….w3"), dim=1, interleaved=True, transposed=True)   # [E, dim, 2F]: gate even, up odd columns
        Fused(("….wq.weight", "….wz.weight"), blocks=lambda args: args.n_kv_heads)    # q and z of head 0, of head 1, …
        Fused(("….w2",), transposed=True)                           # [E, F, dim] for a parameter [E, dim, F]

    Attributes:
        parts: Parameter templates in tensor order. If the Hugging Face template has one more `{}`, that index selects
            a row of each parameter.
        dim: Concatenation dimension of the parameters (of their rows, if the tensor holds rows), from 0.
        blocks: Number of equal blocks per part; the tensor holds the first block of each part, then the second of
            each. A number, or a function of the model's arguments.
        interleaved: Every row is a block: row 0 of each part, then row 1 of each.
        transposed: The tensor's last two dimensions are the parameters' in reverse.
    """

    parts: tuple[str, ...]
    dim: int = 0
    blocks: int | Callable[[Any], int] = 1
    interleaved: bool = False
    transposed: bool = False


class Selection(NamedTuple):
    """Region of a Hugging Face tensor that a rank reads for its shard of a parameter.

    Attributes:
        shape: The tensor's shape, with the block dimension split into two.
        region: A slice for each dimension of `shape`.
        target: A view of the rank's shard with the shape of the region.
    """

    shape: Shape
    region: Slices
    target: Tensor


@dataclass(frozen=True)
class Placement:
    """Location of a parameter, or of a row of a stacked parameter, in a Hugging Face tensor.

    Along the parameter's `dim` the tensor has `blocks` blocks of `block_size` rows. Rows `start` to `start + size` of
    each block belong to the parameter. `transposed` is as in `Fused`.
    """

    dim: int
    blocks: int
    start: int
    size: int
    block_size: int
    transposed: bool

    def hf_shape(self, shape: Sequence[int]) -> Shape:
        """Return the shape of the Hugging Face tensor for a parameter shape."""
        full = [*shape[: self.dim], self.blocks * self.block_size, *shape[self.dim + 1 :]]
        return (*full[:-2], full[-1], full[-2]) if self.transposed else tuple(full)

    def hf_view(self, tensor: Tensor) -> Tensor:
        """Return a view of the parameter's elements in a Hugging Face tensor, with `dim` as (block, row)."""
        blocks = (tensor.mT if self.transposed else tensor).unflatten(self.dim, (self.blocks, self.block_size))
        return blocks.narrow(self.dim + 1, self.start, self.size)

    def extract(self, tensor: Tensor) -> Tensor:
        """Return the parameter's elements in a Hugging Face tensor, as a view if strides allow it."""
        return self.hf_view(tensor).flatten(self.dim, self.dim + 1)

    def insert(self, parameter: Tensor, tensor: Tensor) -> None:
        """Copy the parameter into a Hugging Face tensor."""
        self.hf_view(tensor).copy_(parameter.unflatten(self.dim, (self.blocks, self.size)))

    def selections(self, shape: Shape, region: Slices, local: Tensor, *, transposed: bool) -> Iterator[Selection]:
        """Yield the regions to read for a rank's shard of a parameter.

        Args:
            shape: Shape of the full parameter.
            region: The shard's slice of each dimension.
            local: The shard.
            transposed: Whether the file stores the tensor transposed; a quantized tensor may differ from its
                declaration.
        """
        dim, first = self.dim, region[self.dim].start
        for blocks, rows in _rectangles(first, region[dim].stop, self.size):
            counts = (blocks.stop - blocks.start, rows.stop - rows.start)
            target = local.narrow(dim, blocks.start * self.size + rows.start - first, counts[0] * counts[1])
            inside = slice(self.start + rows.start, self.start + rows.stop)
            # Describe each parameter dimension by one or two file dimensions, as (size, slice) pairs.
            axes = [[pair] for pair in zip(shape, region, strict=True)]
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
    """Return the placement of each part of a fused tensor, from the shapes of the parts, or of one row of each.

    Raises:
        CheckpointError: The shapes contradict the declaration, which is an error in the family's map.
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
        raise CheckpointError(f"{fused} cannot hold parameters of shapes {shapes}: interleaved rows need equal sizes")
    sizes = [shape[dim] // blocks for shape in shapes]
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        Placement(dim, blocks, start, size, sum(sizes), fused.transposed)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _rectangles(first: int, stop: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield (blocks, rows within each) that cover rows `first` to `stop` in order; a block has `size` rows."""
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
