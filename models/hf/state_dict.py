"""Conversion between the tensors of Hugging Face checkpoints and parameters, by a map that each family declares.

Every Hugging Face key and every parameter is used exactly once; anything else raises CheckpointError. Buffers that
belong to the state, such as a router's correction bias, are parameters here if the map names them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from archon.models.base import BaseArchonModel
from archon.models.hf.config import as_dict
from archon.models.hf.fused_tensors import Fused, Placement, place_parts
from archon.models.hf.names import DENSE_HF_MAP, HFMap, transformers_map
from archon.models.hf.quantization import FIELD as QUANTIZATION_FIELD
from archon.models.hf.quantization import read_quantization
from archon.schema.errors import CheckpointError


@dataclass(frozen=True)
class NativeTarget:
    """A parameter that a Hugging Face tensor fills, or of which it fills a row.

    Attributes:
        name: of the parameter.
        index: the row of a stacked parameter that it fills (an expert's); None for the full parameter.
        placement: where the parameter lies in the tensor; None for the full tensor.
        must_equal: it is a copy of a tied parameter: not loaded, and an error unless bitwise equal to it.
    """

    name: str
    index: int | None = None
    placement: Placement | None = None
    must_equal: bool = False

    @property
    def is_transposed(self) -> bool:
        """Whether the tensor's last two dimensions are the parameter's in reverse."""
        return self.placement is not None and self.placement.transposed

    def hf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the Hugging Face tensor for that of the parameter."""
        shape = shape if self.index is None else shape[1:]
        return shape if self.placement is None else self.placement.hf_shape(shape)

    def extract(self, tensor: Tensor) -> Tensor:
        """Returns the parameter, or its row, from the Hugging Face tensor; a view where possible."""
        return tensor if self.placement is None else self.placement.extract(tensor)


def _matcher(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{\}", r"(0|[1-9]\d*)"))


class BaseStateDictAdapter:
    """Maps the tensors of a Hugging Face checkpoint to the parameters of a model and back; stores no tensors.

    Args:
        hf_config: the checkpoint's config, an object or a dictionary.
        hf_assets_path: folder of the checkpoint, for error messages only.
        is_critic: the model has a value head `score` in place of the language-model head.
        init_score: the critic is built from an actor's checkpoint: its `lm_head` is skipped, `score` is not expected.

    Subclasses set `model_class` and, where they differ, `from_hf_map`. In `passthrough` they name the keys of what this
    model does not compute, such as layers that predict further tokens or the vision tower of a composite model:
    patterns with `*` for any characters and fields of the arguments in braces, as "model.layers.{n_layers}.*". They are
    not loaded; an export copies them from the checkpoint it is like.
    """

    model_class: ClassVar[type[BaseArchonModel]]
    from_hf_map: ClassVar[HFMap] = DENSE_HF_MAP
    passthrough: tuple[str, ...] = ()

    def __init__(
        self, hf_config: Any, hf_assets_path: str | None = None, *, is_critic: bool = False, init_score: bool = False
    ) -> None:
        self.args = self.model_class.args_class.from_hf_config(hf_config, is_critic=is_critic)
        self.quantization = read_quantization(as_dict(hf_config).get(QUANTIZATION_FIELD))
        self.hf_assets_path = hf_assets_path
        self.init_score = is_critic and init_score

    @cached_property
    def to_hf_map(self) -> dict[str, str]:
        """The Hugging Face template of each native template."""
        return {
            native: hf
            for hf, entry in self.from_hf_map.items()
            if entry is not None
            for native in (entry.parts if isinstance(entry, Fused) else (entry,))
        }

    @cached_property
    def _shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], frozenset[str]]:
        with torch.device("meta"):
            model = self.model_class(self.args)
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if self._hf_template(name) is not None)
        parameters, stored_buffers = (
            {name: tuple(tensor.shape) for name, tensor in tensors} for tensors in (model.named_parameters(), buffers)
        )
        return parameters, stored_buffers, model.full_precision_names()

    @property
    def native_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name, tied ones once, in the model's order."""
        return self._shapes[0]

    @property
    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every buffer that the map names, by name: they are loaded and exported as parameters are."""
        return self._shapes[1]

    @property
    def full_precision_names(self) -> frozenset[str]:
        """See `BaseArchonModel.full_precision_names`."""
        return self._shapes[2]

    @cached_property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """`native_shapes` and `buffer_shapes`: what a checkpoint holds."""
        return self.native_shapes | self.buffer_shapes

    @property
    def is_tied(self) -> bool:
        """Whether the language-model head and the token embedding are one parameter."""
        return self.args.tie_word_embeddings and not self.args.is_critic

    @cached_property
    def in_memory(self) -> BaseStateDictAdapter:
        """The same adapter with the names that transformers' models have in memory; see `transformers_map`."""
        adapter = copy.copy(self)
        kept = {"args", "quantization", "hf_assets_path", "init_score", "passthrough"} & self.__dict__.keys()
        adapter.__dict__ = {name: self.__dict__[name] for name in kept}
        adapter.__dict__["from_hf_map"] = transformers_map(self.from_hf_map)
        return adapter

    def for_keys(self, keys: Iterable[str]) -> BaseStateDictAdapter:
        """Returns the adapter that reads tensors of these names: this one, or `in_memory` where they are named so.

        Besides models in memory these are checkpoints that stack their experts, as Qwen publishes Qwen3.5's.
        """
        others = [_matcher(hf) for hf in transformers_map(self.from_hf_map).keys() - self.from_hf_map.keys()]
        return self.in_memory if any(name.fullmatch(key) for name in others for key in keys) else self

    def loadable_names(self) -> list[str]:
        """Returns what a checkpoint must fill: all but the `score` of a critic built from an actor."""
        return [name for name in self.stored_shapes if not (self.init_score and name == "score.weight")]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor in a checkpoint of this config, by Hugging Face name."""
        names = {*self.loadable_names()}
        return {
            hf: targets[0].hf_shape(self.stored_shapes[targets[0].name])
            for hf, targets in self._targets.items()
            if targets[0].name in names
        }

    def hf_to_native(self, hf_name: str) -> tuple[NativeTarget, ...]:
        """Returns the parameters that a Hugging Face tensor fills; none for a key to skip or to carry.

        Raises CheckpointError for an unknown key.
        """
        if hf_name == self.to_hf_map.get("output.weight") and (self.init_score or self.is_tied):
            return () if self.init_score else (NativeTarget("tok_embeddings.weight", must_equal=True),)
        targets = self._targets.get(hf_name)
        if targets is not None and not (self.init_score and targets[0].name == "score.weight"):
            return targets
        if any(pattern.fullmatch(hf_name) for pattern in self._skipped) or self.is_passthrough(hf_name):
            return ()
        raise CheckpointError(
            f"unknown key {hf_name!r}{self._where()}: this {'critic' if self.args.is_critic else 'model'} of "
            f"{self.args.n_layers} layers has no such parameter; is it the config of another checkpoint?"
        )

    def is_passthrough(self, hf_name: str) -> bool:
        """Returns whether a key is one that an export copies from the source checkpoint; see `passthrough`."""
        if hf_name in self._targets:
            return False
        return any(pattern.fullmatch(hf_name) for pattern in self._passthrough_patterns)

    @cached_property
    def _passthrough_patterns(self) -> list[re.Pattern[str]]:
        patterns = (pattern.format_map(vars(self.args)) for pattern in self.passthrough)
        return [re.compile(".*".join(map(re.escape, pattern.split("*")))) for pattern in patterns]

    @cached_property
    def _skipped(self) -> list[re.Pattern[str]]:
        return [_matcher(hf) for hf, entry in self.from_hf_map.items() if entry is None]

    @cached_property
    def _native_patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_matcher(native), hf) for native, hf in self.to_hf_map.items()]

    def _hf_template(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Returns the Hugging Face template of a parameter, and the indices in the parameter's name."""
        for pattern, template in self._native_patterns:
            if (match := pattern.fullmatch(name)) is not None:
                return template, match.groups()
        return None

    @cached_property
    def _targets(self) -> dict[str, tuple[NativeTarget, ...]]:
        """The parameters in each tensor of a checkpoint, by Hugging Face name, in the model's order."""
        targets: dict[str, tuple[NativeTarget, ...]] = {}
        for name, shape in self.stored_shapes.items():
            found = self._hf_template(name)
            if found is None:
                raise CheckpointError(f"parameter {name!r} has no Hugging Face name in {type(self).__name__}")
            template, indices = found
            stacked = template.count("{}") > len(indices)
            rows = [(str(row),) for row in range(shape[0])] if stacked else [()]
            if rows and template.format(*indices, *rows[0]) in targets:
                continue  # with an earlier part of the same tensor
            names, placements = self._parts(template, indices, stacked=stacked)
            for row in rows:
                index = int(row[0]) if row else None
                targets[template.format(*indices, *row)] = tuple(
                    NativeTarget(part, index, placement) for part, placement in zip(names, placements, strict=True)
                )
        return targets

    def _parts(
        self, template: str, indices: tuple[str, ...], *, stacked: bool
    ) -> tuple[list[str], list[Placement | None]]:
        """Returns the names of a Hugging Face tensor's parameters, and where each lies in it."""
        entry = self.from_hf_map[template]
        assert entry is not None
        parts = entry.parts if isinstance(entry, Fused) else (entry,)
        if any(part.count("{}") != len(indices) for part in parts):
            raise CheckpointError(
                f"the parts of {template!r} in {type(self).__name__} differ in their indices: {parts}"
            )
        names = [part.format(*indices) for part in parts]
        for name in names:
            if name not in self.stored_shapes:
                raise CheckpointError(
                    f"{template!r} in {type(self).__name__} holds {', '.join(names)}, but this model has no {name!r}"
                )
        if not isinstance(entry, Fused):
            return names, [None]
        shapes = [self.stored_shapes[name][stacked:] for name in names]
        return names, [*place_parts(entry, shapes, self.args)]

    @cached_property
    def _hf_names(self) -> dict[str, list[str]]:
        """The Hugging Face names of each parameter."""
        names: dict[str, list[str]] = {name: [] for name in self.stored_shapes}
        for hf, targets in self._targets.items():
            for target in targets:
                names[target.name].append(hf)
        return names

    def hf_names(self, name: str) -> list[str]:
        """Returns the Hugging Face names of the tensors that hold a parameter: a stacked one may lie in many."""
        return self._hf_names[name]

    def convert_single_to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Returns (name, view) of a parameter's Hugging Face tensors; none for the head of a tied model.

        An empty tensor, `torch.empty(0)`, asks for the names alone, and is returned with each.

        Raises CheckpointError for a parameter that shares its tensor with others, for which there is `export`.
        """
        if tensor.shape == (0,) and name in self.stored_shapes:
            tied_away = name == "output.weight" and self.is_tied
            return [] if tied_away else [(hf, tensor) for hf in self._hf_names[name]]
        converted = []
        for hf, target in self._export_targets(name, tensor):
            if len(self._targets[hf]) > 1:
                raise CheckpointError(
                    f"parameter {name!r} is one of several in {hf!r}, which cannot be made of it alone; "
                    "use export, with all parameters"
                )
            converted.append((hf, _fill_whole_tensor(tensor, target)))
        return converted

    def export(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the Hugging Face (name, tensor) pairs of native ones, each as soon as all its parameters have come.

        Only tensors of several parameters are copies. Raises CheckpointError for a parameter that is not part of the
        model, is given twice or has another shape, and at the end where a tensor lacks one of its parameters.
        """
        pending: dict[str, tuple[Tensor, set[str]]] = {}
        for name, tensor in tensors:
            for hf, target in self._export_targets(name, tensor):
                if len(self._targets[hf]) == 1:
                    yield hf, _fill_whole_tensor(tensor, target)
                    continue
                part = tensor if target.index is None else tensor[target.index]
                assert target.placement is not None
                if hf not in pending:
                    others = {other.name for other in self._targets[hf]}
                    pending[hf] = part.new_empty(target.placement.hf_shape(part.shape)), others
                whole, missing = pending[hf]
                if name not in missing:
                    raise CheckpointError(f"parameter {name!r} was given twice; expected each once")
                if part.dtype != whole.dtype:
                    raise CheckpointError(
                        f"parameter {name!r} is {part.dtype}, others of {hf!r} are {whole.dtype}; convert them to one"
                    )
                target.placement.insert(part, whole)
                missing.remove(name)
                if not missing:
                    yield hf, pending.pop(hf)[0]
        for hf, (_, missing) in pending.items():
            raise CheckpointError(f"{hf!r} cannot be exported without the parameters {_shorten(missing)}")

    def _export_targets(self, name: str, tensor: Tensor) -> Iterator[tuple[str, NativeTarget]]:
        """Yields the Hugging Face tensors that hold a parameter, and where; none for the head of a tied model."""
        if name == "output.weight" and self.is_tied:
            return
        if name not in self.stored_shapes:
            raise CheckpointError(f"parameter {name!r} is not part of this model; expected the names in native_shapes")
        if tuple(tensor.shape) != self.stored_shapes[name]:
            raise CheckpointError(
                f"parameter {name!r} has shape {tuple(tensor.shape)}, expected {self.stored_shapes[name]}"
            )
        for hf in self._hf_names[name]:
            yield hf, next(target for target in self._targets[hf] if target.name == name)

    def to_hf(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a native state dict as Hugging Face's. Raises CheckpointError for missing or extra parameters."""
        if missing := {*self.stored_shapes} - {*state}:
            raise CheckpointError(f"parameters missing from the export: {_shorten(missing)}")
        return dict(self.export(state.items()))

    def from_hf(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a Hugging Face state dict, of a checkpoint or of a model in memory, as a native one.

        Raises CheckpointError for an unknown or missing key, and for another shape.
        """
        if (reader := self.for_keys(state)) is not self:
            return reader.from_hf(state)
        expected = self.hf_shapes()
        native: dict[str, Tensor] = {}
        rows: dict[str, dict[int, Tensor]] = {}
        ties: dict[str, str] = {}
        for hf_name, tensor in state.items():
            for target in self.hf_to_native(hf_name):
                if target.must_equal:
                    ties[hf_name] = target.name
                    continue
                if tuple(tensor.shape) != expected[hf_name]:
                    raise CheckpointError(
                        f"{hf_name!r}{self._where()} has shape {tuple(tensor.shape)}, expected {expected[hf_name]}"
                    )
                if target.index is None:
                    native[target.name] = target.extract(tensor)
                else:
                    rows.setdefault(target.name, {})[target.index] = target.extract(tensor)
        if missing := {*expected} - {*state}:
            raise CheckpointError(f"keys missing{self._where()}: {_shorten(missing)}")
        for name, by_row in rows.items():
            native[name] = torch.stack([by_row[row] for row in sorted(by_row)])
        for hf_name, name in ties.items():
            if not torch.equal(state[hf_name], native[name]):
                raise CheckpointError(
                    f"{hf_name!r}{self._where()} differs from the embedding it is tied to; "
                    "set tie_word_embeddings to false or remove it"
                )
        return native

    def _where(self) -> str:
        return f" in {self.hf_assets_path}" if self.hf_assets_path else ""


def _fill_whole_tensor(tensor: Tensor, target: NativeTarget) -> Tensor:
    """Returns the Hugging Face tensor that a parameter, or a row of it, fills alone."""
    part = tensor if target.index is None else tensor[target.index]
    return part.mT if target.is_transposed else part


def _shorten(names: Iterable[str], limit: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(map(repr, ordered[:limit])) + more
