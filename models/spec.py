"""The registry of model families by Hugging Face `model_type`.

Other packages register a family through the entry-point group `archon.models`; the entry point is a `ModelSpec`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from threading import RLock
from typing import Any

from torch import nn

from archon.models.args.base import BaseModelArgs
from archon.models.args.moe import MoEModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.names import DENSE_HF_MAP, HFMap
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.parallel.decoder import parallelize_decoder
from archon.parallel.tensor import ParallelStyle
from archon.schema.errors import FamilyError, UnknownModelError, describe_error

logger = logging.getLogger(__name__)

ParallelizeFn = Callable[..., nn.Module]
"""`parallelize_<family>(model, parallel_dims, param_dtype, …)`, see `archon.parallel.decoder.parallelize_decoder`."""
PipeliningFn = Callable[..., None]

ENTRY_POINT_GROUP = "archon.models"
# A new family adds its module's name here; no other file changes.
FAMILIES = (
    "arcee",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoehybrid",
    "hy_v3",
    "kimi_k2",
    "llama",
    "minimax_m2",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)

# Vision-language models built on a family above; contract tests run on that family.
VISION_FAMILIES = ("qwen3_5",)

# Unsupported model types: the reason, and the nearest supported family.
UNSUPPORTED: dict[str, tuple[str, str]] = {
    "deepseek_v32": ("a learned indexer selects the tokens of its attention", "deepseek_v3"),
    "deepseek_v4": (
        "its attention reads compressed blocks of tokens, and hyper-connections replace the residual stream",
        "deepseek_v3",
    ),
    "glm_moe_dsa": ("a learned indexer selects the tokens of its attention", "glm4_moe_lite"),
    "kimi_linear": ("most of its layers are Kimi delta attention with a decay per channel", "kimi_k2"),
    "llama4": (
        "most of its layers attend within chunks of tokens, and the weights of its experts multiply their inputs",
        "llama",
    ),
    "gemma4": (
        "each layer has its own token embedding, and some layers reuse the keys and values of others",
        "gemma3_text",
    ),
}
_INDEXED = "a learned indexer selects the tokens of its attention, and hyper-connections replace the residual stream"
UNSUPPORTED |= {
    "falcon_h1": ("each layer has a Mamba-2 scan next to its attention", "granitemoehybrid"),
    "qwen4_exp": (_INDEXED, "qwen3_5_moe"),
    "glm5_next": (_INDEXED, "glm4_moe_lite"),
    "gemma4_unified": ("its sliding and full attention have different head dimensions", "gemma3_text"),
    "lfm2": ("most of its layers are short convolutions", "llama"),
}
UNSUPPORTED["muse_glimmer"] = (
    "the norms of its embeddings, queries and keys have no weights, and a matrix of its own gates each head",
    "gemma2",
)
UNSUPPORTED |= {f"{name}_text": UNSUPPORTED[name] for name in ("llama4", "gemma4", "muse_glimmer")}


# Treatment of each weight role under tensor parallelism; see `archon.parallel.tensor`.
DENSE_TP_PLAN: dict[str, ParallelStyle] = {
    "column": "split_rows",
    "row": "split_columns",
    "latent": "replicate",
    "norm": "replicate",
    "head_norm": "replicate",
    "heads": "split_rows",
    "heads_norm": "split_rows",
    "embedding": "split_rows",
    "head": "split_rows",
    "value_head": "replicate",
    "vision": "replicate",
}
# Experts need no entry: expert parallelism shards them.
MOE_TP_PLAN: dict[str, ParallelStyle] = DENSE_TP_PLAN | {"router": "replicate"}


def make_parallelize_fn(tp_plan: Mapping[str, ParallelStyle]) -> ParallelizeFn:
    """Return `archon.parallel.decoder.parallelize_decoder` with a family's tensor-parallel plan."""
    return partial(parallelize_decoder, tp_plan)


