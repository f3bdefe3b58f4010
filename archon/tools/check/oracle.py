"""transformers as the reference of a family: its model with the same weights, run on one document at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from archon.models import BaseArchonModel, BaseStateDictAdapter, get_model_spec, is_supported_model
from archon.schema.errors import ConfigError
from archon.tools.check.random_configs import draw_fields

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


class ContractError(Exception):
    """A family violates a contract; the message is one line."""


def has_reference(model_type: str) -> bool:
    """Return whether transformers has a causal language model, or a composite model, of this type."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in _model_mapping(model_type)


def hf_classes(model_type: str) -> tuple[Any, Any]:
    """Return transformers' config class and model class of a model type.

    The model class is the causal language model, or the whole model of a composite type.

    Raises:
        ConfigError: transformers has neither.
    """
    from transformers import CONFIG_MAPPING

    if not has_reference(model_type):
        raise ConfigError(f"transformers has no causal language model of type {model_type!r} to compare with")
    config_class = CONFIG_MAPPING[model_type]
    return config_class, _model_mapping(model_type)[config_class]


def _model_mapping(model_type: str) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_composite(model_type) else MODEL_FOR_CAUSAL_LM_MAPPING


def is_composite(model_type: str) -> bool:
    """Return whether a family loads the text decoder of a composite model of this type."""
    return is_supported_model(model_type) and model_type in get_model_spec(model_type).model_args_class.composite_types


def random_config(
    seed: int, model_type: str, reference: str | None = None, *, rope_kind: str | None = None, **fixed: Any
) -> Any:
    """Return a transformers config with the fields of `draw_fields`, of type `reference` or else `model_type`."""
    return hf_classes(reference or model_type)[0](**draw_fields(seed, model_type, rope_kind=rope_kind, **fixed))


def family_config(config: Any, model_type: str | None = None) -> dict[str, Any]:
    """Return a transformers config as `config.json` of `model_type`, by default of the same type."""
    fields: dict[str, Any] = config.to_dict()
    return fields | {"model_type": model_type or config.model_type}


def hf_model(config: Any, **options: Any) -> Any:
    """Return a fresh transformers model without dropout; experts run one at a time, which alone supports float64."""
    if any(getattr(config.get_text_config(), name, None) for name in EXPERT_FIELDS):
        options["experts_implementation"] = "eager"
    model_class = hf_classes(config.model_type)[1]
    if not model_class._supports_sdpa:
        options["attn_implementation"] = "eager"
    return model_class._from_config(config, **options).eval()


class InFloat64(TorchFunctionMode):
    """Replace float32 by float64 in code that asks for float32, such as softmax and RoPE in transformers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if function is Tensor.float else function
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return function(*args, **kwargs)


@torch.no_grad()
def randomize_vectors(model: nn.Module) -> None:
    """Randomize biases around 0 and norms around 1, buffers included; fresh models set them to 0 and 1."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("_bias"):
            parameter.normal_(1.0 if "norm" in name and not name.endswith("bias") else 0.0, 0.3)
        if name.endswith("A_log"):
            parameter.uniform_(-3.0, -1.0)  # slow decays have long memory
    randomize_buffers(model)


SLOW_DECAYS = (0.03, 0.05)
"""Range of slow decays of recurrent mixers; fast decays would hide leaks between documents."""


@torch.no_grad()
def draw_slow_decays(model: nn.Module) -> None:
    """Randomize the decays of recurrent mixers within `SLOW_DECAYS`."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(*SLOW_DECAYS).log_()


@torch.no_grad()
def randomize_buffers(model: nn.Module) -> None:
    """Randomize bias buffers that checkpoints store, such as the routers' expert biases."""
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.dim() == 1:
            buffer.normal_(0.0, 0.3)


def build_pair(
    config: Any,
    *,
    attention: str = "eager",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    model_type: str | None = None,
) -> tuple[Any, BaseArchonModel, BaseStateDictAdapter]:
    """Return a random transformers model, archon's model with the same weights, and the state-dict adapter.

    Args:
        config: config of the transformers model.
        attention: transformers' attention implementation.
        seed: seed of the weights.
        dtype: dtype of the weights.
        model_type: type of archon's family; by default the type of the config.

    Raises:
        ContractError: the two models have different parameters.
    """
    torch.manual_seed(seed)
    reference = hf_model(config, attn_implementation=attention).to(dtype)
    randomize_vectors(reference)
    spec = get_model_spec(model_type or config.model_type, text_only=True)
    adapter = spec.state_dict_adapter_class(family_config(config, model_type))
    model = spec.model_class(adapter.args).to(dtype)
    missing, unexpected = model.load_state_dict(adapter.from_hf(checkpoint_tensors(reference)), strict=False)
    if unexpected or not set(missing) <= {"output.weight"}:
        raise ContractError(f"transformers' checkpoint lacks {missing} and has unexpected {unexpected}")
    model.tie_weights()
    return reference, model, adapter


def is_passthrough(adapter: BaseStateDictAdapter, name: str) -> bool:
    """Return whether archon does not compute a parameter of a transformers model."""
    return any(naming.is_passthrough(name) for naming in adapter.namings)


def checkpoint_tensors(
    reference: Any, *, gradients: bool = False, adapter: BaseStateDictAdapter | None = None
) -> dict[str, Tensor]:
    """Return the weights of a transformers model, or their gradients, with the names and shapes of its checkpoints.

    In memory, transformers stacks experts, gate and up; a checkpoint may have separate matrices. The result includes
    stored buffers, and excludes the passthrough tensors of `adapter`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    stored = reference.state_dict().keys()
    tensors = {name: buffer for name, buffer in reference.named_buffers() if name in stored}
    for name, parameter in reference.named_parameters():
        if adapter is not None and is_passthrough(adapter, name):
            continue
        if gradients and parameter.grad is None:
            raise ContractError(f"transformers computes no gradient of {name}")
        tensors[name] = parameter.grad if gradients else parameter.detach()
    converted: dict[str, Tensor] = revert_weight_conversion(reference, tensors)
    return converted


def reference_logits(reference: Any, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return logits [T, V] of documents that run one at a time, each with fresh rotary state.

    transformers would keep the dynamic RoPE of the longest document so far; archon uses each document's length.
    """
    decoder, logits = reference.get_decoder(), []
    for document in tokens.split(lengths):
        if getattr(decoder, "rotary_emb", None) is not None:
            decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
        if hasattr(decoder, "rotary_embs"):  # one per RoPE base
            decoder.rotary_embs = nn.ModuleList(type(rope)(rope.config) for rope in decoder.rotary_embs)
        logits.append(reference(input_ids=document.unsqueeze(0), use_cache=False).logits[0])
    return torch.cat(logits)


def pack(lengths: list[int], vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return random tokens [T], positions [T], document boundaries int32 [B + 1] and the longest length."""
    generator = torch.Generator().manual_seed(seed)
    return packed_inputs(torch.randint(0, vocab, (sum(lengths),), generator=generator), lengths)


def packed_inputs(tokens: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return tokens [T], positions [T], document boundaries int32 [B + 1] and the longest length."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return tokens, positions, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max|a - b| / max|b|, or raise ContractError if shapes differ."""
    if actual.shape != expected.shape:
        raise ContractError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    return ((actual - expected).abs().max() / expected.abs().max()).item()
