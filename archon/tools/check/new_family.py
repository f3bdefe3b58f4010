"""Generator of a new family's file from a config and checkpoint keys: the nearest family's file, renamed."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from archon.checkpoint.hf_reader import HFCheckpoint, read_hf_config
from archon.models import ModelSpec, get_model_spec, get_supported_model_types, is_supported_model
from archon.models.hf.config import REQUIRED, Field
from archon.schema.errors import ConfigError, UserError
from archon.tools.planner.inspection import config_errors

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Coverage:
    """Coverage of a config and a checkpoint by a registered family.

    Attributes:
        refused: the error for each config field that it does not support, by name.
        added: fields among them that other families map to arguments that this family has too.
        unknown_keys: templates and counts of checkpoint tensors that it lacks, or has with another shape.
        missing_keys: templates and counts of tensors that it expects and the checkpoint lacks.
    """

    spec: ModelSpec
    refused: dict[str, str]
    added: dict[str, Field]
    unknown_keys: Counter[str] = field(default_factory=Counter)
    missing_keys: Counter[str] = field(default_factory=Counter)

    @property
    def gaps(self) -> tuple[int, int, int]:
        """Unsupported keys and fields, and added fields; the family with the fewest is the nearest."""
        keys = len(self.unknown_keys) + len(self.missing_keys)
        return keys, len(self.refused) - len(self.added), len(self.added)


def read_new(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the config of a folder or a `config.json`, and the shapes of the checkpoint's tensors; {} without any.

    Raises ConfigError for a model type that is supported already.
    """
    if path.is_file() and path.name != "config.json":
        raise ConfigError(f"{path} is a file; expected config.json, or the folder that holds it")
    folder = path.parent if path.is_file() else path
    config = read_hf_config(folder)
    model_type = str(config.get("model_type"))
    if is_supported_model(model_type):
        raise ConfigError(
            f"model_type {model_type!r} is the family {get_model_spec(model_type).name!r} already; check it by "
            f"`archon check-model {model_type}`"
        )
    if not re.fullmatch(r"[A-Za-z]\w*", model_type):
        raise ConfigError(f"model_type is {model_type!r}; expected a name that a Python module can have")
    if not any(folder.glob("*.safetensors")):
        return config, {}
    with HFCheckpoint(folder) as checkpoint:
        return config, {key: tuple(entry.shape) for key, entry in checkpoint.entries.items()}


def coverages(config: Mapping[str, Any], shapes: Shapes) -> list[Coverage]:
    """Return the coverage by each registered family, the nearest first."""
    specs = {get_model_spec(name).name: (get_model_spec(name), name) for name in get_supported_model_types()}
    candidates = [_coverage(spec, model_type, config, shapes) for spec, model_type in specs.values()]
    return sorted(candidates, key=lambda coverage: (*coverage.gaps, coverage.spec.name))


def _coverage(spec: ModelSpec, model_type: str, config: Mapping[str, Any], shapes: Shapes) -> Coverage:
    renamed = {**config, "model_type": model_type}
    errors = config_errors(spec.model_args_class, renamed)
    refused = {name: error for error in errors for name in config if error.startswith(f"config field {name!r}")}
    for number, error in enumerate(errors):
        if error not in refused.values():
            refused[f"(error {number + 1})"] = error
    covered = Coverage(spec, refused, _fields_of_other_families(spec, refused))
    if shapes:
        try:
            accepted = {name: value for name, value in renamed.items() if name not in refused}
            expected: Shapes = spec.state_dict_adapter_class(accepted).hf_shapes()
        except UserError:
            expected = {}
        covered.unknown_keys.update(
            f"{_template(key)} {list(shape)}" for key, shape in shapes.items() if expected.get(key) != shape
        )
        covered.missing_keys.update(_template(key) for key in expected.keys() - shapes.keys())
    return covered


