"""How PEFT holds the adapters of archon's matrices: of a linear layer, of fused matrices, of stacked experts.

PEFT adapts what transformers' model has. A linear layer has A [r, in] and B [out, r], as here. Where one tensor holds
several of archon's matrices, such as queries, keys and values, or gate and up, its A and B are those of all of them: an
adapter of each, of ranks r1, r2, …, is one of their sum, with A1, A2, … below each other and each B in its own rows and
columns; matrices whose A is the same share it.

A parameter that stacks E experts (`target_parameters` of PEFT) has A [E r, in], expert after expert, and B [out, r E],
all experts of a rank after each other. PEFT's versions differ in which side A is of; see `is_reversed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from archon.models.hf.state_dict import BaseStateDictAdapter, NativeTarget
from archon.schema.errors import ConfigError

PREFIX = "base_model.model."
TEXT_MODEL = ".language_model."
"""What names of a composite model have before its text decoder's; those of the decoder alone lack it."""
Pair = tuple[Tensor, Tensor]
"""A and B of an adapter: [r, in] and [out, r], or [E, r, in] and [E, out, r]."""


@dataclass(frozen=True)
class PeftTensor:
    """A linear layer of transformers' model, or a parameter that stacks experts, and archon's matrices in it.

    Attributes:
        name: of the layer's module, or of the parameter.
        parts: archon's matrices, or one expert's.
        experts: how many the parameter stacks; None for a linear layer.
        out_features, in_features: of the tensor, or of each expert's matrix.
        transposed: whether the parameter holds [E, in, out], not [E, out, in].
    """

    name: str
    parts: tuple[NativeTarget, ...]
    experts: int | None
    out_features: int
    in_features: int
    transposed: bool

    @property
    def module(self) -> str:
        """The module that PEFT wraps: itself, or the one that has the parameter."""
        return self.name if self.experts is None else self.name.rpartition(".")[0]

    @property
    def in_text_model(self) -> PeftTensor:
        """The same tensor by its name in the text decoder alone, as `AutoModelForCausalLM` loads composite models."""
        return replace(self, name=self.name.replace(TEXT_MODEL, ".", 1))

    def shapes(self, rank: int, *, is_reversed: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B in PEFT's file."""
        rows = rank * (self.experts or 1)
        near, far = (self.out_features, self.in_features) if is_reversed else (self.in_features, self.out_features)
        return (rows, near), (far, rows)

    def fuse(self, parts: Sequence[Pair | None]) -> tuple[Pair, bool]:
        """Return the adapter of the whole tensor, and whether the parts share its ranks, as all have the same A.

        Args:
            parts: their adapters, None for one without.
        """
        given = [part for part in parts if part is not None]
        shared = len(given) == len(parts) and all(torch.equal(a, given[0][0]) for a, _ in given)
        ranks = [0 if part is None else part[0].shape[-2] for part in parts]
        a = given[0][0] if shared else torch.cat([a for a, _ in given], dim=-2)
        b = given[0][1].new_zeros(*given[0][1].shape[:-2], self.out_features, a.shape[-2])
        for target, part, columns in zip(self.parts, parts, _columns(ranks, shared=shared), strict=True):
            if part is not None:
                _insert(target, part[1], b[..., columns])
        return (a, b), shared

    def split(self, pair: Pair, ranks: Sequence[int] | None) -> list[Pair | None]:
        """Return the adapters of the parts: the reverse of `fuse`, without copies where strides allow it.

        Args:
            ranks: those of the parts, 0 for one without an adapter; None if they share all.

        Raises ValueError where a part has more than its own ranks.
        """
        a, b = pair
        if ranks is None:
            return [(a, _extract(target, b)) for target in self.parts]
        found: list[Pair | None] = []
        for target, columns in zip(self.parts, _columns(ranks, shared=False), strict=True):
            rows = _extract(target, b)
            if rows[..., : columns.start].any() or rows[..., columns.stop :].any():
                raise ValueError("a part has more than its own ranks")
            own = a[..., columns, :], rows[..., columns]
            found.append(own if columns.stop > columns.start else None)
        return found

    def to_file(self, pair: Pair) -> Pair:
        """Return A and B as PEFT's newest versions write them."""
        a, b = pair
        return pair if self.experts is None else (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2))

    def from_file(self, pair: Pair, *, is_reversed: bool) -> Pair:
        """Return the adapter of what `to_file` returned, or of what another version of PEFT wrote."""
        if self.experts is None:
            return pair
        near = pair[0].unflatten(0, (self.experts, -1))
        far = pair[1].unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        return (far.mT, near.mT) if is_reversed else (near, far)


