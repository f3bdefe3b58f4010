"""Table of the presets: the settings that distinguish each from the default, its source, and who runs it by default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from archon.rl.algorithms.config import METHODS, AlgorithmConfig
from archon.rl.algorithms.presets import DEFAULT_PRESET, PRESETS, Preset


class PresetRow(NamedTuple):
    """A preset; `settings` are the fields of `algorithm`, as in YAML, that make it out of the default preset."""

    name: str
    settings: str
    source: str
    default_of: str
    needs: str


HEADER = PresetRow("preset", f"settings that differ from {DEFAULT_PRESET}", "source", "default of", "needs")


def preset_rows() -> list[PresetRow]:
    """Return one row for each registered preset, the default first."""
    defaults = AlgorithmConfig(preset=DEFAULT_PRESET).model_dump()
    rows = []
    for name in sorted(PRESETS, key=lambda name: name != DEFAULT_PRESET):
        preset, values = PRESETS[name], AlgorithmConfig(preset=name).model_dump()
        assert isinstance(preset, Preset)
        settings = ", ".join(_differences(values, defaults))
        rows.append(PresetRow(name, settings, preset.source, preset.default_of, preset.needs))
    return rows


def _differences(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields with other values than `defaults`; another method with all its settings that are set."""
    for field, value in values.items():
        default = defaults[field]
        if field == "preset" or value == default:
            continue
        if not isinstance(value, dict):
            yield f"{field}: {_shown(value)}"
            continue
        if field in METHODS and value["kind"] != default["kind"]:
            default = dict.fromkeys(value)
            value = {name: setting for name, setting in value.items() if setting not in (None, False, {})}
        changed = {name: setting for name, setting in value.items() if setting != default[name]}
        if changed.keys() == {"kind"}:
            yield f"{field}: {changed['kind']}"
        else:
            yield f"{field}: {{{', '.join(f'{name}: {_shown(setting)}' for name, setting in changed.items())}}}"


def _shown(value: Any) -> str:
    """Return a value as YAML reads it: a float in exponent form has a point."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def text_table() -> str:
    """Return the table as aligned text, the settings last."""
    rows = [
        (row.name, row.default_of, row.needs.replace("`", ""), row.source, row.settings)
        for row in (HEADER, *preset_rows())
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def markdown_table() -> str:
    """Return the table in Markdown; docs/tasks/rl.md holds it."""
    lines = [header := HEADER._asdict(), dict.fromkeys(header, "---")]
    lines += [
        row._asdict() | {"name": f"`{row.name}`", "settings": f"`{row.settings}`" if row.settings else ""}
        for row in preset_rows()
    ]
    return "\n".join(f"| {' | '.join(line.values())} |" for line in lines)
