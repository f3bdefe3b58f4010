"""PEFT's layout of LoRAs of linear layers, fused matrices and stacked experts.

PEFT adapts the modules of transformers' models. A linear layer has A [r, in] and B [out, r], as in archon. One tensor
may fuse several archon matrices, such as queries, keys and values, or gate and up. The LoRAs of these
matrices, of ranks r1, r2, …, become one LoRA of rank r1 + r2 + …: A1, A2, … are concatenated, and every B has separate
rows and columns. Matrices with the same A share it.

A parameter that stacks E experts (`target_parameters` of PEFT) has A [E r, in] with experts outermost, and B [out, r E]
with experts innermost. In some PEFT versions A belongs to the outputs; see `is_reversed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from archon.models.hf.state_dict import BaseStateDictAdapter, NativeTarget
from archon.models.lora.targets import EMBEDDING
from archon.schema.errors import ConfigError

PREFIX = "base_model.model."
BASE_LAYER = ".base_layer.weight"
"""Suffix of the base's embedding and head, which PEFT stores next to their LoRA."""
TEXT_MODEL = ".language_model."
"""Part of the text decoder's names in a vision-language model; names of a plain text decoder lack it."""
Pair = tuple[Tensor, Tensor]
"""A and B of a LoRA: [r, in] and [out, r], or [E, r, in] and [E, out, r]."""


@dataclass(frozen=True)
class PeftTensor:
    """A linear layer of transformers' model, or a parameter that stacks experts, with archon's matrices in it.

    Attributes:
        name: name of the module or of the parameter.
        parts: archon's matrices in the tensor.
        experts: number of stacked experts; None for a linear layer.
        out_features: output size, per expert.
        in_features: input size, per expert.
        transposed: whether the parameter has shape [E, in, out] instead of [E, out, in].
        is_embedding: whether it is the token embedding; its A [r, vocab] is a table that is looked up by token.
    """

    name: str
    parts: tuple[NativeTarget, ...]
    experts: int | None
    out_features: int
    in_features: int
    transposed: bool
    is_embedding: bool = False

    @property
    def module(self) -> str:
        """Name of the module that PEFT wraps."""
        return self.name if self.experts is None else self.name.rpartition(".")[0]

    @property
    def in_text_model(self) -> PeftTensor:
        """The tensor with its name in a plain text decoder, as `AutoModelForCausalLM` loads it."""
        return replace(self, name=self.name.replace(TEXT_MODEL, ".", 1))

    def shapes(self, rank: int, *, is_reversed: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B in PEFT's file."""
        rows = rank * (self.experts or 1)
        swapped = is_reversed or self.is_embedding
        a_size, b_size = (self.out_features, self.in_features) if swapped else (self.in_features, self.out_features)
        return (rows, a_size), (b_size, rows)

    def fuse(self, parts: Sequence[Pair | None]) -> tuple[Pair, bool]:
        """Fuse the LoRAs of the parts (None without a LoRA); also return whether the parts share one A."""
        pairs = [part for part in parts if part is not None]
        shared = len(pairs) == len(parts) and all(torch.equal(a, pairs[0][0]) for a, _ in pairs)
        ranks = [0 if part is None else part[0].shape[-2] for part in parts]
        a = pairs[0][0] if shared else torch.cat([a for a, _ in pairs], dim=-2)
        b = pairs[0][1].new_zeros(*pairs[0][1].shape[:-2], self.out_features, a.shape[-2])
        for target, part, columns in zip(self.parts, parts, _columns(ranks, shared=shared), strict=True):
            if part is not None:
                _insert(target, part[1], b[..., columns])
        return (a, b), shared

    def split(self, pair: Pair, ranks: Sequence[int] | None) -> list[Pair | None]:
        """Split a fused LoRA into the LoRAs of the parts, as views if possible; the reverse of `fuse`.

        Args:
            pair: A and B of the tensor.
            ranks: ranks of the parts, 0 without a LoRA; None if the parts share A.

        Raises:
            ValueError: B is nonzero outside the ranks of a part.
        """
        a, b = pair
        if ranks is None:
            return [(a, _extract(target, b)) for target in self.parts]
        pairs: list[Pair | None] = []
        for target, columns in zip(self.parts, _columns(ranks, shared=False), strict=True):
            rows = _extract(target, b)
            if rows[..., : columns.start].any() or rows[..., columns.stop :].any():
                raise ValueError("B is nonzero outside the ranks of a part")
            part = a[..., columns, :], rows[..., columns]
            pairs.append(part if columns.stop > columns.start else None)
        return pairs

    def fuse_magnitudes(self, parts: Sequence[Tensor]) -> Tensor:
        """Fuse the DoRA magnitudes of the rows of all parts: [out]."""
        rows = parts[0].new_zeros(self.out_features, 1)
        for target, part in zip(self.parts, parts, strict=True):
            _insert(target, part.unsqueeze(1), rows)
        return rows.squeeze(1)

    def split_magnitudes(self, magnitudes: Tensor) -> list[Tensor]:
        """Split the magnitudes [out] of a tensor into the magnitudes of its parts; the reverse of `fuse_magnitudes`."""
        return [_extract(target, magnitudes.unsqueeze(1)).squeeze(1) for target in self.parts]

    def to_file(self, pair: Pair) -> Pair:
        """Convert A and B to the file layout of the newest PEFT versions."""
        a, b = pair
        if self.is_embedding:
            return b.t().contiguous(), a.t().contiguous()
        return pair if self.experts is None else (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2))

    def from_file(self, pair: Pair, *, is_reversed: bool) -> Pair:
        """Convert A and B from the file layout of any PEFT version."""
        if self.is_embedding:
            return pair[1].t(), pair[0].t()
        if self.experts is None:
            return pair
        a = pair[0].unflatten(0, (self.experts, -1))
        b = pair[1].unflatten(1, (-1, self.experts)).permute(2, 0, 1)
        return (b.mT, a.mT) if is_reversed else (a, b)


