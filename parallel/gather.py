"""Gather full parameters from their shards, many in one collective."""

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
"""Bytes of full tensors per collective: many small collectives would cost more."""

Named = tuple[str, Tensor]


@torch.no_grad()
def full_tensors(tensors: Iterable[Named], bucket_bytes: int = BUCKET_BYTES) -> Iterator[Named]:
    """Yield (name, full tensor) in input order, without a copy if this rank holds the full tensor.

    Consecutive tensors of one mesh and dtype are gathered together, up to `bucket_bytes` of full tensors or one larger
    tensor. A collective: every rank with a shard must consume the whole iterator.
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
    local: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    stages: Group,
    device: torch.device,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[Named]:
    """Yield `full_tensors` of a pipeline: the stage that holds a tensor broadcasts it to the others.

    Args:
        local: tensors of this rank's stages.
        like: meta tensors with the shape and dtype of every tensor of the model, in output order.
        stages: the ranks of the pipeline.
        device: the device of the collectives.
        bucket_bytes: see `full_tensors`.
    """
    if not like:
        return
    holders = torch.tensor([[name in local for name in like]], dtype=torch.int32, device=device)
    sources = dict(zip(like, all_gather_replicated(holders, stages).int().argmax(0).tolist(), strict=True))
    for (source, dtype), run in groupby(like, key=lambda name: (sources[name], like[name].dtype)):
        for bucket in _buckets(((name, like[name]) for name in run), bucket_bytes):
            names = [name for name, _ in bucket]
            flat = torch.empty(sum(tensor.numel() for _, tensor in bucket), dtype=dtype, device=device)
            pieces = flat.split([tensor.numel() for _, tensor in bucket])
            if source == stages.rank:
                for piece, (_, whole) in zip(pieces, full_tensors((n, local[n]) for n in names), strict=True):
                    piece.copy_(whole.flatten())
            torch.distributed.broadcast(flat, group=stages.process_group, group_src=source)
            yield from ((name, piece.view(like[name].shape)) for name, piece in zip(names, pieces, strict=True))


def _bucket_key(tensor: Tensor) -> tuple[object, ...] | None:
    """Return a key that is equal for tensors of one bucket; None if no gather is needed."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        return None
    return tensor.device_mesh, tensor.dtype, tensor.device


def _buckets(tensors: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + tensor_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor_bytes
    if bucket:
        yield bucket


def _gathered(tensors: Sequence[DTensor]) -> list[Tensor]:
    """Return the full tensors of DTensors with one mesh and dtype."""
    mesh = tensors[0].device_mesh
    local_coordinate = mesh.get_coordinate()
    assert local_coordinate is not None
    dims = [d for d in range(mesh.ndim) if mesh.size(d) > 1 and not all(_is_replicated(t, d) for t in tensors)]
    # The first rank along every dimension has the largest shard.
    sizes = [_shape(shard_region(tensor, [0] * mesh.ndim)).numel() for tensor in tensors]
    flat = tensors[0].to_local().new_zeros(sum(sizes))
    for space, tensor in zip(flat.split(sizes), tensors, strict=True):
        local = local_tensor(tensor)
        space[: local.numel()] = local.flatten()
    for dim in reversed(dims):
        flat = all_gather(flat, Group.from_process_group(mesh.get_group(dim)))
    wholes = [local_tensor(tensor).new_empty(tensor.shape) for tensor in tensors]
    for row, place in zip(flat.view(-1, sum(sizes)), product(*(range(mesh.size(d)) for d in dims)), strict=True):
        coordinate = list(local_coordinate)
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
