"""Generator of a new family's file from a config and checkpoint keys: a renamed copy of the nearest family."""

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
        refused: error of each config field that the family rejects, by name.
        added: rejected fields that another family maps to an argument of this family.
        unknown_keys: number of the checkpoint's tensors that the family lacks or has in another shape, by template.
        missing_keys: number of the family's tensors that the checkpoint lacks, by template.
    """

    spec: ModelSpec
    refused: dict[str, str]
    added: dict[str, Field]
    unknown_keys: Counter[str] = field(default_factory=Counter)
    missing_keys: Counter[str] = field(default_factory=Counter)

    @property
    def gaps(self) -> tuple[int, int, int]:
        """Numbers of uncovered keys, uncovered fields and added fields; the nearest family has the fewest."""
        keys = len(self.unknown_keys) + len(self.missing_keys)
        return keys, len(self.refused) - len(self.added), len(self.added)


def read_new(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the config of a folder or a `config.json`, and the shapes of the checkpoint's tensors, if any.

    Raises:
        ConfigError: the model type is already supported.
    """
    if path.is_file() and path.name != "config.json":
        raise ConfigError(f"{path} is a file; expected config.json or its folder")
    folder = path.parent if path.is_file() else path
    config = read_hf_config(folder)
    model_type = str(config.get("model_type"))
    if is_supported_model(model_type):
        raise ConfigError(
            f"model_type {model_type!r} already belongs to family {get_model_spec(model_type).name!r}; check it with "
            f"`archon check-model {model_type}`"
        )
    if not re.fullmatch(r"[A-Za-z]\w*", model_type):
        raise ConfigError(f"model_type is {model_type!r}; expected a valid Python module name")
    if not any(folder.glob("*.safetensors")):
        return config, {}
    with HFCheckpoint(folder) as checkpoint:
        return config, {key: tuple(entry.shape) for key, entry in checkpoint.entries.items()}


def coverages(config: Mapping[str, Any], shapes: Shapes) -> list[Coverage]:
    """Return the coverage of each registered family, nearest first."""
    specs = {get_model_spec(name).name: (get_model_spec(name), name) for name in get_supported_model_types()}
    unsorted = [_coverage(spec, model_type, config, shapes) for spec, model_type in specs.values()]
    return sorted(
        unsorted, key=lambda coverage: (*coverage.gaps, -_n_declared(coverage.spec, config), coverage.spec.name)
    )


def _n_declared(spec: ModelSpec, config: Mapping[str, Any]) -> int:
    """Return how many fields of a config a family declares; those that every family accepts do not count."""
    args = spec.model_args_class
    return len(config.keys() & {*args.hf_fields, *args.hf_fixed_values, *args.hf_windows.fields})


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
    """Return the rejected fields that another family maps to an argument of this family."""
    arguments = {argument.name for argument in fields(spec.model_args_class)}
    known = {
        name: mapped
        for model_type in sorted(get_supported_model_types())
        for name, mapped in get_model_spec(model_type).model_args_class.hf_fields.items()
    }
    unmapped = [name for name in refused if name in known and name not in spec.model_args_class.hf_fields]
    return {name: known[name] for name in unmapped if known[name].native in arguments}


def family_source(coverage: Coverage, model_type: str) -> str:
    """Return the source of the nearest family with new names and added fields; its docstring lists the gaps.

    Raises:
        ConfigError: the nearest family's file does not have the usual form.
    """
    spec = coverage.spec
    text = Path(inspect.getfile(spec.model_class)).read_text(encoding="utf-8")
    old = spec.model_class.__name__.removesuffix("Model")
    new = "".join(part[:1].upper() + part[1:] for part in model_type.split("_"))
    text = re.sub(rf"\b{old}(?=Model|StateDictAdapter|Adapter|Args)", new, text)
    text = re.sub(rf"\bparallelize_{spec.name}\b", f"parallelize_{model_type}", text)
    types = ", ".join(f'"{name}"' for name in sorted(spec.supported_model_types))
    definition = re.compile(rf'((?:define_family|family_spec)\(\s*)"{spec.name}"')
    fields_end = re.search(r"^    hf_fields = .*?(?=\n(?:\n|    [\w#]))", text, re.DOTALL | re.MULTILINE)
    if f"frozenset({{{types}}})" not in text or not definition.search(text) or (coverage.added and not fields_end):
        raise ConfigError(
            f"the file of the nearest family, {spec.name!r}, has an unusual form; write the new file by hand"
        )
    if coverage.added and fields_end is not None:
        lines = "".join(f"        {_field_line(name, mapped)}\n" for name, mapped in coverage.added.items())
        text = f"{text[: fields_end.end()]} | {{\n{lines}    }}{text[fields_end.end() :]}"
        if "Field," not in text:
            text = text.replace("dense_fields", "Field, dense_fields", 1)
    text = text.replace(f"frozenset({{{types}}})", f'frozenset({{"{model_type}"}})')
    text = definition.sub(rf'\1"{model_type}"', text)
    return re.sub(r'\A"""(?:.|\n)*?"""\n', lambda _: _docstring(coverage, model_type), text)


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
        f'"""The family {model_type}, generated by `archon new-model` from the nearest family, {coverage.spec.name}.',
        "",
        f"Field defaults come from {coverage.spec.name}; replace them by the defaults of your config class.",
    ]
    if gaps := uncovered_lines(coverage):
        lines += ["", "Not covered:", *(f"- {line}" for line in gaps)]
    return "\n".join([*lines, '"""', ""])


def uncovered_lines(coverage: Coverage) -> list[str]:
    """Return a line for each uncovered field and key."""
    lines = [error for name, error in coverage.refused.items() if name not in coverage.added]
    lines += [f"the checkpoint has {key} ({count} tensors)" for key, count in coverage.unknown_keys.items()]
    return lines + [f"the checkpoint lacks {key} ({count} tensors)" for key, count in coverage.missing_keys.items()]


def describe_coverage(coverage: Coverage, config: Mapping[str, Any], shapes: Shapes) -> list[str]:
    """Return the coverage and the gaps of the nearest family as lines of text."""
    n_unknown = sum(coverage.unknown_keys.values())
    lines = [
        f"  nearest       {coverage.spec.name}",
        f"  config        {len(config) - len(coverage.refused.keys() & config.keys())} of {len(config)} fields covered",
    ]
    lines += [f"  from others   {name}: {mapped.native}" for name, mapped in coverage.added.items()]
    if shapes:
        lines.append(f"  checkpoint    {len(shapes) - n_unknown} of {len(shapes)} tensors covered")
    return [*lines, *(f"  not covered   {line}" for line in uncovered_lines(coverage))]
