"""Reading of YAML files, limited in bytes and in the number of values after aliases are expanded."""

from __future__ import annotations

import os

import yaml

from archon.schema.errors import ConfigError
from archon.schema.files import YAML_BYTES, read_limited, shown_path

YAML_VALUES = 100_000
"""Maximum number of values after aliases are expanded; 30 levels of `a: [*b, *b]` would be a billion."""


def read_yaml(path: str | os.PathLike[str]) -> str:
    """Return the text of a YAML file.

    Raises:
        ConfigError: there is no such regular file, it has more than `YAML_BYTES`, it is not UTF-8, or its aliases
            expand to more than `YAML_VALUES`.
    """
    try:
        text = read_limited(path, YAML_BYTES, allow_pipe=True).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{shown_path(path)}: not a text file; expected YAML") from None
    require_few_values(text, shown_path(path))
    return text


def require_few_values(text: str, source: str) -> None:
    """Raise ConfigError if a YAML text expands to more than `YAML_VALUES` values, or an alias contains itself.

    Raises:
        yaml.YAMLError: it is not YAML.
        RecursionError: it is nested too deeply.
    """
    if "*" not in text or "&" not in text:
        return
    sizes: dict[yaml.Node, int | None] = {}  # None: the node is being counted

    def size(node: yaml.Node) -> int:
        if node in sizes:
            known = sizes[node]
            if known is None:
                raise ConfigError(f"{source}: an alias stands for a value that contains it; write the value out")
            return known
        sizes[node] = None
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        sizes[node] = total = 1 + sum(map(size, parts))
        return total

    root = yaml.compose(text, yaml.SafeLoader)
    if root is not None and (n_values := size(root)) > YAML_VALUES:
        raise ConfigError(f"{source}: its aliases stand for {n_values:,} values; expected at most {YAML_VALUES:,}")