def _columns(ranks: Sequence[int], *, shared: bool) -> list[slice]:
    if shared:
        return [slice(0, ranks[0])] * len(ranks)
    return [slice(sum(ranks[:part]), sum(ranks[: part + 1])) for part in range(len(ranks))]


def _extract(target: NativeTarget, b: Tensor) -> Tensor:
    """Return a part's rows of B, placed like the rows of its weight."""
    return b if target.placement is None else replace(target.placement, transposed=False).extract(b)


def _insert(target: NativeTarget, rows: Tensor, b: Tensor) -> None:
    if target.placement is None:
        b.copy_(rows)
    else:
        replace(target.placement, transposed=False).insert(rows, b)


def peft_tensors(adapter: BaseStateDictAdapter, matrices: Iterable[str]) -> dict[str, PeftTensor]:
    """Return the tensors of archon's matrices by name, in the order of the matrices.

    Names are checkpoint keys. `adapter.in_memory` gives the names of transformers' model, which stacks experts.

    Raises:
        ConfigError: a tensor's parts have different inputs, or one of them cannot have a LoRA.
    """
    adapter.require_map("a LoRA in PEFT's format")
    names = {*matrices}
    tensors: dict[str, PeftTensor] = {}
    shapes = adapter.hf_shapes()
    for matrix in matrices:
        for hf in adapter.hf_names(matrix):
            name, targets = hf.removesuffix(".weight"), adapter.hf_to_native(hf)
            if name in tensors:
                continue
            shape, first = shapes[hf], targets[0]
            fits = (t.name in names and t.placement is not None and t.placement.dim == len(shape) - 2 for t in targets)
            if len(targets) > 1 and not all(fits):
                raise ConfigError(
                    f"lora: the LoRA of {matrix!r} cannot be written in PEFT's format, since {hf!r} fuses it with "
                    "weights that have other inputs or no LoRA; remove it from targets"
                )
            out_features, in_features = shape[-1:-3:-1] if first.is_transposed else shape[-2:]
            experts = shape[0] if len(shape) == 3 else None
            is_embedding = matrix == EMBEDDING
            tensors[name] = PeftTensor(
                name, targets, experts, out_features, in_features, first.is_transposed, is_embedding
            )
    return tensors


def key_pairs(tensors: Iterable[PeftTensor]) -> dict[str, tuple[str, str]]:
    """Return the keys of A and B of each adapted tensor, by its name.

    PEFT wraps a module once per adapted parameter, in order; the last parameter has the plain name.
    """
    by_module: dict[str, list[str]] = {}
    embeddings = set[str]()
    for tensor in tensors:
        if tensor.is_embedding:
            embeddings.add(tensor.name)
        by_module.setdefault(tensor.module, []).append(tensor.name)
    keys = {}
    for module, names in by_module.items():
        for inner, name in enumerate(reversed(names)):
            prefix = PREFIX + module + ".base_layer" * inner
            kind, end = ("lora_embedding", "") if name in embeddings else ("lora", ".weight")
            keys[name] = f"{prefix}.{kind}_A{end}", f"{prefix}.{kind}_B{end}"
    return keys


def magnitude_key(tensor: PeftTensor) -> str:
    """Return the key of the DoRA magnitudes of a linear layer."""
    return f"{PREFIX}{tensor.name}.lora_magnitude_vector"


def is_reversed(version: tuple[int, ...], *, transposed: bool) -> bool:
    """Return whether a PEFT version writes A for the outputs and B for the inputs of stacked experts.

    Up to 0.18 A belongs to the parameter's first dimension after the experts. 0.19.0 swaps A and B for transposed
    parameters, 0.19.1 for all others, so that A always belongs to the inputs.
    """
    return version < (0, 19, 1) and (not transposed or version >= (0, 19))
