"""Find the family to check by its model type, its module or its file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

from archon.models import ModelSpec, get_model_spec, is_supported_model, register_model_spec
from archon.models.layers.attention import AttentionLayer
from archon.schema.errors import ConfigError, UnknownModelError
from archon.tools.check.oracle import has_reference

# Types that transformers computes under another name.
REFERENCES = {"kimi_k2": "deepseek_v3"}
# Line budget of a family's file: dense, with experts or another attention, with a mixer of its own type.
LINE_BUDGETS = (80, 150, 250)


@dataclass(frozen=True)
class CheckedFamily:
    """One model type of a family.

    Attributes:
        target: argument of `load_families` that finds the family in another process.
        reference: equivalent transformers type; None if transformers has none.
    """

    target: str
    spec: ModelSpec
    model_type: str
    reference: str | None

    @property
    def file(self) -> Path:
        """The file of the family's model class."""
        return Path(inspect.getfile(self.spec.model_class))

    @property
    def description(self) -> str:
        """The first paragraph of the file's docstring."""
        text = sys.modules[self.spec.model_class.__module__].__doc__ or self.spec.name
        return " ".join(text.strip().split("\n\n")[0].split())

    @property
    def lines(self) -> int:
        """The lines of the file."""
        return len(self.file.read_text(encoding="utf-8").splitlines())

    @property
    def line_budget(self) -> int:
        """The lines that the file may have, by the layers of a small configuration."""
        from archon.tools.check.random_configs import draw_fields

        config = {"model_type": self.model_type} | draw_fields(0, self.model_type)
        layers = self.spec.model_args_class.from_hf_config(config).layer_specs
        if any(not isinstance(layer.mixer, AttentionLayer) for layer in layers):
            return LINE_BUDGETS[2]
        return LINE_BUDGETS[1] if any(layer.feed_forward.n_experts for layer in layers) else LINE_BUDGETS[0]


def load_families(target: str, reference: str | None = None) -> list[CheckedFamily]:
    """Return the family of a model type, or each type of a family defined in a module or `.py` file with `SPEC`.

    Args:
        target: model type, module name or file.
        reference: equivalent transformers type, by default the type itself if transformers has it.

    Raises:
        UnknownModelError: nothing of this name defines a family.
    """
    if is_supported_model(target):
        spec, model_types = get_model_spec(target, text_only=True), [target]
    else:
        spec = _load_spec(target)
        if not all(is_supported_model(name) and get_model_spec(name) is spec for name in spec.supported_model_types):
            register_model_spec(spec)
        model_types = sorted(spec.supported_model_types)
    if reference is not None and not has_reference(reference):
        raise ConfigError(f"--reference is {reference!r}; expected a causal language model's type in transformers")
    return [CheckedFamily(target, spec, name, reference or _default_reference(name)) for name in model_types]


def _default_reference(model_type: str) -> str | None:
    name = REFERENCES.get(model_type, model_type)
    return name if has_reference(name) else None


def _load_spec(target: str) -> ModelSpec:
    path = Path(target)
    if path.suffix == ".py":
        if not path.is_file():
            raise UnknownModelError(f"{target} is not a file; expected a family's file, which defines SPEC")
        name = f"archon_family_{path.stem}"
        if name not in sys.modules:
            module_spec = importlib.util.spec_from_file_location(name, path)
            assert module_spec is not None and module_spec.loader is not None
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[name] = module
            module_spec.loader.exec_module(module)
        module = sys.modules[name]
    else:
        try:
            module = importlib.import_module(target)
        except ModuleNotFoundError as error:
            if error.name is None or not target.startswith(error.name):
                raise
            get_model_spec(target)  # raises an error that lists the available types
            raise
    spec = getattr(module, "SPEC", None)
    if not isinstance(spec, ModelSpec):
        raise UnknownModelError(f"{target} defines no SPEC of a family; expected a ModelSpec of that name")
    return spec
