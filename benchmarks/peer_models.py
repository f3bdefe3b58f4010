"""Models of the peers with the weights of a Hugging Face checkpoint, for one process or one of several ranks.

Each function loads `path` and returns the module. All changes that a peer needs on a CPU are here, with reasons. Each
side runs in its own process (see `benchmarks.harness`), so that its patches stay there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from archon.checkpoint.convert import open_weights
from archon.checkpoint.formats.megatron.gpt_config import megatron_arguments
from archon.checkpoint.formats.megatron.rank_files import rank_state
from archon.checkpoint.formats.megatron.sharding import MegatronLayout, RankCoordinates, RankTensors, padded_vocabulary


def hf_tensors(path: str) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, by Hugging Face name."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def hf_config(path: str) -> dict[str, Any]:
    """Return the checkpoint's config.json."""
    return json.loads((Path(path) / "config.json").read_text())


def transformers_model(path: str, *, device: str = "cpu", dtype: str = "float32", attention: str = "sdpa") -> Any:
    """transformers' Qwen3ForCausalLM."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention).to(
        device
    )


def peft_model(path: str, lora: str, dtype: str, device: str = "cpu") -> Any:
    """transformers' model in `dtype` with a LoRA in PEFT's format, trained in float32."""
    from peft import PeftModel

    return PeftModel.from_pretrained(transformers_model(path, device=device, dtype=dtype), lora, is_trainable=True)


def use_liger(path: str) -> None:
    """Let transformers use Liger's kernels for the model type of `path`, with its fused loss."""
    from liger_kernel import transformers as liger

    getattr(liger, f"apply_liger_kernel_to_{hf_config(path)['model_type']}")()


def fsdp2_model(path: str) -> Any:
    """transformers' model under FSDP2 on all torchrun ranks, sharded by layer, with PyTorch's default gloo."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = transformers_model(path).train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def mean_of_ranks(value: Tensor) -> float:
    """Return the mean of the ranks' numbers [], where there are several."""
    if not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
        return float(value)
    torch.distributed.all_reduce(value)
    return float(value) / torch.distributed.get_world_size()


def whole_number(value: Tensor) -> float:
    """Return a number [] that may be spread over ranks."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def torchtitan_model(path: str) -> nn.Module:
    """torchtitan's Qwen3 with its default fused QKV, and torchtitan's SDPA module as inner attention.

    torchtitan offers FlexAttention and `varlen_attn` for language models. Neither has a backward on a CPU, so
    `ScaledDotProductAttention` replaces them: causal, without document masks.
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
    # Its RoPE check reads the assets directory, which does not exist here; the frequencies are set above.
    adapter._validate_hf_rope_config = lambda *_: None
    model.load_state_dict(adapter.from_hf(hf_tensors(path)))
    return model


def megatron_model(path: str) -> nn.Module:
    """megatron-core's GPTModel, local layer spec, one CPU process, no fusions; archon converts the weights."""
    from megatron.core import parallel_state

    megatron_on_a_cpu()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    return megatron_rank(path, MegatronLayout(), RankCoordinates(0, 0, 0))


def megatron_on_a_cpu() -> None:
    """Let megatron-core run on a CPU.

    It asks CUDA for the device to allocate on, for the random state of dropout (which is 0 here) and, in a pipeline,
    for the last stage's copy of a tied embedding; all are answered for the CPU. Without Transformer Engine its router
    looks for a name that nothing defines.
    """
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def megatron_rank(path: str, layout: MegatronLayout, rank: RankCoordinates) -> nn.Module:
    """Return the GPTModel of one rank with the weights of a checkpoint; the vocabulary is padded only as tp needs.

    Megatron's parallel state must match `layout` and `rank`.
    """
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    with open_weights(Path(path), "hf") as weights:
        rows = padded_vocabulary(weights.adapter.args.vocab_size, layout.tp, 1)
        rank_tensors = RankTensors(weights.adapter, replace(layout, vocab_rows=rows))
        state = {name: lazy.read() for name, lazy in rank_state(rank_tensors, rank, weights.tensors).items()}
    config, arguments = megatron_arguments(rank_tensors.args, rank_tensors.layout)
    config = TransformerConfig(
        **config,
        activation_func=F.silu,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    stages = {"pre_process": rank.pp == 0, "post_process": rank.pp == layout.pp - 1}
    model = GPTModel(config, spec, **arguments, **stages)
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    if missing or unexpected:
        raise RuntimeError(f"megatron-core's names have changed: missing {missing[:3]}, unexpected {unexpected[:3]}")
    return model


def causal_mask(length: int) -> Tensor:
    """megatron-core's attention mask [1, 1, length, length]: True where a key must not be seen."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]


class _EmptyModule(types.ModuleType):
    """A module with a function for every name; calling one is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} needs Triton")

        return unavailable


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


# For each side: its model function, and how to install it.
MODELS: dict[str, tuple[Callable[[str], nn.Module], str]] = {
    "transformers (FSDP2)": (fsdp2_model, "pip install -e ."),
    "torchtitan": (torchtitan_model, "pip install -e '.[bench]' and pip install --no-deps torchtitan"),
    "megatron-core": (megatron_model, "pip install -e '.[bench]'"),
}


def peer_model(side: str, path: str) -> nn.Module:
    """Return the model of a side. Raises ModuleNotFoundError, with the install command, where the peer is missing."""
    make, installation = MODELS[side]
    try:
        return make(path)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error} (to install it: {installation})", name=error.name) from error
