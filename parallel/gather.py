"""Gathers whole parameters from the shards of several ranks, many in one collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.parallel.comm import Group, all_gather, all_gather_replicated
from archon.parallel.fsdp import local_tensor, shard_region

BUCKET_BYTES = 2**24
"""Bytes of whole tensors in one collective: many small collectives would cost more."""

Named = tuple[str, Tensor]


@torch.no_grad()
def full_tensors(tensors: Iterable[Named], bucket_bytes: int = BUCKET_BYTES) -> Iterator[Named]:
    """Yields every (name, whole tensor), in the order given; without a copy where this rank holds it all.

    Consecutive tensors of one mesh and dtype are gathered together, up to `bucket_bytes` of whole tensors or a single
    larger one. Every rank that holds a part must call it and consume all of them.
    """
    for key, run in groupby(tensors, key=lambda pair: _bucket_key(pair[1])):
        if key is None:
            yield from ((name, local_tensor(tensor.detach())) for name, tensor in run)
            continue
        for bucket in _buckets(run, bucket_bytes):
            names, parts = [name for name, _ in bucket], [tensor for _, tensor in bucket]
            yield from zip(names, _gathered(cast(list[DTensor], parts)), strict=True)


@torch.no_grad()
def full_tensors_across_stages(
    own: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    stages: Group,
    device: torch.device,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[Named]:
    """Same as `full_tensors`, for a model whose layers are on the ranks of `stages`: the holder of each broadcasts it.

    Args:
        own: the tensors of which this rank holds a part.
        like: a tensor on the meta device of the shape and dtype of every tensor, in the order in which they are
            yielded.
    """
    if not like:
        return
    holders = torch.tensor([[name in own for name in like]], dtype=torch.int32, device=device)
    sources = dict(zip(like, all_gather_replicated(holders, stages).int().argmax(0).tolist(), strict=True))
    for (source, dtype), run in groupby(like, key=lambda name: (sources[name], like[name].dtype)):
        for bucket in _buckets(((name, like[name]) for name in run), bucket_bytes):
            names = [name for name, _ in bucket]
            flat = torch.empty(sum(tensor.numel() for _, tensor in bucket), dtype=dtype, device=device)
            pieces = flat.split([tensor.numel() for _, tensor in bucket])
            if source == stages.rank:
                for piece, (_, whole) in zip(pieces, full_tensors((n, own[n]) for n in names), strict=True):
                    piece.copy_(whole.flatten())
            torch.distributed.broadcast(flat, group=stages.process_group, group_src=source)
            yield from ((name, piece.view(like[name].shape)) for name, piece in zip(names, pieces, strict=True))


def _bucket_key(tensor: Tensor) -> tuple[object, ...] | None:
    """Returns equal keys for tensors that can be gathered together; None for one that need not be gathered."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        return None
    return tensor.device_mesh, tensor.dtype, tensor.device


def _buckets(tensors: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        if bucket and size + own > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += own
    if bucket:
        yield bucket


def _gathered(tensors: Sequence[DTensor]) -> list[Tensor]:
    """Returns tensors of one mesh and dtype, whole."""
    mesh = tensors[0].device_mesh
    own_coordinate = mesh.get_coordinate()
    assert own_coordinate is not None
    dims = [d for d in range(mesh.ndim) if mesh.size(d) > 1 and not all(_is_replicated(t, d) for t in tensors)]
    # The first rank along every dimension has the largest part.
    sizes = [_shape(shard_region(tensor, [0] * mesh.ndim)).numel() for tensor in tensors]
    flat = tensors[0].to_local().new_zeros(sum(sizes))
    for space, tensor in zip(flat.split(sizes), tensors, strict=True):
        local = local_tensor(tensor)
        space[: local.numel()] = local.flatten()
    for dim in reversed(dims):
        flat = all_gather(flat, Group.from_process_group(mesh.get_group(dim)))
    wholes = [local_tensor(tensor).new_empty(tensor.shape) for tensor in tensors]
    for row, place in zip(flat.view(-1, sum(sizes)), product(*(range(mesh.size(d)) for d in dims)), strict=True):
        coordinate = list(own_coordinate)
        for dim, index in zip(dims, place, strict=True):
            coordinate[dim] = index
        for piece, tensor, whole in zip(row.split(sizes), tensors, wholes, strict=True):
            if any(_is_replicated(tensor, dim) and coordinate[dim] for dim in dims):
                continue
            part = shard_region(tensor, coordinate)
            shape = _shape(part)
            whole[part] = piece[: shape.numel()].view(shape)
    return wholes


def _is_replicated(tensor: DTensor, dim: int) -> bool:
    return tensor.placements[dim].is_replicate()


def _shape(part: Sequence[slice]) -> torch.Size:
    return torch.Size(axis.stop - axis.start for axis in part)
