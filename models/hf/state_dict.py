"""Conversion between Hugging Face tensors and parameters by a family's declared map.

Every Hugging Face key and every parameter is used exactly once; anything else raises CheckpointError. A buffer in the
map, such as a router's correction bias, is handled like a parameter.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from archon.models.base import BaseArchonModel
from archon.models.hf.config import as_dict
from archon.models.hf.config_object import HFConfig
from archon.models.hf.fused_tensors import Fused, Placement, place_parts
from archon.models.hf.mtp import DEEPSEEK_MTP, MTPNames
from archon.models.hf.names import DENSE_HF_MAP, HFMap, rename_prefix, transformers_map
from archon.models.hf.quantization import quantization_field, read_quantization
from archon.parallel.torch_private import is_changed
from archon.schema.errors import CheckpointError, ConfigError, FamilyError


@dataclass(frozen=True)
class NativeTarget:
    """Parameter, or row of a parameter, that a Hugging Face tensor fills.

    Attributes:
        name: Name of the parameter.
        index: Row of a stacked parameter (the expert); None for the full parameter.
        placement: Location of the parameter in the tensor; None for the full tensor.
        must_equal: The tensor copies a tied parameter: it is not loaded and must be bitwise equal.
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
        """Return the shape of the Hugging Face tensor for a parameter shape."""
        shape = shape if self.index is None else shape[1:]
        return shape if self.placement is None else self.placement.hf_shape(shape)

    def extract(self, tensor: Tensor) -> Tensor:
        """Return the parameter, or its row, from the Hugging Face tensor; a view if possible."""
        return tensor if self.placement is None else self.placement.extract(tensor)


