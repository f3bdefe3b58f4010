"""Loads a typed configuration from a YAML file and dotted overrides, and lists its fields for `--help`."""

from __future__ import annotations

import importlib
import json
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand

from archon.schema.config import RELATIVE_TO_CONFIG, StrictModel
from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.training.config import BootstrapConfig

Config = TypeVar("Config", bound=StrictModel)
# Names joined by dots, or in brackets: actor.optimizer.lr, actor[optimizer][lr]. None of them is empty.
_NAME = r"\s*[^\s.\[\]][^.\[\]]*"
_DOTTED_KEY = re.compile(rf"(?:{_NAME}|\[{_NAME}\])(?:\.{_NAME}|\[{_NAME}\])*")
_TOO_DEEP = "nested too deep to be read"
Alternatives = dict[type[BaseModel], list[str]]


def load_config(
    schema: type[Config],
    file: Path | None,
    overrides: Sequence[str],
    translate: Callable[[dict[str, Any], str], dict[str, Any]] | None = None,
) -> Config:
    """Read `file`, apply `key=value` overrides, resolve `${…}` and validate the result against `schema`.

    `translate` maps all keys and values, given a name for messages, to those of `schema`.

    `${oc.env:NAME}` is an environment variable and `${now:%Y%m%d-%H%M%S}` the local time. Raises `ConfigError` with one
    line for YAML that cannot be read, an override that is not `key=value`, an interpolation that leads nowhere, an
    unknown key (naming the nearest valid one) and a value of the wrong type.
    """
    choices = [key for key, field, _ in _fields(schema, None, "", off=True) if _alternatives(field) is not None]
    named, source = read_values(file, overrides, choices), _source(file)
    values = translate(named, source) if translate else named
    _anchor_paths(schema, values, file, overrides)
    return schema.parse(values, source=source)


def _anchor_paths(
    schema: type[StrictModel], values: dict[str, Any], file: Path | None, overrides: Sequence[str]
) -> None:
    """Make the paths absolute that are relative to the `file` they are in, or to here in an override."""
    overridden = {override.partition("=")[0].rpartition(".")[2] for override in overrides}
    for name, field in schema.model_fields.items():
        if RELATIVE_TO_CONFIG in field.metadata and isinstance(values.get(name), str):
            folder = Path() if file is None or name in overridden else file.parent
            values[name] = str((folder / values[name]).absolute())


