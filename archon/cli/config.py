"""Load typed configurations from YAML and dotted overrides, and list their fields for `--help`."""

from __future__ import annotations

import importlib
import io
import json
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand

from archon.schema.config import RELATIVE_TO_CONFIG, StrictModel, expand_path
from archon.schema.errors import ConfigError
from archon.schema.interpolations import require_few_interpolations, require_shallow_interpolations
from archon.schema.yaml_files import read_yaml, require_few_values

if TYPE_CHECKING:
    from archon.training.config import BootstrapConfig

Config = TypeVar("Config", bound=StrictModel)
# Non-empty names joined by dots or in brackets: actor.optimizer.lr, actor[optimizer][lr].
_NAME = r"\s*[^\s.\[\]][^.\[\]]*"
_DOTTED_KEY = re.compile(rf"(?:{_NAME}|\[{_NAME}\])(?:\.{_NAME}|\[{_NAME}\])*")
_TOO_DEEP = "nested too deeply"
MAX_BITS = 4096
"""Bits of an integer. Python prints up to 4,300 digits, and errors of fields name shorter ones with their key."""
Alternatives = dict[type[BaseModel], list[str]]


def load_config(
    schema: type[Config],
    file: Path | None,
    overrides: Sequence[str],
    translate: Callable[[dict[str, Any], str], dict[str, Any]] | None = None,
) -> Config:
    """Read `file`, apply `key=value` overrides, resolve `${…}` and validate the result against `schema`.

    `${oc.env:NAME}` is an environment variable and `${now:%Y%m%d-%H%M%S}` the local time.

    Args:
        schema: Config class to validate against.
        file: YAML file; None for overrides alone.
        overrides: `key=value` strings; later ones win.
        translate: Maps (merged values, source name for errors) to the keys and values of `schema`.

    Raises:
        ConfigError: The YAML is invalid, an override is not `key=value`, an interpolation is unresolved, a key is
            unknown, or a value has the wrong type. The message has one line.
    """
    choices = [key for key, field, _ in _fields(schema, None, "", off=True) if _alternatives(field) is not None]
    values, source = read_values(file, overrides, choices), _source(file)
    if translate is not None:
        values = translate(values, source)
    _anchor_paths(schema, values, file, overrides)
    return schema.parse(values, source=source)


def _anchor_paths(
    schema: type[StrictModel], values: dict[str, Any], file: Path | None, overrides: Sequence[str]
) -> None:
    """Make paths absolute, relative to the folder of `file`; paths in overrides, relative to the current folder."""
    overridden = {override.partition("=")[0].rpartition(".")[2] for override in overrides}
    for name, field in schema.model_fields.items():
        is_path = RELATIVE_TO_CONFIG in field.metadata and isinstance(values.get(name), str)
        if is_path and values[name] and "\0" not in values[name]:  # the schema refuses others, by the name of the field
            folder = Path() if file is None or name in overridden else file.parent
            values[name] = str((folder / expand_path(values[name])).absolute())