def _matcher(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{\}", r"(0|[1-9]\d*)"))


def _complete_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a family's `__init__`: pass it an `HFConfig`, and set the options that it does not accept."""
    parameters = inspect.signature(init).parameters
    takes_options = "is_critic" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @functools.wraps(init)
    def complete(
        self: BaseStateDictAdapter,
        hf_config: Any,
        hf_assets_path: str | None = None,
        *,
        is_critic: bool = False,
        init_score: bool = False,
    ) -> None:
        config = hf_config if isinstance(hf_config, HFConfig) else HFConfig(hf_config)
        if takes_options:
            init(self, config, hf_assets_path, is_critic=is_critic, init_score=init_score)
            return
        init(self, config, hf_assets_path)
        if not hasattr(self, "args"):
            name = type(self).__name__
            raise FamilyError(
                f"{name}.__init__ leaves the base class out; call super().__init__(hf_config, path) first"
            )
        if is_critic:
            self.args = self.model_class.args_class.from_hf_config(config, is_critic=True)
            self.init_score = init_score

    return complete


WITHOUT_HEAD = {"model.": ""}
"""Prefixes in the files of a model that transformers saves without its head (`AutoModel`)."""
_CONVERSIONS = ("from_hf", "to_hf", "convert_single_to_hf")


class BaseStateDictAdapter:
    """Map between the tensors of a Hugging Face checkpoint and the parameters of a model; holds no tensors.

    If the map cannot describe the tensors, a family overrides `from_hf`, and `to_hf` or `convert_single_to_hf`. Files
    are then read and written through these methods, with the whole model in memory.

    Subclasses set `model_class`, and `from_hf_map` unless it is the dense map. `passthrough` lists key patterns of
    tensors that the model does not use, such as multi-token-prediction layers or the vision encoder. In a pattern
    `*` matches any characters, and braces hold an argument: "model.layers.{n_layers}.*". Passthrough tensors are not
    loaded; an export copies them from the source checkpoint. `mtp_names` are the names of multi-token-prediction
    layers that the model can train, see `with_mtp`; their `mtp_copies` of parameters of the trunk are checked on load
    and written on export.

    Args:
        hf_config: The checkpoint's config, an object or a dictionary.
        hf_assets_path: Folder of the checkpoint, for error messages only.
        is_critic: The model has a value head `score` instead of the language-model head.
        init_score: Build the critic from an actor's checkpoint: skip its `lm_head` and do not expect `score`.
    """

    model_class: ClassVar[type[BaseArchonModel]]
    from_hf_map: ClassVar[HFMap] = DENSE_HF_MAP
    passthrough: tuple[str, ...] = ()
    mtp_names: ClassVar[MTPNames | None] = None
    mtp_copies: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _complete_init(vars(cls)["__init__"])  # type: ignore[method-assign]

    def __init__(
        self, hf_config: Any, hf_assets_path: str | None = None, *, is_critic: bool = False, init_score: bool = False
    ) -> None:
        if not hasattr(type(self), "model_class"):
            raise FamilyError(f"{type(self).__name__} has no model_class; put it in a ModelSpec, or set model_class")
        self.args = self.model_class.args_class.from_hf_config(hf_config, is_critic=is_critic)
        self.quantization = read_quantization(quantization_field(as_dict(hf_config)))
        self.hf_assets_path = hf_assets_path
        self.init_score = is_critic and init_score

    @cached_property
    def overrides(self) -> frozenset[str]:
        """Conversion methods that the family overrides; none if they only rename as the map does."""
        methods = {name: getattr(type(self), name) for name in _CONVERSIONS}
        names = frozenset(n for n, method in methods.items() if method is not getattr(BaseStateDictAdapter, n))
        self.__dict__["overrides"] = names  # read by the base methods that an override calls
        return frozenset() if names and self._renames_as_map() else names

    def _renames_as_map(self) -> bool:
        """Return whether the conversion methods return the tensors themselves, under the names of the map."""
        try:
            native = {name: torch.empty(shape, device="meta") for name, shape in self.stored_shapes.items()}
            hf = dict(self._export_by_map(native.items()))
            singles = dict(pair for item in native.items() for pair in self.convert_single_to_hf(*item))
            outputs = [(dict(self.to_hf(dict(native))), hf), (singles, hf), (dict(self.from_hf(dict(hf))), native)]
        except Exception:  # noqa: BLE001 - a family's code; its methods are then used as they are
            return False
        is_same = all(
            {*output} - {"output.weight"} == {*expected} - {"output.weight"}
            and all(tensor is expected.get(name, tensor) for name, tensor in output.items())
            for output, expected in outputs
        )
        return is_same and not any(map(is_changed, native.values()))

    def require_map(self, use: str) -> None:
        """Raise CheckpointError for `use`, which reads the map, if the family overrides conversions."""
        if self.overrides:
            raise CheckpointError(
                f"{use} needs tensors that from_hf_map describes, and {type(self).__name__} overrides "
                f"{', '.join(sorted(self.overrides))}; load and save Hugging Face checkpoints instead"
            )

    @cached_property
    def to_hf_map(self) -> dict[str, str]:
        """Hugging Face template of each native template."""
        return {
            native: hf
            for hf, entry in self.from_hf_map.items()
            if entry is not None
            for native in (entry.parts if isinstance(entry, Fused) else (entry,))
        }

    @cached_property
    def meta_model(self) -> BaseArchonModel:
        """The model on the meta device."""
        with torch.device("meta"):
            return self.model_class(self.args)

    @cached_property
    def native_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by name, in the model's order; tied parameters occur once."""
        return {name: tuple(parameter.shape) for name, parameter in self.meta_model.named_parameters()}

    @cached_property
    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every buffer in the map by name; such buffers are loaded and exported like parameters."""
        buffers = self.meta_model.named_buffers()
        return {name: tuple(buffer.shape) for name, buffer in buffers if self._hf_template(name) is not None}

    @cached_property
    def full_precision_names(self) -> frozenset[str]:
        """See `BaseArchonModel.full_precision_names`."""
        return self.meta_model.full_precision_names()

    @cached_property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of everything in a checkpoint: `native_shapes` and `buffer_shapes`."""
        return self.native_shapes | self.buffer_shapes

    @property
    def is_tied(self) -> bool:
        """Whether the language-model head and the token embedding are one parameter."""
        return self.args.tie_word_embeddings and not self.args.is_critic

    @cached_property
    def stacked(self) -> BaseStateDictAdapter:
        """The same adapter for checkpoints that stack experts, as transformers' models do; see `transformers_map`."""
        return self if self.overrides else self._with_map(transformers_map(self.from_hf_map))

    @cached_property
    def in_memory(self) -> BaseStateDictAdapter:
        """The same adapter for the names of transformers' in-memory models."""
        return self.stacked

    @cached_property
    def namings(self) -> tuple[BaseStateDictAdapter, ...]:
        """This adapter, and the same adapter for other names that checkpoints of this model have."""
        return self, self.renamed(WITHOUT_HEAD)

    def renamed(self, prefixes: Mapping[str, str]) -> BaseStateDictAdapter:
        """Return the same adapter for names whose prefixes are replaced, the first that fits."""
        adapter = self._with_map({rename_prefix(hf, prefixes): entry for hf, entry in self.from_hf_map.items()})
        adapter.passthrough = tuple(rename_prefix(pattern, prefixes) for pattern in self.passthrough)
        return adapter

    def _with_map(self, hf_map: HFMap) -> BaseStateDictAdapter:
        adapter = copy.copy(self)
        fields = {"args", "quantization", "hf_assets_path", "init_score", "passthrough", "mtp_copies"}
        kept = fields & self.__dict__.keys()
        adapter.__dict__ = {name: self.__dict__[name] for name in kept}
        adapter.__dict__["from_hf_map"] = hf_map
        return adapter

    def with_mtp(self, keys: Collection[str] | None) -> BaseStateDictAdapter:
        """Return the adapter of the same model with its multi-token-prediction layers, see `archon.models.mtp`.

        Args:
            keys: the keys of the checkpoint, which have the layers; None for one layer of new weights.

        Raises:
            ConfigError: The family has no such layers, the checkpoint has none, or they have another form.
        """
        names, args = self.mtp_names, self.args
        if names is None or self.overrides or (args.is_composite and names.counts_from_trunk):
            hint = ", or vision to off" if args.image_format is not None else ""
            raise ConfigError(
                f"mtp_loss_weight trains multi-token-prediction layers, and archon computes none of "
                f"{'composite checkpoints of ' * args.is_composite}{type(args).__name__.removesuffix('ModelArgs')}; "
                f"set it to 0{hint}"
            )
        if args.rope_depends_on_length:
            raise ConfigError(
                f"mtp_loss_weight trains multi-token-prediction layers, and RoPE of kind {args.rope_scaling.kind} "
                "depends on the length of a document, which ends earlier for these layers; set it to 0"
            )
        last = args.n_layers
        count = 1 if keys is None else names.count(keys, last)
        if not count or (names.most is not None and count > names.most):
            expected = "at least 1" if names.most is None else f"{names.most}"
            raise ConfigError(
                f"mtp_loss_weight trains multi-token-prediction layers, and the checkpoint{self._where()} has {count} "
                f"(keys {names.prefix(0, last)}*); expected {expected}: set mtp_loss_weight to 0, or use a checkpoint "
                "that includes them"
            )
        hf_map = names.complete(self.from_hf_map, count, last)
        adapter = self._with_map(hf_map)
        adapter.args = replace(args, n_mtp_layers=count)
        head = "tok_embeddings.weight" if self.is_tied else "output.weight"
        copies = {hf: head if name == "output.weight" else name for hf, name in names.copied(count, last).items()}
        adapter.mtp_copies = {hf: name for hf, name in copies.items() if hf in (keys or ())}
        return adapter

    def for_keys(self, tensors: Mapping[str, Any]) -> BaseStateDictAdapter:
        """Return the adapter for these tensors by name: the one of `namings` that has their token embedding.

        Of several, it is the one that knows most of the names. Checkpoints with stacked experts, such as Qwen3.5's, and
        in-memory models need its `stacked`. The values have a `shape`.
        """
        if self.overrides:
            return self
        keys = {*tensors}
        known = [a for a in self.namings if a.to_hf_map.get("tok_embeddings.weight") in keys]
        adapter = known[0] if len(known) == 1 else max(known, key=lambda a: len(a._targets.keys() & keys), default=self)
        stacked = [_matcher(hf) for hf in transformers_map(adapter.from_hf_map).keys() - adapter.from_hf_map.keys()]
        return adapter.stacked if any(name.fullmatch(key) for name in stacked for key in keys) else adapter

    def loadable_names(self) -> list[str]:
        """Return the names that a checkpoint must fill: all except `score` of a critic built from an actor."""
        return [name for name in self.stored_shapes if not (self.init_score and name == "score.weight")]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor in a checkpoint of this config, by Hugging Face name."""
        if self.overrides & {"to_hf", "convert_single_to_hf"}:
            state = {name: torch.empty(self.stored_shapes[name], device="meta") for name in self.loadable_names()}
            try:
                return {hf: tuple(tensor.shape) for hf, tensor in self.export(state.items())}
            except Exception as error:
                methods = " or ".join(sorted(self.overrides - {"from_hf"}))
                raise FamilyError(
                    f"{type(self).__name__}.{methods} fails on tensors of the meta device: {type(error).__name__}: "
                    f"{error}; convert tensors without reading their values"
                ) from error
        return self._map_shapes()

    def _map_shapes(self) -> dict[str, tuple[int, ...]]:
        names = {*self.loadable_names()}
        return {
            hf: targets[0].hf_shape(self.stored_shapes[targets[0].name])
            for hf, targets in self._targets.items()
            if targets[0].name in names
        }

    def hf_to_native(self, hf_name: str) -> tuple[NativeTarget, ...]:
        """Return the parameters that a Hugging Face tensor fills; none for skipped and passthrough keys.

        Raises:
            CheckpointError: The key is unknown.
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
            f"{self.args.n_layers} layers has no such parameter; check that the config belongs to this checkpoint"
        )

    def is_passthrough(self, hf_name: str) -> bool:
        """Return whether an export copies this key from the source checkpoint; see `passthrough`."""
        if not self.overrides and hf_name in self._targets:
            return False
        return any(pattern.fullmatch(hf_name) for pattern in self._passthrough_patterns)

    def passthrough_name(self, hf_name: str, reader: BaseStateDictAdapter) -> str:
        """Return the name of a passthrough key of `reader`, the adapter of a checkpoint with other names."""
        for pattern, text, other in zip(
            reader._passthrough_patterns, self._passthrough_texts, reader._passthrough_texts, strict=True
        ):
            if pattern.fullmatch(hf_name):
                return text.partition("*")[0] + hf_name.removeprefix(other.partition("*")[0])
        raise CheckpointError(
            f"{hf_name!r} is no passthrough key{self._where()}; expected {', '.join(self.passthrough)}"
        )

    @cached_property
    def _passthrough_texts(self) -> list[str]:
        return [pattern.format_map(vars(self.args)) for pattern in self.passthrough]

    @cached_property
    def _passthrough_patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(".*".join(map(re.escape, text.split("*")))) for text in self._passthrough_texts]

    @cached_property
    def _skipped(self) -> list[re.Pattern[str]]:
        return [_matcher(hf) for hf, entry in self.from_hf_map.items() if entry is None]

    @cached_property
    def _native_patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_matcher(native), hf) for native, hf in self.to_hf_map.items()]

    def _hf_template(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Return the Hugging Face template of a parameter and the indices in the parameter's name."""
        for pattern, template in self._native_patterns:
            if (match := pattern.fullmatch(name)) is not None:
                return template, match.groups()
        return None

    @cached_property
    def _targets(self) -> dict[str, tuple[NativeTarget, ...]]:
        """Parameters in each checkpoint tensor, by Hugging Face name, in the model's order."""
        targets: dict[str, tuple[NativeTarget, ...]] = {}
        for name, shape in self.stored_shapes.items():
            if (match := self._hf_template(name)) is None:
                raise CheckpointError(f"parameter {name!r} has no Hugging Face name in {type(self).__name__}")
            template, indices = match
            stacked = template.count("{}") > len(indices)
            rows = [(str(row),) for row in range(shape[0])] if stacked else [()]
            if rows and template.format(*indices, *rows[0]) in targets:
                continue  # handled with an earlier part of the same tensor
            names, placements = self._parts(template, indices, stacked=stacked)
            for row in rows:
                index = int(row[0]) if row else None
                targets[template.format(*indices, *row)] = tuple(
                    NativeTarget(part, index, placement) for part, placement in zip(names, placements, strict=True)
                )
        return targets | {hf: (NativeTarget(name, must_equal=True),) for hf, name in self.mtp_copies.items()}

    def _parts(
        self, template: str, indices: tuple[str, ...], *, stacked: bool
    ) -> tuple[list[str], list[Placement | None]]:
        """Return the parameters of a Hugging Face tensor and the placement of each."""
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
        """Hugging Face names of each parameter."""
        names: dict[str, list[str]] = {name: [] for name in self.stored_shapes}
        for hf, targets in self._targets.items():
            for target in targets:
                names[target.name].append(hf)
        return names

    def tie_complaint(self, hf_name: str) -> str:
        """Return the rest of the error for a key that must equal a parameter, and does not."""
        if hf_name in self.mtp_copies:
            shared = self.to_hf_map[self.mtp_copies[hf_name]]
            return (
                f"differs from {shared!r}, and multi-token-prediction layers share it with the trunk; set "
                "mtp_loss_weight to 0"
            )
        embedding = self.to_hf_map["tok_embeddings.weight"]
        return (
            f"differs from {embedding!r}, but the config has tie_word_embeddings=true; set tie_word_embeddings to "
            "false, or remove the key"
        )

    def hf_names(self, name: str) -> list[str]:
        """Return the Hugging Face tensors that hold a parameter; a stacked parameter may span many."""
        return self._hf_names[name]

    def convert_single_to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Return (name, view) pairs of a parameter's Hugging Face tensors; none for the head of a tied model.

        An empty tensor, `torch.empty(0)`, requests the names only and is returned with each.

        Raises:
            CheckpointError: The parameter shares its tensor with others; use `export`.
        """
        if tensor.shape == (0,) and name in self.stored_shapes:
            tied_away = name == "output.weight" and self.is_tied
            return [] if tied_away else [(hf, tensor) for hf in self._hf_names[name]]
        converted = []
        for hf, target in self._export_targets(name, tensor):
            if len(self._targets[hf]) > 1:
                raise CheckpointError(
                    f"parameter {name!r} is only one part of the fused tensor {hf!r}; "
                    "convert all parameters together with export"
                )
            converted.append((hf, _fill_whole_tensor(tensor, target)))
        return converted

    def export(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert native (name, tensor) pairs to Hugging Face pairs, each as soon as all its parameters arrived.

        Only fused tensors are copies. An overridden `to_hf` gets all pairs at once, and an overridden
        `convert_single_to_hf` each pair.

        Raises:
            CheckpointError: A parameter is unknown, occurs twice or has another shape, or a fused tensor is incomplete.
        """
        if "to_hf" in self.overrides:
            yield from self.to_hf(dict(tensors)).items()
            return
        if "convert_single_to_hf" in self.overrides:
            for name, tensor in tensors:
                yield from self.convert_single_to_hf(name, tensor)
            return
        yield from self._export_by_map(tensors)

    def _export_by_map(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        pending: dict[str, tuple[Tensor, set[str]]] = {}
        for name, tensor in tensors:
            for hf, target in self._export_targets(name, tensor):
                if len(self._targets[hf]) == 1:
                    yield hf, _fill_whole_tensor(tensor, target)
                    continue
                part = tensor if target.index is None else tensor[target.index]
                assert target.placement is not None
                if hf not in pending:
                    names = {part_target.name for part_target in self._targets[hf]}
                    pending[hf] = part.new_empty(target.placement.hf_shape(part.shape)), names
                whole, missing = pending[hf]
                if name not in missing:
                    raise CheckpointError(f"parameter {name!r} occurs twice; expected once")
                if part.dtype != whole.dtype:
                    raise CheckpointError(
                        f"parameter {name!r} is {part.dtype}, other parts of {hf!r} are {whole.dtype}; "
                        "convert them to one dtype"
                    )
                target.placement.insert(part, whole)
                missing.remove(name)
                if not missing:
                    yield hf, pending.pop(hf)[0]
        for hf, (_, missing) in pending.items():
            raise CheckpointError(f"{hf!r} cannot be exported without the parameters {_shorten(missing)}")

    def _export_targets(self, name: str, tensor: Tensor) -> Iterator[tuple[str, NativeTarget]]:
        """Yield the Hugging Face tensors of a parameter with its target; none for the head of a tied model."""
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
        """Convert a native state dict to a Hugging Face state dict.

        Raises:
            CheckpointError: Parameters are missing or unknown.
        """
        if missing := {*self.stored_shapes} - {*state}:
            raise CheckpointError(f"parameters missing from the export: {_shorten(missing)}")
        by_map = "to_hf" in self.overrides  # an override called this method
        return dict(self._export_by_map(state.items()) if by_map else self.export(state.items()))

    def from_hf(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a Hugging Face state dict, of a checkpoint or an in-memory model, to a native state dict.

        Raises:
            CheckpointError: A key is unknown or missing, or a tensor has another shape.
        """
        if (reader := self.for_keys(state)) is not self:
            return reader.from_hf(state)
        expected = self._map_shapes()
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
                raise CheckpointError(f"{hf_name!r}{self._where()} {self.tie_complaint(hf_name)}")
        return native

    def load_hf(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `from_hf(state)` with the checks that an overridden `from_hf` may lack.

        Raises:
            CheckpointError: A parameter is missing, unknown or has another shape, or a key is dropped.
        """
        if "from_hf" not in self.overrides:
            return self.from_hf(state)
        method = f"{type(self).__name__}.from_hf"
        try:
            native = self.from_hf(dict(state))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{method}{self._where()} fails on these keys: {reason}") from error
        head = native.pop("output.weight", None) if self.is_tied or self.init_score else None
        if self.is_tied and head is not None and not torch.equal(head, native["tok_embeddings.weight"]):
            raise CheckpointError(
                f"{method}{self._where()}: the head differs from the embedding it is tied to; set "
                "tie_word_embeddings to false or remove it"
            )
        shapes = {name: self.stored_shapes[name] for name in self.loadable_names()}
        for name in sorted({*shapes, *native}):
            shape = tuple(native[name].shape) if name in native else "missing"
            if shape != shapes.get(name, "not a parameter"):
                expected = shapes.get(name, "no such parameter")
                raise CheckpointError(f"{method}{self._where()}: {name!r} is {shape}; expected {expected}")
        used = {*self.hf_shapes(), self.to_hf_map.get("output.weight") if self.is_tied or self.init_score else None}
        for key in sorted({*state} - used):
            if not self.is_passthrough(key) and not any(pattern.fullmatch(key) for pattern in self._skipped):
                raise CheckpointError(f"{method}{self._where()}: unknown key {key!r}; map it, or map it to None")
        return native

    def _where(self) -> str:
        return f" in {self.hf_assets_path}" if self.hf_assets_path else ""


class MTPStateDictAdapter(BaseStateDictAdapter):
    """Adapter that passes multi-token-prediction layers after the last layer through (DeepSeek-AI 2024, section 2.2).

    `num_nextn_predict_layers` or `num_mtp_layers` of the config is their number. Published checkpoints without either
    field, or with 0, have up to one such layer.
    """

    mtp_names = DEEPSEEK_MTP

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, *args, **kwargs)
        config, last = as_dict(hf_config), self.args.n_layers
        count = max(1, *(config.get(name) or 0 for name in ("num_nextn_predict_layers", "num_mtp_layers")))
        self.passthrough = tuple(f"model.layers.{layer}.*" for layer in range(last, last + count))


def _fill_whole_tensor(tensor: Tensor, target: NativeTarget) -> Tensor:
    """Return the Hugging Face tensor of a parameter, or of a row, that is not fused with others."""
    part = tensor if target.index is None else tensor[target.index]
    return part.mT if target.is_transposed else part


def _shorten(names: Iterable[str], limit: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(map(repr, ordered[:limit])) + more
