"""The registry: which family serves which Hugging Face `model_type`.

A package outside archon joins by an entry point of the group `archon.models` whose value is a `ModelSpec`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from threading import RLock
from typing import Any

from archon.models.args import BaseModelArgs
from archon.models.base import BaseArchonModel
from archon.models.state_dict import BaseStateDictAdapter
from archon.schema.errors import UnknownModelError

ParallelizeFn = Callable[..., Any]
PipeliningFn = Callable[..., Any]

ENTRY_POINT_GROUP = "archon.models"
# A new family adds its name here; nothing else outside its file changes.
FAMILIES = ("qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelSpec:
    """Everything the engine needs to know of one family.

    Attributes:
        name: the family's name, unique among registered specs.
        model_class: built as `model_class(args)`, on the meta device inside the engine.
        model_args_class: reads a Hugging Face config by `from_hf_config`.
        state_dict_adapter_class: maps Hugging Face tensors to parameters and back.
        parallelize_fn: applies a layout to a built model, see `archon.parallel.decoder.parallelize_decoder`.
        supported_model_types: the Hugging Face `model_type` strings this family claims.
        pipelining_fn: splits a model into pipeline stages; None for a family that cannot be split.
    """

    name: str
    model_class: type[BaseArchonModel]
    model_args_class: type[BaseModelArgs]
    state_dict_adapter_class: type[BaseStateDictAdapter]
    parallelize_fn: ParallelizeFn
    supported_model_types: frozenset[str]
    pipelining_fn: PipeliningFn | None = None


def family_spec(
    name: str,
    adapter: type[BaseStateDictAdapter],
    parallelize_fn: ParallelizeFn,
    pipelining_fn: PipeliningFn | None = None,
) -> ModelSpec:
    """Returns the spec of a family whose adapter names its model, whose model names its arguments, and whose arguments
    name the Hugging Face `model_type`s they read."""
    model = adapter.model_class
    args = model.args_class
    return ModelSpec(name, model, args, adapter, parallelize_fn, args.model_types, pipelining_fn)


class _Registry:
    """Specs by `model_type`; the built-in families and the entry points are read on first use, by one thread while
    others wait."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._specs: dict[str, ModelSpec] = {}
        self._discovered = False

    def add(self, specs: Iterable[ModelSpec]) -> None:
        for spec in specs:
            for model_type in sorted(spec.supported_model_types):
                holder = self._specs.get(model_type)
                if holder is not None and holder is not spec:
                    raise ValueError(
                        f"model_type {model_type!r} is claimed by {spec.name!r}, but {holder.name!r} holds it already; "
                        "each model_type belongs to one family"
                    )
            self._specs.update(dict.fromkeys(spec.supported_model_types, spec))

    def specs(self) -> dict[str, ModelSpec]:
        with self._lock:
            if not self._discovered:
                self._discovered = True
                self.add(importlib.import_module(f"archon.models.{family}").SPEC for family in FAMILIES)
                self.add(entry.load() for entry in metadata.entry_points(group=ENTRY_POINT_GROUP))
        return self._specs


_REGISTRY = _Registry()


def register_model_spec(spec: ModelSpec) -> None:
    """Make a family known. Raises ValueError when another spec claims one of its model types already."""
    _REGISTRY.specs()
    _REGISTRY.add([spec])


def get_model_spec(model_type: str) -> ModelSpec:
    """The spec that serves a Hugging Face `model_type`; UnknownModelError names what is available."""
    specs = _REGISTRY.specs()
    if model_type not in specs:
        raise UnknownModelError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(specs))} "
            f"(other packages add families by the entry-point group {ENTRY_POINT_GROUP!r})"
        )
    return specs[model_type]


def is_supported_model(model_type: str) -> bool:
    """Whether some registered family serves this `model_type`."""
    return model_type in _REGISTRY.specs()


def get_supported_model_types() -> frozenset[str]:
    """All `model_type` strings that some registered family serves."""
    return frozenset(_REGISTRY.specs())