def _columns(ranks: Sequence[int], *, shared: bool) -> list[slice]:
    if shared:
        return [slice(0, ranks[0])] * len(ranks)
    return [slice(sum(ranks[:part]), sum(ranks[: part + 1])) for part in range(len(ranks))]


def _extract(target: NativeTarget, b: Tensor) -> Tensor:
    """Return a part's rows of the B of its tensor, which lie in it as those of its weight do."""
    return b if target.placement is None else replace(target.placement, transposed=False).extract(b)


def _insert(target: NativeTarget, rows: Tensor, b: Tensor) -> None:
    if target.placement is None:
        b.copy_(rows)
    else:
        replace(target.placement, transposed=False).insert(rows, b)


def peft_tensors(adapter: BaseStateDictAdapter, matrices: Iterable[str]) -> dict[str, PeftTensor]:
    """Return the tensors that hold matrices, by name, in the order of the matrices.

    Their names are those of the checkpoint; of `adapter.in_memory` they are those of transformers' model, which stacks
    experts. Raises ConfigError for a tensor whose parts differ in their inputs, or that holds what has no adapters.
    """
    wanted = {*matrices}
    found: dict[str, PeftTensor] = {}
    shapes = adapter.hf_shapes()
    for matrix in matrices:
        for hf in adapter.hf_names(matrix):
            name, targets = hf.removesuffix(".weight"), adapter.hf_to_native(hf)
            if name in found:
                continue
            shape, first = shapes[hf], targets[0]
            if len(targets) > 1 and any(t.name not in wanted or not _along_rows(t, len(shape)) for t in targets):
                raise ConfigError(
                    f"lora: the adapter of {matrix!r} cannot be written in PEFT's format, since {hf!r} holds it with "
                    "what has other inputs or no adapters; name targets without it"
                )
            out_features, in_features = shape[-1:-3:-1] if first.is_transposed else shape[-2:]
            experts = shape[0] if len(shape) == 3 else None
            found[name] = PeftTensor(name, targets, experts, out_features, in_features, first.is_transposed)
    return found


def _along_rows(target: NativeTarget, dimensions: int) -> bool:
    return target.placement is not None and target.placement.dim == dimensions - 2


def key_pairs(tensors: Iterable[PeftTensor]) -> dict[str, tuple[str, str]]:
    """Return the keys of A and B of each adapted tensor, by its name.

    PEFT wraps a module once for each of its adapted parameters, in their order, so that the last has the plain name.
    """
    by_module: dict[str, list[str]] = {}
    for tensor in tensors:
        by_module.setdefault(tensor.module, []).append(tensor.name)
    keys = {}
    for module, names in by_module.items():
        for inner, name in enumerate(reversed(names)):
            prefix = PREFIX + module + ".base_layer" * inner
            keys[name] = f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"
    return keys


def is_reversed(version: tuple[int, ...], *, transposed: bool) -> bool:
    """Return whether a version of PEFT wrote A for the outputs and B for the inputs of stacked experts.

    Up to 0.18 A was always of the parameter's first dimension after the experts; 0.19.0 exchanged the two for
    transposed parameters, and 0.19.1 does so for the others, so that A is of the inputs of both.
    """
    return version < (0, 19, 1) and (not transposed or version >= (0, 19))