def read_values(file: Path | None, overrides: Sequence[str], choices: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of `file` merged with `overrides`, unvalidated.

    Args:
        file: YAML file; None for overrides alone.
        overrides: `key=value` strings; later ones win.
        choices: Dotted keys of fields that select a method. If `file` sets one to a name and an override sets one of
            its settings, the name becomes `{kind: name}`.
    """
    OmegaConf.register_resolver("now", lambda pattern: time.strftime(pattern), use_cache=True, replace=True)
    source = _source(file)
    try:
        base, override_values = _read(file), _read_overrides(overrides)
        _require_limits(base, source)
        for key in choices:
            name = any(override.startswith(f"{key}.") for override in overrides) and OmegaConf.select(base, key)
            if isinstance(name, str):
                OmegaConf.update(base, key, {"kind": name})
        _require_same_kinds(base, override_values, source)
        merged = OmegaConf.merge(base, override_values)
        assert isinstance(merged, DictConfig)
        _require_limits(merged, source)
        data = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        is_key = isinstance(error, InterpolationKeyError)
        hint = "; an environment variable is ${oc.env:NAME}, or $NAME in a path" if is_key else ""
        raise ConfigError(f"{source}: {key}{str(error).splitlines()[0]}{hint}") from None
    except RecursionError:
        raise ConfigError(f"{source}: {_TOO_DEEP}") from None
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _read_overrides(overrides: Sequence[str]) -> DictConfig:
    """Merge `key=value` overrides; later ones win."""
    merged = OmegaConf.create({})
    for override in overrides:
        key, equals, value = override.partition("=")
        shown = repr(override if len(override) <= 80 else override[:80] + "…")
        if not equals or not _DOTTED_KEY.fullmatch(key):
            raise ConfigError(
                f"override {shown} is not key=value; expected a dotted key and a value, such as actor.optimizer.lr=1e-5"
            )
        try:
            require_few_values(value, f"override {shown}")
            require_shallow_interpolations(override, f"override {shown}")
            merged.merge_with_dotlist([f"{key}={_quote_text(value)}"])
            _require_limits(merged, f"override {shown}")  # now, because a later key inside this value resolves it
        except yaml.YAMLError as error:
            raise ConfigError(f"override {shown} is not YAML: {_first_line(error)}") from None
        except RecursionError:
            raise ConfigError(f"override {shown}: {_TOO_DEEP}") from None
        except (ValueError, TypeError) as error:  # a number with thousands of digits, or a name as a list index
            if isinstance(error, OmegaConfBaseException | ConfigError):
                raise
            raise ConfigError(
                f"override {shown} cannot be read or merged with the previous ones: {_reason(error)}"
            ) from None
    return merged


def _require_limits(config: DictConfig, source: str) -> None:
    """Raise ConfigError for an integer that Python does not print, and for interpolations that expand too far."""

    def require_short(value: Any, key: str) -> None:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ConfigError(f"{source}: {key}got a number of thousands of digits, expected one of at most 64 bits")
        if isinstance(value, dict | list):
            for name, part in value.items() if isinstance(value, dict) else enumerate(value):
                require_short(part, f"{key.removesuffix(': ')}.{name}: " if key else f"{name}: ")

    values = OmegaConf.to_container(config)
    require_short(values, "")
    require_few_interpolations(values, source)


def _quote_text(value: str) -> str:
    """Return the value of an override, in quotes if it is text that YAML would change or cut.

    YAML ends a plain text at ` #`, joins its lines, strips its spaces, and reserves some first characters (`*.jsonl`).
    """
    if value.startswith(("*", "&", "!", "%", "@", "`", "#")) or value.isspace():
        return json.dumps(value, ensure_ascii=False)
    node = yaml.compose(value, yaml.SafeLoader)
    if not isinstance(node, yaml.ScalarNode) or node.style is not None or node.tag != "tag:yaml.org,2002:str":
        return value
    return value if node.value == value else json.dumps(value, ensure_ascii=False)


def _require_same_kinds(base: DictConfig, overrides: DictConfig, source: str) -> None:
    """Raise ConfigError if an override merges a list with a mapping."""

    def compare(first: Any, second: Any, key: str) -> None:
        if isinstance(first, dict) and isinstance(second, dict):
            for name in first.keys() & second.keys():
                compare(first[name], second[name], f"{key}.{name}" if key else str(name))
        elif isinstance(first, dict | list) and isinstance(second, dict | list) and type(first) is not type(second):
            kinds = {dict: "a mapping", list: "a list"}
            raise ConfigError(
                f"{source}: {key} is {kinds[type(first)]}, but an override sets it to {kinds[type(second)]}; set "
                "all of it in the file or in one override"
            )

    compare(OmegaConf.to_container(base), OmegaConf.to_container(overrides), "")


def _source(file: Path | None) -> str:
    return str(file) if file else "config"


def _read(file: Path | None) -> DictConfig:
    if file is None:
        return OmegaConf.create({})
    try:
        text = read_yaml(file)
        require_shallow_interpolations(text, str(file))
        loaded = OmegaConf.load(io.StringIO(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {_first_line(error)}") from None
    except OSError:  # of OmegaConf
        raise ConfigError(f"{file}: a single value; expected a mapping of keys to values") from None
    except RecursionError:
        raise ConfigError(f"{file}: {_TOO_DEEP}") from None
    except ValueError as error:  # a number with thousands of digits
        if isinstance(error, OmegaConfBaseException | ConfigError):
            raise
        raise ConfigError(f"{file}: a value cannot be read: {_reason(error)}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{file}: a list; expected a mapping of keys to values")
    return loaded


def _reason(error: Exception) -> str:
    """Return Python's message without its programming advice."""
    return str(error).splitlines()[0].partition(";")[0]


def _first_line(error: yaml.YAMLError) -> str:
    """Return the YAML problem and its position without the excerpt."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}" if mark else problem


def read_bootstrap(file: str | None) -> BootstrapConfig | None:
    """Load the bootstrap config that a run references; None without a reference."""
    from archon.training.config import BootstrapConfig

    return None if file is None else load_config(BootstrapConfig, Path(file), [])


def to_yaml(config: BaseModel, resolved: BaseModel | None = None) -> str:
    """Return the configuration as YAML; a section of `resolved` replaces the section with its name."""
    values = config.model_dump(mode="json")
    parts = {} if resolved is None else resolved.model_dump(mode="json", include=set(values))
    return yaml.safe_dump(values | parts, sort_keys=False, allow_unicode=True).rstrip()


def import_schema(path: str) -> type[StrictModel]:
    """Import the class of a "module:Class" path."""
    module, _, name = path.partition(":")
    schema: type[StrictModel] = getattr(importlib.import_module(module), name)
    return schema


def config_command(schema: str) -> type[TyperCommand]:
    """Return a command class with the keys of `schema` ("module:Class", imported lazily).

    `--help` lists the keys. An error corrects a key that is written as an option, and an option written as a key.
    """

    class ConfigCommand(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            options = {name: option for option in self.params for name in option.opts if name.startswith("--")}
            try:
                remaining: list[str] = super().parse_args(ctx, args)
            except Exception as error:  # the class of unknown options moves between releases of typer
                name = str(getattr(error, "option_name", ""))
                key = name.removeprefix("--").replace("-", "_")
                if name in options or key not in leaves(import_schema(schema)):
                    raise
                raise ConfigError(f"{name} is not an option, but a key of the configuration: {key}=VALUE") from None
            for override in ctx.params.get("overrides") or []:
                key, _, value = override.partition("=")
                name = f"--{key.replace('_', '-')}"
                if name in options and key not in import_schema(schema).model_fields:
                    usage = name if getattr(options[name], "is_flag", False) else f"{name} {value}"
                    raise ConfigError(f"{key} is not a key of the configuration, but an option: {usage}")
            return remaining

        def get_help(self, ctx: Any) -> str:
            table = "\n".join(field_lines(import_schema(schema)))
            return f"{super().get_help(ctx)}\n\nConfiguration (in FILE.yaml, or key=value):\n{table}"

    return ConfigCommand


def field_lines(schema: type[BaseModel]) -> Iterator[str]:
    """Yield `key = default`, then type and description, for every field of `schema` and its sections.

    Optional sections that default to null follow at the end, once per class.
    """
    shown: dict[type[BaseModel], str] = {}
    sections = [("", schema)]
    for prefix, section in sections:
        if prefix:
            yield f"\n{prefix}, if set:"
        if (first := shown.setdefault(section, prefix)) != prefix:
            yield f"  same fields as {first}"
            continue
        fields = list(_fields(section, None, f"{prefix}." if prefix else ""))
        yield from _lines(fields)
        for key, field, _ in fields:
            if (inner := _nested(field)) is not None:
                if _is_off(field):
                    sections.append((key, inner))
                else:
                    shown.setdefault(inner, key)


def _lines(fields: Iterable[tuple[str, FieldInfo, Any]]) -> Iterator[str]:
    for key, field, default in fields:
        if (methods := _alternatives(field)) is not None:
            names = [name for kinds in methods.values() for name in kinds]
            kind, default = f"[{' | '.join(names)} | a dotted path] ", default.kind
        else:
            kind = "" if _nested(field) else f"[{_type_name(field.annotation)}{_bounds(field)}] "
        yield f"  {key}{_default_text(default, not kind)}"
        yield f"      {kind}{field.description or ''}".rstrip()


def leaves(schema: type[BaseModel]) -> list[str]:
    """Return the leaf keys of a configuration.

    Sections are expanded, except optional ones that default to null. A choice of methods contributes the choice and
    the settings of every method.
    """
    fields = _fields(schema, None, "")
    return [key for key, field, _ in fields if _alternatives(field) or _is_off(field) or not _nested(field)]


def _is_off(field: FieldInfo) -> bool:
    """Return whether a field is an optional section that defaults to null."""
    return field.default is None and _nested(field) is not None


def _fields(
    schema: type[BaseModel], parent: BaseModel | None, prefix: str, *, off: bool = False
) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield dotted key, field and default (`PydanticUndefined` when required), depth first.

    Args:
        schema: Class of the fields.
        parent: Default value of the section; it takes precedence over the defaults of the class.
        prefix: Dotted prefix of the keys.
        off: Also expand optional sections that default to null.
    """
    for name, field in schema.model_fields.items():
        default = getattr(parent, name) if parent is not None else field.get_default(call_default_factory=True)
        yield prefix + name, field, default
        if (methods := _alternatives(field)) is not None:
            yield from _settings(methods, f"{prefix}{name}.")
        elif (inner := _nested(field)) is not None and (off or not _is_off(field)):
            yield from _fields(inner, default if isinstance(default, inner) else None, f"{prefix}{name}.", off=off)


def _settings(methods: Alternatives, prefix: str) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield each method's settings except `kind`; the description names the methods.

    Settings with the same name, default and description are merged.
    """
    users: dict[tuple[str, str], tuple[FieldInfo, list[str]]] = {}
    for settings, kinds in methods.items():
        for name, field in settings.model_fields.items():
            if name != "kind":
                users.setdefault((name, repr(field)), (field, []))[1].extend(kinds)
    for (name, _), (field, kinds) in users.items():
        shown = copy(field)
        shown.description = f"{field.description} (kind {' or '.join(kinds)})"
        yield prefix + name, shown, field.get_default(call_default_factory=True)


def _alternatives(field: FieldInfo) -> Alternatives | None:
    """Return {settings class: method names} of a field that selects a method, else None."""
    return next((entry.alternatives() for entry in field.metadata if hasattr(entry, "alternatives")), None)


def _nested(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model class of a field typed `Model` or `Model | None`."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _default_text(default: Any, nested: bool) -> str:
    if default is PydanticUndefined:
        return " (required)"
    if nested and default is not None:
        return ""
    return f" = {json.dumps(default, ensure_ascii=False)}" if not isinstance(default, str) else f" = {default}"


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin is dict:
        return "mapping"
    if origin is not None:
        inner = ", ".join(_type_name(argument) for argument in arguments if argument is not Ellipsis)
        return f"{origin.__name__} of {inner}" if inner else origin.__name__
    names = {str: "text", int: "integer", float: "number", bool: "true | false", dict: "mapping", Any: "anything"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(field: FieldInfo) -> str:
    """Return the constraints of a field as text, such as `, > 0, <= 1`."""
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    return "".join(
        f", {sign} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, sign in signs
        if getattr(constraint, name, None) is not None
    )
