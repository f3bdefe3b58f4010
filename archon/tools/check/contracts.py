"""Contracts of a family and their results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from archon.models import BaseStateDictAdapter
from archon.schema.errors import ConfigError, UserError
from archon.schema.private_directory import PrivateDirectory
from archon.tools.check.decoding import check_decoding
from archon.tools.check.family import CheckedFamily
from archon.tools.check.isolation import check_forks, check_isolation, check_shared_prefixes
from archon.tools.check.layouts import check_layouts, describe_layouts
from archon.tools.check.oracle import ContractError, family_config, hf_classes, is_passthrough, random_config
from archon.tools.check.parity import FP32_TOLERANCE, SEEDS, first_difference, parity
from archon.tools.check.round_trip import TWO_DIGITS, native_round_trip, round_trip
from archon.tools.check.silent_defaults import STYLES, field_outcomes, unread_fields

# Seeds of the configurations of a contract; a full check uses more.
DEFAULT_SEEDS = range(6)
SLOW_TEST_SEEDS = range(2)


@dataclass(frozen=True)
class Finding:
    """Result of one contract.

    Attributes:
        text: summary, or the violation.
        passed: None for a contract that could not be checked.
    """

    contract: str
    text: str
    passed: bool | None
    seconds: float


def check_family(family: CheckedFamily, *, full: bool = False, only: Collection[str] = ()) -> Iterator[Finding]:
    """Yield the finding of each contract, or of the contracts named in `only`.

    `full` tries all configurations, tied models in layouts, and all page sizes.

    Raises:
        ConfigError: an unknown contract.
    """
    if unknown := set(only) - CONTRACTS.keys():
        raise ConfigError(f"no contract is named {sorted(unknown)[0]!r}; expected one of {', '.join(CONTRACTS)}")
    for name in only or CONTRACTS:
        contract = CONTRACTS[name]
        started = time.monotonic()
        passed: bool | None = True
        try:
            if (text := contract(family, full)) is None:
                text, passed = "transformers lacks this type", None
        except (ContractError, UserError) as error:
            text, passed = " ".join(str(error).split()), False
        except Exception as error:  # noqa: BLE001 - a family's code may raise anything; the other contracts continue
            text, passed = f"{type(error).__name__}: {' '.join(str(error).split())}", False
        yield Finding(name, text, passed, time.monotonic() - started)


def _parameters(family: CheckedFamily, full: bool) -> str | None:
    """Compare the parameter count at the published default sizes with transformers, on the meta device."""
    if family.reference is None:
        return None
    config_class, model_class = hf_classes(family.reference)
    config, source = config_class(), "the default config"
    try:
        adapter = family.spec.state_dict_adapter_class(family_config(config, family.model_type))
    except ConfigError:  # such as GLM-4.5, which rotates 21 of the 42 features of a head
        config = random_config(0, family.model_type, family.reference)
        source = "a random config (the default is rejected)"
        adapter = family.spec.state_dict_adapter_class(family_config(config, family.model_type))
    with torch.device("meta"):
        hf_model = model_class._from_config(config)
    expected = sum(weight.numel() for name, weight in hf_model.named_parameters() if not is_passthrough(adapter, name))
    actual = sum(math.prod(shape) for shape in adapter.native_shapes.values())
    if actual != expected:
        raise ContractError(f"{actual:,} parameters with {source} of transformers, which has {expected:,}")
    return f"{actual:,} with {source}"


def _parity(family: CheckedFamily, full: bool) -> str | None:
    if family.reference is None:
        return None
    worst = {"logits": 0.0, "gradients": 0.0}
    seeds = SEEDS if full else DEFAULT_SEEDS
    for seed in seeds:
        for name, difference in parity(seed, family.model_type, family.reference).items():
            if not difference <= FP32_TOLERANCE:
                where = first_difference(seed, family.model_type, family.reference) if name == "logits" else ""
                raise ContractError(
                    f"configuration {seed}: {name} differs by {difference:.1e} from transformers{where}"
                )
            kind = "logits" if name == "logits" else "gradients"
            worst[kind] = max(worst[kind], difference)
    return f"logits {worst['logits']:.0e}, gradients {worst['gradients']:.0e} over {len(seeds)} configurations"


def _config_fields(family: CheckedFamily, full: bool) -> str:
    if family.reference is None:
        if lines := unread_fields(family.model_type):
            raise ContractError("; ".join(lines))
        return "each mapped field changes the model's arguments; not compared with transformers"
    counts, wrong = {"equal": 0, "rejected": 0}, []
    for style in STYLES if full else STYLES[:1]:
        outcomes, lines = field_outcomes(family.model_type, style, family.reference)
        wrong += lines
        counts = {name: count + outcomes[name] for name, count in counts.items()}
    if wrong:
        raise ContractError(_join_by_error(wrong))
    return f"{counts['equal']} variants equal to transformers, {counts['rejected']} rejected by name"


def _join_by_error(lines: Sequence[str]) -> str:
    """Join lines "field = value (style): error", with each error once, after the names of all its fields."""
    lines_of: dict[str, list[str]] = {}
    for line in lines:
        lines_of.setdefault(line.partition("): ")[2], []).append(line)
    joined = []
    for error, group in lines_of.items():
        fields = dict.fromkeys(line.partition(" = ")[0] for line in group)
        joined.append(group[0] if len(group) == 1 else f"{', '.join(fields)}: {error}")
    return "; ".join(joined)


def _round_trip(family: CheckedFamily, full: bool) -> str:
    tensors = 0
    for seed in DEFAULT_SEEDS if full else SLOW_TEST_SEEDS:
        with PrivateDirectory("archon-check-") as folder:
            if family.reference is None:
                tensors += native_round_trip(seed, family.model_type, folder.path)
            else:
                tensors += round_trip(seed, family.model_type, folder.path, family.reference)
    if family.spec.state_dict_adapter_class.from_hf is not BaseStateDictAdapter.from_hf:
        with PrivateDirectory("archon-check-") as folder:
            tensors += native_round_trip(0, family.model_type, folder.path, **TWO_DIGITS)
    names = "archon's own files" if family.reference is None else "transformers' names and files"
    return f"{tensors} tensors bitwise, {names}"


def _isolation(family: CheckedFamily, full: bool) -> str:
    seeds = SEEDS if full else DEFAULT_SEEDS
    documents = sum(check_isolation(seed, family.model_type) for seed in seeds)
    shared = sum(check_shared_prefixes(seed, family.model_type) for seed in SLOW_TEST_SEEDS)
    forks = sum(check_forks(seed, family.model_type) for seed in SLOW_TEST_SEEDS)
    prefixes = "also with shared prefixes" if shared else "prefixes are not shared"
    return f"{documents} documents changed, all others unaffected; {prefixes}; {forks} forked answers as alone"


def _generation(family: CheckedFamily, full: bool) -> str:
    pages = (1, 3, 64) if full else (3,)
    tokens = sum(
        check_decoding(seed, family.model_type, family.reference, pages)
        for seed in (SLOW_TEST_SEEDS if full else range(1))
    )
    reference = "the forward over whole documents" if family.reference is None else "transformers"
    return f"{tokens} greedy tokens as {reference}"


def _layouts(family: CheckedFamily, full: bool) -> str:
    text = ""
    for tied in (False, True) if full else (False,):
        with PrivateDirectory("archon-check-") as folder:
            text = describe_layouts(check_layouts(family, folder.path, tied=tied))
    return text


CONTRACTS: dict[str, Callable[[CheckedFamily, bool], str | None]] = {
    "parameters": _parameters,
    "parity": _parity,
    "config fields": _config_fields,
    "round trip": _round_trip,
    "isolation": _isolation,
    "generation": _generation,
    "two ranks": _layouts,
}
