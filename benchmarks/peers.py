"""The peers' models with the weights of a Hugging Face checkpoint, for one process.

Each function loads `path` and returns the module; what has to be changed for a CPU is said and done here and nowhere
else. Each runs in a process of its own (see `benchmarks.harness`), so that its changes stay there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def hf_tensors(path: str) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by Hugging Face name."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def hf_config(path: str) -> dict[str, Any]:
    """The checkpoint's config.json."""
    return json.loads((Path(path) / "config.json").read_text())


def transformers_model(path: str, *, device: str = "cpu", dtype: str = "float32", attention: str = "sdpa") -> Any:
    """transformers' Qwen3ForCausalLM."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention).to(
        device
    )


def torchtitan_model(path: str) -> nn.Module:
    """torchtitan's Qwen3 with its default fused QKV, and its own SDPA module as inner attention.

    Its language models offer FlexAttention and `varlen_attn`, neither of which has a backward on a CPU, so its
    `ScaledDotProductAttention` takes their place: causal, without document masks.
    """
    # Triton kernels of its expert parallelism are compiled on import; a dense model calls none, and a CPU build of
    # torch brings no Triton.
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    if "triton" not in sys.modules and not _installed("triton"):
        sys.modules[kernels] = _EmptyModule(kernels)
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = hf_config(path)
    layers = qwen3._build_qwen3_layers(
        n_layers=config["num_hidden_layers"],
        dim=config["hidden_size"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_dim=config["intermediate_size"],
        attn_backend="varlen",
        rope=CosSinRoPE.Config(
            dim=config["head_dim"],
            max_seq_len=config["max_position_embeddings"],
            theta=config["rope_parameters"]["rope_theta"],
        ),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    sizes = {"dim": config["hidden_size"], "vocab_size": config["vocab_size"]}
    model_config = qwen3.Qwen3Model.Config(
        **sizes,
        norm=qwen3._qwen3_norm(sizes["dim"]),
        enable_weight_tying=config["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(
            num_embeddings=sizes["vocab_size"], embedding_dim=sizes["dim"], param_init=qwen3._EMBEDDING_SKIP_INIT
        ),
        lm_head=Linear.Config(
            in_features=sizes["dim"], out_features=sizes["vocab_size"], param_init=qwen3._LINEAR_INIT
        ),
        layers=layers,
    )
    model = model_config.build()
    model.init_states()
    adapter = qwen3.Qwen3StateDictAdapter(model_config, None)
    # Its check of the RoPE kind reads the assets folder, which is not given: the frequencies are set above.
    adapter._validate_hf_rope_config = lambda *_: None
    model.load_state_dict(adapter.from_hf(hf_tensors(path)))
    return model


def megatron_model(path: str) -> nn.Module:
    """megatron-core's GPTModel with its local layer spec, on one CPU process, fusions off.

    It asks CUDA for the device to allocate on and for the random state of dropout (which is 0 here); both are answered
    for the CPU.
    """
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = hf_config(path)
    made = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        made,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=config["rope_parameters"]["rope_theta"],
    )
    missing, unexpected = model.load_state_dict(dict(_megatron_tensors(config, hf_tensors(path))), strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    if missing or unexpected:
        raise RuntimeError(f"megatron-core's names have changed: missing {missing[:3]}, unexpected {unexpected[:3]}")
    return model


def _megatron_tensors(config: Mapping[str, Any], hf: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """megatron-core's names and layouts: QKV fused group by group (its queries, its key, its value), gate and up
    stacked.
    """
    groups, head_dim = config["num_key_value_heads"], config["head_dim"]
    yield "embedding.word_embeddings.weight", hf["model.embed_tokens.weight"]
    yield "decoder.final_layernorm.weight", hf["model.norm.weight"]
    if not config["tie_word_embeddings"]:
        yield "output_layer.weight", hf["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        qkv = [hf[f"{theirs}self_attn.{name}_proj.weight"].unflatten(0, (groups, -1)) for name in "qkv"]
        assert qkv[1].shape[1] == head_dim
        yield f"{ours}self_attention.linear_qkv.weight", torch.cat(qkv, 1).flatten(0, 1)
        yield f"{ours}self_attention.linear_proj.weight", hf[f"{theirs}self_attn.o_proj.weight"]
        for name in "qk":
            yield f"{ours}self_attention.{name}_layernorm.weight", hf[f"{theirs}self_attn.{name}_norm.weight"]
        yield f"{ours}input_layernorm.weight", hf[f"{theirs}input_layernorm.weight"]
        yield f"{ours}pre_mlp_layernorm.weight", hf[f"{theirs}post_attention_layernorm.weight"]
        gate_up = [hf[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        yield f"{ours}mlp.linear_fc1.weight", torch.cat(gate_up)
        yield f"{ours}mlp.linear_fc2.weight", hf[f"{theirs}mlp.down_proj.weight"]


def causal_mask(length: int) -> Tensor:
    """megatron-core's attention mask [1, 1, length, length]: True where a key must not be seen."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]


class _EmptyModule(types.ModuleType):
    """A module whose every name is a function that must not be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} needs Triton")

        return unavailable


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