@dataclass(frozen=True)
class ModelSpec:
    """Everything the engine needs to know about one family.

    Attributes:
        name: The family's name, unique among registered specs.
        model_class: Built as `model_class(args)`; the engine builds it on the meta device.
        model_args_class: Reads a Hugging Face config with `from_hf_config`.
        state_dict_adapter_class: Maps Hugging Face tensors to parameters and back.
        parallelize_fn: Applies a layout to a built model, see `archon.parallel.decoder.parallelize_decoder`.
        supported_model_types: The Hugging Face `model_type` strings of this family.
        pipelining_fn: `pipelining_fn(model, plan=plan, stage=stage)` removes the modules of other pipeline stages from
            a full model on the meta device, in place; `plan.layers[stage]` stay. None for
            `archon.parallel.pipeline.prune`.
        text: The text decoder of a vision-language model; it reads the same checkpoints and passes the encoder's
            tensors through.
    """

    name: str
    model_class: type[BaseArchonModel]
    model_args_class: type[BaseModelArgs]
    state_dict_adapter_class: type[BaseStateDictAdapter]
    parallelize_fn: ParallelizeFn
    supported_model_types: frozenset[str]
    pipelining_fn: PipeliningFn | None = None
    text: ModelSpec | None = None

    def __post_init__(self) -> None:
        """Check the classes, and link those that do not name each other.

        Raises:
            FamilyError: a class has the wrong base class.
        """
        bases = {"model_class": BaseArchonModel, "model_args_class": BaseModelArgs}
        for name, base in (bases | {"state_dict_adapter_class": BaseStateDictAdapter}).items():
            value = getattr(self, name)
            if not isinstance(value, type) or not issubclass(value, base):
                raise FamilyError(f"{name} of family {self.name} is {value!r}; expected a subclass of {base.__name__}")
        if self.model_class.args_class is BaseModelArgs:
            self.model_class.args_class = self.model_args_class
        if not self.model_args_class.model_types:
            self.model_args_class.model_types = self.supported_model_types
        if not hasattr(self.state_dict_adapter_class, "model_class"):
            self.state_dict_adapter_class.model_class = self.model_class


def family_spec(
    name: str,
    adapter: type[BaseStateDictAdapter],
    parallelize_fn: ParallelizeFn,
    pipelining_fn: PipeliningFn | None = None,
    text: ModelSpec | None = None,
) -> ModelSpec:
    """Return the spec of a family from its state-dict adapter, which names the model and argument classes."""
    model = adapter.model_class
    args = model.args_class
    return ModelSpec(name, model, args, adapter, parallelize_fn, args.model_types, pipelining_fn, text)


def define_family(
    name: str,
    model: type[BaseArchonModel],
    hf_map: HFMap = DENSE_HF_MAP,
    *,
    adapter: type[BaseStateDictAdapter] = BaseStateDictAdapter,
    passthrough: tuple[str, ...] | None = None,
    text: ModelSpec | None = None,
) -> tuple[type[BaseStateDictAdapter], ParallelizeFn, ModelSpec]:
    """Define a family that the shared layers can express.

        LlamaModel = BaseArchonModel[LlamaModelArgs]
        LlamaStateDictAdapter, parallelize_llama, SPEC = define_family("llama", LlamaModel)

    Args:
        name: The family's name.
        model: Its model class.
        hf_map: Its checkpoint names, see `BaseStateDictAdapter.from_hf_map`.
        adapter: Base class of the adapter `<Prefix>StateDictAdapter`.
        passthrough: See `BaseStateDictAdapter.passthrough`; None for the base adapter's.
        text: See `ModelSpec.text`.

    Returns:
        The adapter class, the parallelize function and the spec.
    """
    names: dict[str, Any] = {"__module__": model.__module__, "__doc__": f"See `{adapter.__name__}`."}
    names |= {"model_class": model, "from_hf_map": hf_map}
    if passthrough is not None:
        names["passthrough"] = passthrough
    adapter_class = type(f"{model.__name__.removesuffix('Model')}StateDictAdapter", (adapter,), names)
    parallelize_fn = make_parallelize_fn(MOE_TP_PLAN if issubclass(model.args_class, MoEModelArgs) else DENSE_TP_PLAN)
    return adapter_class, parallelize_fn, family_spec(name, adapter_class, parallelize_fn, text=text)


