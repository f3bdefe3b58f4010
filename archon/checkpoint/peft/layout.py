"""Layout of LoRAs in PEFT files: linear layers, fused matrices and stacked experts.

PEFT adapts the modules of transformers' model. A linear layer has A [r, in] and B [out, r], as in archon. A fused
tensor holds several of archon's matrices, for example queries, keys and values, or gate and up. Its LoRA combines
theirs, of ranks r1, r2, …: A1, A2, … are stacked by rows, and each B occupies its rows and columns of a block-diagonal
matrix. Matrices with the same A share it.

A parameter that stacks E experts (`target_parameters` of PEFT) has A [E r, in], expert by expert, and B [out, r E] with
all experts of a rank next to each other. PEFT versions differ in the side of A; see `is_reversed`.
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
"""Prefix of the text decoder in the names of a multimodal model."""
Pair = tuple[Tensor, Tensor]
"""A and B of a LoRA: [r, in] and [out, r], or [E, r, in] and [E, out, r]."""


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
        a_features, b_features = (
            (self.out_features, self.in_features) if is_reversed else (self.in_features, self.out_features)
        )
        return (rows, a_features), (b_features, rows)

    def fuse(self, parts: Sequence[Pair | None]) -> tuple[Pair, bool]:
        """Return the LoRA of the whole tensor, and whether the parts share its ranks because all have the same A.

        Args:
            parts: LoRAs of the parts, None for a part without one.
        """
        present = [part for part in parts if part is not None]
        shared = len(present) == len(parts) and all(torch.equal(a, present[0][0]) for a, _ in present)
        ranks = [0 if part is None else part[0].shape[-2] for part in parts]
        a = present[0][0] if shared else torch.cat([a for a, _ in present], dim=-2)
        b = present[0][1].new_zeros(*present[0][1].shape[:-2], self.out_features, a.shape[-2])
        for target, part, columns in zip(self.parts, parts, _columns(ranks, shared=shared), strict=True):
            if part is not None:
                _insert(target, part[1], b[..., columns])
        return (a, b), shared

    def split(self, pair: Pair, ranks: Sequence[int] | None) -> list[Pair | None]:
        """Return the LoRAs of the parts: the inverse of `fuse`, without copies if strides allow.

        Args:
            pair: A and B of the whole tensor.
            ranks: ranks of the parts, 0 for a part without a LoRA; None if they share all ranks.

        Raises:
            ValueError: a part uses ranks of another part.
        """
        a, b = pair
        if ranks is None:
            return [(a, _extract(target, b)) for target in self.parts]
        pairs: list[Pair | None] = []
        for target, columns in zip(self.parts, _columns(ranks, shared=False), strict=True):
            rows = _extract(target, b)
            if rows[..., : columns.start].any() or rows[..., columns.stop :].any():
                raise ValueError("a part uses ranks of another part")
            part = a[..., columns, :], rows[..., columns]
            pairs.append(part if columns.stop > columns.start else None)
        return pairs

    def to_file(self, pair: Pair) -> Pair:
        """Return A and B as PEFT's newest versions write them."""
        a, b = pair
        return pair if self.experts is None else (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2))

    def from_file(self, pair: Pair, *, is_reversed: bool) -> Pair:
        """Return the LoRA of an output of `to_file`, or of a file of another PEFT version."""
        if self.experts is None:
            return pair
        a_features = pair[0].unflatten(0, (self.experts, -1))
        b = pair[1].unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        return (b.mT, a_features.mT) if is_reversed else (a_features, b)


def _columns(ranks: Sequence[int], *, shared: bool) -> list[slice]:
    if shared:
        return [slice(0, ranks[0])] * len(ranks)
    return [slice(sum(ranks[:part]), sum(ranks[: part + 1])) for part in range(len(ranks))]


def _extract(target: NativeTarget, b: Tensor) -> Tensor:
    """Return the rows of a part in the B of its tensor; they are placed like the rows of its weight."""
    return b if target.placement is None else replace(target.placement, transposed=False).extract(b)


def _insert(target: NativeTarget, rows: Tensor, b: Tensor) -> None:
    if target.placement is None:
        b.copy_(rows)
    else:
        replace(target.placement, transposed=False).insert(rows, b)


def peft_tensors(adapter: BaseStateDictAdapter, matrices: Iterable[str]) -> dict[str, PeftTensor]:
    """Return the tensors that hold matrices, by name, in the order of the matrices.

    Names are the checkpoint's; for `adapter.in_memory` they belong to transformers' model, which stacks experts.

    Raises:
        ConfigError: parts of a tensor differ in their inputs, or the tensor holds a parameter without LoRA support.
    """
    remaining = {*matrices}
    tensors: dict[str, PeftTensor] = {}
    shapes = adapter.hf_shapes()
    for matrix in matrices:
        for hf in adapter.hf_names(matrix):
            name, targets = hf.removesuffix(".weight"), adapter.hf_to_native(hf)
            if name in tensors:
                continue
            shape, first = shapes[hf], targets[0]
            if len(targets) > 1 and any(t.name not in remaining or not _along_rows(t, len(shape)) for t in targets):
                raise ConfigError(
                    f"lora: the LoRA of {matrix!r} has no PEFT format, because {hf!r} fuses it with "
                    "what has other inputs or no adapters; name targets without it"
                )
            out_features, in_features = shape[-1:-3:-1] if first.is_transposed else shape[-2:]
            experts = shape[0] if len(shape) == 3 else None
            tensors[name] = PeftTensor(name, targets, experts, out_features, in_features, first.is_transposed)
    return tensors


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