def _template(key: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{}", key)


def _fields_of_other_families(spec: ModelSpec, refused: Mapping[str, str]) -> dict[str, Field]:
    """Return the refused fields that another family reads into an argument which this family's models have as well."""
    arguments = {argument.name for argument in fields(spec.model_args_class)}
    known = {
        name: mapped
        for model_type in sorted(get_supported_model_types())
        for name, mapped in get_model_spec(model_type).model_args_class.hf_fields.items()
    }
    others = {name: known[name] for name in refused if name in known and name not in spec.model_args_class.hf_fields}
    return {name: mapped for name, mapped in others.items() if mapped.native in arguments}


def family_source(coverage: Coverage, model_type: str) -> str:
    """Return the source of a new family's file: the nearest family's, with the new names and the added fields.

    Its docstring lists unsupported fields and keys.

    Raises:
        ConfigError: the nearest family's file does not have the usual form.
    """
    spec = coverage.spec
    text = Path(inspect.getfile(spec.model_class)).read_text(encoding="utf-8")
    old, new = spec.model_class.__name__.removesuffix("Model"), _camel(model_type)
    text = re.sub(rf"\b{old}(?=Model|StateDictAdapter|Adapter|Args)", new, text)
    text = re.sub(rf"\bparallelize_{spec.name}\b", f"parallelize_{model_type}", text)
    types = ", ".join(f'"{name}"' for name in sorted(spec.supported_model_types))
    definition = re.compile(rf'((?:define_family|family_spec)\(\s*)"{spec.name}"')
    fields_end = re.search(r"^    hf_fields = .*?(?=\n(?:\n|    [\w#]))", text, re.DOTALL | re.MULTILINE)
    if f"frozenset({{{types}}})" not in text or not definition.search(text) or (coverage.added and not fields_end):
        raise ConfigError(
            f"the file of the nearest family {spec.name!r} does not have the usual form; write yours by hand"
        )
    if coverage.added and fields_end is not None:
        lines = "".join(f"        {_field_line(name, mapped)}\n" for name, mapped in coverage.added.items())
        text = f"{text[: fields_end.end()]} | {{\n{lines}    }}{text[fields_end.end() :]}"
        if "Field," not in text:
            text = text.replace("dense_fields", "Field, dense_fields", 1)
    text = text.replace(f"frozenset({{{types}}})", f'frozenset({{"{model_type}"}})')
    text = definition.sub(rf'\1"{model_type}"', text)
    return re.sub(r'\A"""(?:.|\n)*?"""\n', lambda _: _docstring(coverage, model_type), text)


def _camel(model_type: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in model_type.split("_"))


def _field_line(name: str, mapped: Field) -> str:
    options = [f'"{mapped.native}"', mapped.kind.__name__]
    if mapped.default is not REQUIRED:
        options.append(repr(mapped.default))
    if mapped.null is not REQUIRED:
        options.append(f"null={mapped.null!r}")
    if mapped.minimum != 1:
        options.append(f"minimum={mapped.minimum}")
    return f'"{name}": Field({", ".join(options)}),'


def _docstring(coverage: Coverage, model_type: str) -> str:
    lines = [
        f'"""The family {model_type}, by `archon new-model` from {coverage.spec.name}, the nearest family.',
        "",
        "Field defaults come from that family; replace them by the defaults of your config class.",
    ]
    if left := uncovered_lines(coverage):
        lines += ["", "Not covered:", *(f"- {line}" for line in left)]
    return "\n".join([*lines, '"""', ""])


def uncovered_lines(coverage: Coverage) -> list[str]:
    """Return a line for each field and key that the file does not cover."""
    lines = [error for name, error in coverage.refused.items() if name not in coverage.added]
    lines += [f"the checkpoint has {key} ({count} tensors)" for key, count in coverage.unknown_keys.items()]
    return lines + [f"the checkpoint lacks {key} ({count} tensors)" for key, count in coverage.missing_keys.items()]


def describe_coverage(coverage: Coverage, config: Mapping[str, Any], shapes: Shapes) -> list[str]:
    """Return lines on the supported and unsupported parts of the nearest family."""
    left = uncovered_lines(coverage)
    n_unknown = sum(coverage.unknown_keys.values())
    lines = [
        f"  nearest       {coverage.spec.name}",
        f"  config        {len(config) - len(coverage.refused.keys() & config.keys())} of {len(config)} fields covered",
    ]
    lines += [f"  from others   {name}: {mapped.native}" for name, mapped in coverage.added.items()]
    if shapes:
        lines.append(f"  checkpoint    {len(shapes) - n_unknown} of {len(shapes)} tensors covered")
    return [*lines, *(f"  not covered   {line}" for line in left)]
