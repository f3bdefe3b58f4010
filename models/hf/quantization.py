"""Reader of `quantization_config`: which weights a checkpoint stores quantized, and in which format.

`archon.checkpoint.quantized` dequantizes weights while loading. archon neither computes with quantized weights nor
writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from archon.models.hf.checks import reject_field

FIELD = "quantization_config"


WHOLE = (2**40, 2**40)
"""Block of matrices with a single scale, as Ministral 3 has: larger than any matrix."""


@dataclass(frozen=True)
class Quantization:
    """Quantization format of a checkpoint.

    Attributes:
        method: `fp8`: float8_e4m3fn matrices with a scale per block (DeepSeek-AI 2024, arXiv:2412.19437, section
            3.3); `mxfp4`: 4-bit floats with an exponent per 32 values (Rouhani et al. 2023, arXiv:2310.10537);
            `compressed-tensors`: symmetric 4-bit integers with a scale per group of a row, eight in an int32.
        block: Rows and columns that share a scale; `WHOLE` for one scale per matrix.
        kept: Names, or parts of names, of modules that are not quantized.
    """

    method: str
    block: tuple[int, int] = (1, 32)
    kept: tuple[str, ...] = ()

    def is_unquantized(self, key: str) -> bool:
        """Return whether a key belongs to a module of `kept`; `*` in a name matches any characters."""
        return bool(self.kept) and self._unquantized_pattern.search(key) is not None

    @cached_property
    def _unquantized_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(rf"(?:^|\.){_pattern(name)}(?:\.|$)" for name in self.kept))


def _pattern(name: str) -> str:
    """Return a regular expression for a name with `*` that matches in linear time for any number of `*`."""
    first, *parts = map(re.escape, name.split("*"))
    # The first match of a part between two `*` is always the best one, so atomic groups forbid backtracking.
    middle = "".join(f"(?>.*?{part})" for part in parts[:-1])
    return first + middle + "".join(f".*{part}" for part in parts[-1:])


def quantization_field(config: Mapping[str, Any]) -> Any:
    """Return the `quantization_config` of a config, or of its text part, where Kimi K2.5 has it."""
    text = config.get("text_config")
    return config.get(FIELD) or (text.get(FIELD) if isinstance(text, Mapping) else None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, and its text part, without `quantization_config`."""
    kept = {name: value for name, value in config.items() if name != FIELD}
    if isinstance(text := kept.get("text_config"), Mapping):
        kept["text_config"] = {name: value for name, value in text.items() if name != FIELD}
    return kept


def read_quantization(value: Any) -> Quantization | None:
    """Read the config field `quantization_config`; None for null.

    Raises:
        ConfigError: archon cannot dequantize the method or an option; the message names the field.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        reject_field(FIELD, value, "expected an object or null")
    method = value.get("quant_method")
    if not isinstance(method, str) or method not in _OPTIONS:
        reject_field(
            f"{FIELD}.quant_method",
            method,
            f"archon dequantizes {' and '.join(_OPTIONS)}; use the model's unquantized checkpoint",
        )
    options = _OPTIONS[method]
    for name, option in value.items():
        if name not in options:
            reject_field(f"{FIELD}.{name}", option, f"archon does not know this option of {method}")
        expected, is_valid = options[name]
        if not is_valid(option):
            reject_field(f"{FIELD}.{name}", option, f"expected {expected}")
    kept = [name for field in ("modules_to_not_convert", "ignored_layers") for name in value.get(field) or ()]
    if method == "compressed-tensors":
        names = tuple(name for entry in value.get("ignore") or () for name in _kept(entry))
        return Quantization(method, (1, _group_size(value.get("config_groups"))), names)
    block = value.get("weight_block_size", (128, 128)) if method == "fp8" else (1, 32)
    return Quantization(method, WHOLE if block is None else tuple(block), tuple(kept))


def _group_size(groups: Any) -> int:
    """Return the columns that share a scale; ConfigError unless all linear layers have symmetric 4-bit integers."""
    name = f"{FIELD}.config_groups"
    parts = [*groups.values()] if isinstance(groups, Mapping) else []
    group = parts[0] if len(parts) == 1 and isinstance(parts[0], Mapping) else {}
    weights = group.get("weights")
    if not isinstance(weights, Mapping) or group.get("targets") != ["Linear"] or group.get("input_activations"):
        reject_field(name, groups, "expected one group of weights with the target Linear, without input activations")
    for option, expected in _INT4.items():
        if weights.get(option) not in expected:
            reject_field(f"{name}.weights.{option}", weights.get(option), f"expected {expected[0]!r}")
    size = weights.get("group_size")
    if type(size) is not int or not 1 <= size <= 2**20:
        reject_field(f"{name}.weights.group_size", size, "expected the columns that share a scale, such as 32")
    return size


def _kept(name: str) -> list[str]:
    """Return the names of an entry of `ignore` as in `Quantization.kept`.

    An expression may only have `.*`, escaped dots, and one choice of names, as Kimi K2's `(gate|up)_proj`.
    """
    if not name.startswith("re:"):
        return [name]
    text = name.removeprefix("re:").replace(".*", "*").replace("\\.", ".")
    choice = re.fullmatch(r"([^()]*)\((\w+(?:\|\w+)*)\)([^()]*)", text)
    names = [f"{choice[1]}{part}{choice[3]}" for part in choice[2].split("|")] if choice else [text]
    if re.search(r"[][(){}?+|^$\\]", names[0]):
        expected = "archon reads module names, and expressions that only have .* and one choice of names"
        reject_field(f"{FIELD}.ignore", name, expected)
    return names


def _is_one_of(*values: Any) -> tuple[str, Callable[[Any], bool]]:
    return " or ".join(map(repr, values)), lambda value: value in values


def _is_name_list(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value))


def _is_block(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return value is None or (is_pair and all(type(size) is int and 1 <= size <= 2**20 for size in value))


# Options of 4-bit weights: the accepted values.
_INT4: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),
    "symmetric": (True,),
    "dynamic": (False, None),
    "actorder": (None,),
    "block_structure": (None,),
}
_NAMES = ("a list of module names, or null", _is_name_list)
_FLAG = ("true or false", lambda value: isinstance(value, bool))
# Options of each method: the expected value as text, and a check. Some only describe activations or tell the reader to
# dequantize, without effect on stored weights.
_OPTIONS: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "fp8": {
        "quant_method": _is_one_of("fp8"),
        "weight_block_size": ("the rows and columns of a block, such as [128, 128], or null", _is_block),
        "fmt": _is_one_of("e4m3"),
        "activation_scheme": _is_one_of("dynamic", "static"),
        "scale_fmt": _is_one_of(None, "float", "ue8m0"),
        "expert_dtype": _is_one_of(None, "fp8"),
        "modules_to_not_convert": _NAMES,
        "ignored_layers": _NAMES,
        "modules_to_convert": _NAMES,
        "dequantize": _FLAG,
    },
    "compressed-tensors": {
        "quant_method": _is_one_of("compressed-tensors"),
        "format": _is_one_of("pack-quantized"),
        "quantization_status": _is_one_of(None, "compressed"),
        "kv_cache_scheme": _is_one_of(None),
        "global_compression_ratio": ("a number or null", lambda value: True),
        "version": ("a version", lambda value: True),
        "sparsity_config": _is_one_of(None, {}),
        "transform_config": _is_one_of(None, {}),
        "config_groups": ("groups", lambda value: True),  # read by `_group_size`
        "ignore": _NAMES,
    },
    "mxfp4": {"quant_method": _is_one_of("mxfp4"), "modules_to_not_convert": _NAMES, "dequantize": _FLAG},
}