class _Registry:
    """Specs by `model_type`; built-in families and entry points are loaded on first use, under a lock.

    Attributes:
        failures: One line per plugin that failed to load and per model type that several plugins register.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._lock = RLock()
        self._specs: dict[str, ModelSpec] = {}
        self._discovered = False

    def add(self, specs: Iterable[ModelSpec]) -> None:
        for spec in specs:
            for model_type in sorted(spec.supported_model_types):
                other = self._specs.get(model_type, spec)
                if other is not spec:
                    raise ValueError(
                        f"family {spec.name!r} registers model_type {model_type!r}, which family {other.name!r} has "
                        "already; expected one family per model_type"
                    )
            self._specs.update(dict.fromkeys(spec.supported_model_types, spec))

    def specs(self) -> dict[str, ModelSpec]:
        with self._lock:
            if not self._discovered:
                self._discovered = True  # first, since a plugin may register a family while it is imported
                try:
                    names = (*FAMILIES, *VISION_FAMILIES)
                    self.add(importlib.import_module(f"archon.models.{family}").SPEC for family in names)
                    self._add_plugins()
                except BaseException:
                    self._discovered = False
                    raise
        return self._specs

    def _add_plugins(self) -> None:
        """Load all entry points; skip failing ones and those that claim the same model type, with a warning."""
        self.failures.clear()
        loaded: list[tuple[metadata.EntryPoint, ModelSpec]] = []
        for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
            try:
                spec = entry.load()
                if not isinstance(spec, ModelSpec):
                    raise TypeError(f"it is a {type(spec).__name__}, expected a ModelSpec")
                loaded.append((entry, spec))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - another package's code
                self._skip(entry, error)
        by_type: dict[str, list[tuple[metadata.EntryPoint, ModelSpec]]] = {}
        for entry, spec in loaded:
            for model_type in spec.supported_model_types:
                if all(spec is not other for _, other in by_type.setdefault(model_type, [])):
                    by_type[model_type].append((entry, spec))
        conflicts = {model_type: plugins for model_type, plugins in sorted(by_type.items()) if len(plugins) > 1}
        for model_type, plugins in conflicts.items():
            names = " and by ".join(_describe(entry) for entry, _ in plugins)
            self._warn(f"model_type {model_type!r} is claimed by {names}; none of them is taken: uninstall all but one")
        for entry, spec in loaded:
            if not conflicts.keys() & spec.supported_model_types:
                try:
                    self.add([spec])
                except ValueError as error:
                    self._skip(entry, error)

    def _skip(self, entry: metadata.EntryPoint, error: BaseException) -> None:
        self._warn(f"{_describe(entry)} cannot be loaded and is left out: {describe_error(error)}")

    def _warn(self, line: str) -> None:
        self.failures.append(line)
        logger.warning("%s", line)


def _describe(entry: metadata.EntryPoint) -> str:
    """Return a plugin's entry point and package as text."""
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "of an unknown name"
    return f"the plugin {entry.name!r} (entry point {entry.group}: {entry.value}) of package {package}"


_REGISTRY = _Registry()


def register_model_spec(spec: ModelSpec) -> None:
    """Register a family.

    Raises:
        ValueError: Another family has one of its model types.
    """
    _REGISTRY.specs()
    _REGISTRY.add([spec])


def get_model_spec(model_type: str, *, text_only: bool = False) -> ModelSpec:
    """Return the spec of a Hugging Face `model_type`.

    Args:
        model_type: The `model_type` of a config.
        text_only: Return the text decoder (`ModelSpec.text`) of a vision-language model.

    Raises:
        UnknownModelError: No family supports it. The message lists supported types, the reason for a type in
            `UNSUPPORTED`, and the plugins that failed to load.
    """
    if not isinstance(model_type, str):
        raise UnknownModelError(f"model_type is {model_type!r}; expected a string, such as 'qwen3'")
    specs = _REGISTRY.specs()
    if model_type not in specs:
        reason = ""
        if model_type in UNSUPPORTED:
            reason = ": {}; the nearest supported family is {}".format(*UNSUPPORTED[model_type])
        raise UnknownModelError(
            f"model_type {model_type!r} is not supported{reason}; supported are {', '.join(sorted(specs))} "
            f"(other packages add families by the entry-point group {ENTRY_POINT_GROUP!r})"
            + "".join(f"; {failure}" for failure in _REGISTRY.failures)
        )
    spec = specs[model_type]
    return spec.text or spec if text_only else spec


def is_text_decoder(args: BaseModelArgs, model_type: str) -> bool:
    """Return whether `args` belong to the text decoder of a vision-language model of this `model_type`."""
    spec = get_model_spec(model_type)
    return spec.text is not None and type(args) is spec.text.model_args_class


def is_supported_model(model_type: str) -> bool:
    """Return whether a registered family supports this `model_type`."""
    return isinstance(model_type, str) and model_type in _REGISTRY.specs()


def get_supported_model_types() -> frozenset[str]:
    """Return all `model_type` strings of the registered families."""
    return frozenset(_REGISTRY.specs())