def read_values(file: Path | None, overrides: Sequence[str], choices: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of `file` merged with `overrides`, unvalidated.

    Args:
        choices: dotted keys of fields that choose a method; one that `file` gives by its name alone is a section with
            `kind`, to which overrides add settings.
    """
    OmegaConf.register_resolver("now", lambda pattern: time.strftime(pattern), use_cache=True, replace=True)
    source = _source(file)
    try:
        under, over = _read(file), _read_overrides(overrides)
        for key in choices:
            named = any(override.startswith(f"{key}.") for override in overrides) and OmegaConf.select(under, key)
            if isinstance(named, str):
                OmegaConf.update(under, key, {"kind": named})
        _require_same_kinds(under, over, source)
        data = OmegaConf.to_container(OmegaConf.merge(under, over), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise ConfigError(f"{source}: {key}{str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{source}: {_TOO_DEEP}") from None
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _read_overrides(overrides: Sequence[str]) -> DictConfig:
    """Return the `key=value` overrides merged; later ones win."""
    read = OmegaConf.create({})
    for override in overrides:
        key, equals, _ = override.partition("=")
        shown = repr(override if len(override) <= 80 else override[:80] + "…")
        if not equals or not _DOTTED_KEY.fullmatch(key):
            raise ConfigError(
                f"override {shown} is not key=value, the key one name or several with dots between; write for example "
                "actor.optimizer.lr=1e-5"
            )
        try:
            read.merge_with_dotlist([override])
        except yaml.YAMLError as error:
            raise ConfigError(f"an override is not YAML: {shown}: {_first_line(error)}") from None
        except RecursionError:
            raise ConfigError(f"override {shown}: {_TOO_DEEP}") from None
        except (ValueError, TypeError) as error:  # a number of thousands of digits, a name where a list has numbers
            if isinstance(error, OmegaConfBaseException):
                raise
            raise ConfigError(
                f"override {shown} cannot be read, or not after those before it: {_reason(error)}"
            ) from None
    return read


def _require_same_kinds(under: DictConfig, over: DictConfig, source: str) -> None:
    """ConfigError, naming the key, where a list and a mapping would have to be merged."""

    def find(first: Any, second: Any, key: str) -> None:
        if isinstance(first, dict) and isinstance(second, dict):
            for name in first.keys() & second.keys():
                find(first[name], second[name], f"{key}.{name}" if key else str(name))
        elif isinstance(first, dict | list) and isinstance(second, dict | list) and type(first) is not type(second):
            kinds = {dict: "a mapping", list: "a list"}
            raise ConfigError(
                f"{source}: {key} is {kinds[type(first)]}, and an override lays {kinds[type(second)]} over it; give "
                "the whole of it in the file or in one override"
            )

    find(OmegaConf.to_container(under), OmegaConf.to_container(over), "")


def _source(file: Path | None) -> str:
    """Return the name for messages."""
    return str(file) if file else "config"


def _read(file: Path | None) -> DictConfig:
    if file is None:
        return OmegaConf.create({})
    try:
        loaded = OmegaConf.load(file)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {_first_line(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text file; expected YAML") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise ConfigError(f"{file}: one value alone; expected a mapping of keys to values") from None
    except RecursionError:
        raise ConfigError(f"{file}: {_TOO_DEEP}") from None
    except ValueError as error:  # a number of thousands of digits
        if isinstance(error, OmegaConfBaseException):
            raise
        raise ConfigError(f"{file}: a value cannot be read: {_reason(error)}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{file}: a list; expected a mapping of keys to values")
    return loaded


def _reason(error: Exception) -> str:
    """Return Python's message without its advice to programmers."""
    return str(error).splitlines()[0].partition(";")[0]


def _first_line(error: yaml.YAMLError) -> str:
    """Return the problem and its position without the excerpt."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}" if mark else problem


def read_bootstrap(file: str | None) -> BootstrapConfig | None:
    """Return what a run's `bootstrap` says; None where the run names no file."""
    from archon.training.config import BootstrapConfig

    return None if file is None else load_config(BootstrapConfig, Path(file), [])


def to_yaml(config: BaseModel, resolved: BaseModel | None = None) -> str:
    """Return the configuration as YAML, with the sections that `resolved` has in place of its own."""
    values = config.model_dump(mode="json")
    parts = {} if resolved is None else resolved.model_dump(mode="json", include=set(values))
    return yaml.safe_dump(values | parts, sort_keys=False, allow_unicode=True).rstrip()


def import_schema(path: str) -> type[StrictModel]:
    """Return the class that "module:Class" names, imported only now."""
    module, _, name = path.partition(":")
    found: type[StrictModel] = getattr(importlib.import_module(module), name)
    return found


def config_command(schema: str) -> type[TyperCommand]:
    """Return a command class whose `--help` ends with every field of `schema` ("module:Class", imported only then)."""

    class ConfigCommand(TyperCommand):
        def get_help(self, ctx: Any) -> str:
            table = "\n".join(field_lines(import_schema(schema)))
            return f"{super().get_help(ctx)}\n\nConfiguration (in FILE.yaml, or key=value):\n{table}"

    return ConfigCommand


def field_lines(schema: type[BaseModel]) -> Iterator[str]:
    """Yield `key = default`, then type and description, for every field of `schema` and of what it contains.

    Sections that are null unless given follow at the end, those of one class once.
    """
    shown: dict[type[BaseModel], str] = {}
    sections = [("", schema)]
    for prefix, section in sections:
        if prefix:
            yield f"\n{prefix}, where it is given:"
        if (first := shown.setdefault(section, prefix)) != prefix:
            yield f"  fields as those of {first}"
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
    """Return the keys of what a configuration has unless it adds sections: every section expanded once, one that is
    null unless given as itself, and of a choice between methods the choice and the settings of all of them.
    """
    fields = _fields(schema, None, "")
    return [key for key, field, _ in fields if _alternatives(field) or _is_off(field) or not _nested(field)]


def _is_off(field: FieldInfo) -> bool:
    """Return whether a field is a section that is null unless given."""
    return field.default is None and _nested(field) is not None


def _fields(
    schema: type[BaseModel], parent: BaseModel | None, prefix: str, *, off: bool = False
) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield dotted key, field and default (`PydanticUndefined` when required), depth first; what is in a section that
    is null unless given only with `off`.

    `parent` is the default of what holds the fields: its values come before those of its class.
    """
    for name, field in schema.model_fields.items():
        default = getattr(parent, name) if parent is not None else field.get_default(call_default_factory=True)
        yield prefix + name, field, default
        if (methods := _alternatives(field)) is not None:
            yield from _settings(methods, f"{prefix}{name}.")
        elif (inner := _nested(field)) is not None and (off or not _is_off(field)):
            yield from _fields(inner, default if isinstance(default, inner) else None, f"{prefix}{name}.", off=off)


def _settings(methods: Alternatives, prefix: str) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield each method's settings other than `kind`, with the methods they belong to.

    Settings that several classes share, with the same default and description, are one.
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
    """Return the methods that a field chooses from: the class of their settings, and the names that have it."""
    found = [entry.alternatives() for entry in field.metadata if hasattr(entry, "alternatives")]
    return found[0] if found else None


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
    """Return a field's constraints as text: `, > 0, <= 1`."""
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    found = [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, sign in signs
        if getattr(constraint, name, None) is not None
    ]
    return "".join(f", {bound}" for bound in found)
