"""GGUF, the format of llama.cpp, Ollama and LM Studio: one file with weights, metadata and tokenizer.

The `gguf` package writes the file. transformers then reads its metadata back, and an export is refused unless that
gives the same model: fields that GGUF lacks would otherwise change the model silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from archon.checkpoint.hf_reader import read_json
from archon.checkpoint.safetensors_file import LazyTensor, fail
from archon.checkpoint.tokenizer import TOKENIZER_BYTES, has_tokenizer, load_tokenizer
from archon.models import get_model_spec
from archon.models.args.base import BaseModelArgs
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import ConfigError

GGUFType = Literal["f16", "q8_0", "f32"]
GGUF_TYPES: tuple[GGUFType, ...] = get_args(GGUFType)
GGUF_FILE = "model.gguf"
_NOT_STORED = ("initializer_range", "pad_token_id", "balance_by_bias", "attn_type")
"""Arguments of a model that change only its training."""
_BLOCK = 32
"""Elements of a row that share a scale in q8_0."""


@dataclass(frozen=True)
class _Family:
    """How GGUF stores a model type.

    Attributes:
        arch: its name in GGUF.
        permuted: rows of queries and keys are in the order of interleaved rotary pairs.
    """

    arch: str
    permuted: bool = False


_FAMILIES = {
    "llama": _Family("llama", permuted=True),
    "mistral": _Family("llama", permuted=True),  # without a window
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
}
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def write_gguf(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    adapter: BaseStateDictAdapter,
    model_type: str,
    tokenizer: Path,
    kind: GGUFType = "f16",
) -> None:
    """Write `model.gguf` to a folder, one tensor in memory at a time.

    Vectors are float32 in every kind. In q8_0, matrices whose rows are no multiple of 32 are float16, as in llama.cpp.

    Args:
        folder: an existing folder.
        tensors: tensors by Hugging Face key.
        adapter: the adapter of the model.
        model_type: `model_type` of its config.
        tokenizer: folder of the tokenizer, if it has one.
        kind: the type of matrices.

    Raises:
        ConfigError: the package is missing, or GGUF cannot hold this model or its tokenizer.
        CheckpointError: a value is not finite in `kind`.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"--to gguf needs the package gguf ({error}): pip install 'archon-engine[gguf]'") from error
    if model_type not in _FAMILIES or adapter.args.is_critic:
        raise ConfigError(
            f"archon writes no GGUF of {'a critic' if adapter.args.is_critic else model_type}; expected one of "
            f"{', '.join(_FAMILIES)}: export Hugging Face format, and convert it with llama.cpp"
        )
    family, args = _FAMILIES[model_type], adapter.args
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf.get_tensor_name_map(arch, args.n_layers)
    with closing(gguf.GGUFWriter(folder / GGUF_FILE, family.arch)) as writer:
        # 1. Metadata, tokenizer, and the name, shape and type of every tensor.
        _add_metadata(writer, args, family.arch, kind)
        _add_tokenizer(writer, tokenizer, args.vocab_size)
        types = {key: _tensor_type(tensor.shape, kind) for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            module, _, suffix = key.rpartition(".")
            name = names.get_name(module)
            if name is None:
                raise ConfigError(f"GGUF's {family.arch} has no tensor for {key!r}; export Hugging Face format instead")
            quantization = gguf.GGMLQuantizationType[types[key].upper()]
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, quantization)
            size = int(np.prod(shape))
            writer.add_tensor_info(f"{name}.{suffix}", shape, np.dtype(np.uint8), size, quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # 2. The tensors in the same order.
        for key, tensor in tensors.items():
            values = tensor.read().float()
            if family.permuted and key.rpartition(".")[0].endswith(("q_proj", "k_proj")):
                heads = args.n_heads if "q_proj" in key else args.n_kv_heads
                values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            writer.write_tensor_data(_encoded(values, types[key], gguf, folder / GGUF_FILE, key))
    _require_same_model(folder, args)


def _tensor_type(shape: tuple[int, ...], kind: GGUFType) -> GGUFType:
    if len(shape) < 2:
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % _BLOCK else kind


def _encoded(values: torch.Tensor, kind: GGUFType, gguf: Any, path: Path, key: str) -> np.ndarray[Any, Any]:
    """Return the bytes of float32 values in a type of GGUF."""
    rounded = values.half() if kind != "f32" else values  # scales of q8_0 are float16
    if not (rounded if kind == "f16" else values).isfinite().all():
        fail(path, f"key {key!r} has values that are not finite in {kind}; expected at most 65,504")
    if kind == "q8_0":
        blocks: np.ndarray[Any, Any] = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
        return blocks
    return rounded.contiguous().numpy().view(np.uint8)


def _add_metadata(writer: Any, args: BaseModelArgs, arch: str, kind: GGUFType) -> None:
    import gguf

    writer.add_name(arch)
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(args.max_seq_len)
    writer.add_block_count(args.n_layers)
    writer.add_embedding_length(args.dim)
    writer.add_feed_forward_length(args.hidden_dim)
    writer.add_head_count(args.n_heads)
    writer.add_head_count_kv(args.n_kv_heads)
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    writer.add_rope_dimension_count(args.head_dim)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_layer_norm_rms_eps(args.norm_eps)
    writer.add_vocab_size(args.vocab_size)


def _add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Add a byte-level BPE tokenizer; without a tokenizer, say that there is none."""
    if not has_tokenizer(folder):
        writer.add_tokenizer_model("none")
        return
    path = folder / "tokenizer.json"
    content = read_json(path, TOKENIZER_BYTES)
    model, pre = content.get("model") or {}, _pre_tokenizer(content.get("pre_tokenizer"))
    if model.get("type") != "BPE" or pre is None or model.get("byte_fallback"):
        raise ConfigError(
            f"{path}: archon writes byte-level BPE tokenizers of GPT-2, Qwen2 and Llama 3 to GGUF, and this is "
            "another; export Hugging Face format, and convert it with llama.cpp"
        )
    tokens = {index: token for token, index in model["vocab"].items()}
    added = {entry["id"]: entry for entry in content.get("added_tokens", [])}
    tokens |= {index: entry["content"] for index, entry in added.items()}
    if tokens and max(tokens) >= vocab_size:
        raise ConfigError(f"{path}: token {max(tokens)} is outside the model's vocabulary of {vocab_size:,}")
    normal, control, user_defined, unused = 1, 3, 4, 5
    kinds = [
        unused if i not in tokens else normal if i not in added else control if added[i]["special"] else user_defined
        for i in range(vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types(kinds)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if merges:
        writer.add_token_merges(merges)
    loaded = load_tokenizer(folder)
    for name in ("bos", "eos", "pad"):
        if (token_id := getattr(loaded, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(loaded("a").input_ids[0] == loaded.bos_token_id)
    if isinstance(loaded.chat_template, str):
        writer.add_chat_template(loaded.chat_template)


def _pre_tokenizer(pre: Any) -> str | None:
    """Return llama.cpp's name of a pre-tokenizer of `tokenizer.json`; None if it has none."""
    parts = pre["pretokenizers"] if isinstance(pre, dict) and pre.get("type") == "Sequence" else [pre]
    if not parts or not isinstance(parts[-1], dict) or parts[-1].get("type") != "ByteLevel":
        return None
    if parts[-1].get("add_prefix_space"):
        return None
    if len(parts) == 1:
        return "gpt-2" if parts[0].get("use_regex", True) else None
    split = parts[0]
    if len(parts) != 2 or split.get("type") != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    return {_QWEN2_SPLIT: "qwen2", _LLAMA3_SPLIT: "llama-bpe"}.get((split.get("pattern") or {}).get("Regex", ""))


def _require_same_model(folder: Path, args: BaseModelArgs) -> None:
    """Raise ConfigError unless transformers reads the same model from the metadata of the file."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read: dict[str, Any] = load_gguf_checkpoint(str(folder / GGUF_FILE), return_tensors=False)["config"]
    found = get_model_spec(read["model_type"]).model_args_class.from_hf_config(read)
    expected, actual = _as_stored(asdict(args)), _as_stored(asdict(found))
    for name, value in expected.items():
        if name not in _NOT_STORED and actual.get(name) != value:
            raise ConfigError(
                f"GGUF cannot hold this model: {name} is {value!r:.200}, and {actual.get(name)!r:.200} would be read; "
                "export Hugging Face format instead"
            )


def _as_stored(value: Any) -> Any:
    """Return a value with its numbers in float32, as GGUF stores them."""
    if isinstance(value, dict):
        return {key: _as_stored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_stored(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value
