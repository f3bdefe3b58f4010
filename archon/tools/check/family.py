"""Family to check, named by its model type, its module or its file."""

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
from archon.tools.check.random_configs import draw_fields

# Types with another name in transformers.
REFERENCES = {"kimi_k2": "deepseek_v3"}
# Maximum lines of a family's file: dense, with experts, with a mixer other than attention.
LINE_BUDGETS = (80, 150, 250)


@dataclass(frozen=True)
class CheckedFamily:
    """One model type of a family.

    Attributes:
        target: argument of `load_families`, to load the family in another process.
        reference: equivalent type in transformers; None if there is none.
    """

    target: str
    spec: ModelSpec
    model_type: str
    reference: str | None

    @property
    def file(self) -> Path:
        """File of the family's model class."""
        return Path(inspect.getfile(self.spec.model_class))

    @property
    def description(self) -> str:
        """First paragraph of the file's docstring."""
        text = sys.modules[self.spec.model_class.__module__].__doc__ or self.spec.name
        return " ".join(text.strip().split("\n\n")[0].split())

    @property
    def lines(self) -> int:
        """Number of lines of the file."""
        return len(self.file.read_text(encoding="utf-8").splitlines())

    @property
    def line_budget(self) -> int:
        """Maximum lines of the file, from the layers of a small configuration."""
        config = {"model_type": self.model_type} | draw_fields(0, self.model_type)
        layers = self.spec.model_args_class.from_hf_config(config).layer_specs
        if any(not isinstance(layer.mixer, AttentionLayer) for layer in layers):
            return LINE_BUDGETS[2]
        return LINE_BUDGETS[1] if any(layer.feed_forward.n_experts for layer in layers) else LINE_BUDGETS[0]


def load_families(target: str, reference: str | None = None) -> list[CheckedFamily]:
    """Return the family of a model type, or each type of the family that a module or `.py` file defines as `SPEC`.

    Args:
        target: model type, module or `.py` file.
        reference: equivalent type in transformers; by default the type itself if transformers has it.

    Raises:
        UnknownModelError: no family has this name.
    """
    if is_supported_model(target):
        spec, model_types = get_model_spec(target, text_only=True), [target]
    else:
        spec = _load_spec(target)
        if not all(is_supported_model(name) and get_model_spec(name) is spec for name in spec.supported_model_types):
            register_model_spec(spec)
        model_types = sorted(spec.supported_model_types)
    if reference is not None and not has_reference(reference):
        raise ConfigError(f"--reference is {reference!r}; expected the type of a causal language model in transformers")
    return [CheckedFamily(target, spec, name, reference or _default_reference(name)) for name in model_types]


def _default_reference(model_type: str) -> str | None:
    name = REFERENCES.get(model_type, model_type)
    return name if has_reference(name) else None


def _load_spec(target: str) -> ModelSpec:
    path = Path(target)
    if path.suffix == ".py":
        if not path.is_file():
            raise UnknownModelError(f"{target} is not a file; expected a Python file that defines SPEC")
        name = f"archon_family_{path.stem}"
        if name not in sys.modules:
            file_spec = importlib.util.spec_from_file_location(name, path)
            assert file_spec is not None and file_spec.loader is not None
            module = importlib.util.module_from_spec(file_spec)
            sys.modules[name] = module
            file_spec.loader.exec_module(module)
        module = sys.modules[name]
    elif target.startswith(".") or "/" in target:
        raise UnknownModelError(
            f"unknown family {target!r}; expected a model type, a module, or a .py file that defines SPEC"
        )
    else:
        try:
            module = importlib.import_module(target)
        except ModuleNotFoundError as error:
            if error.name is None or not target.startswith(error.name):
                raise
            get_model_spec(target)  # raises with the available types
            raise
    spec = getattr(module, "SPEC", None)
    if not isinstance(spec, ModelSpec):
        raise UnknownModelError(f"{target} does not define SPEC; expected a ModelSpec with that name")
    return spec
