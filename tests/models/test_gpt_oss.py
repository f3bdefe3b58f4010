"""gpt-oss beyond what every family is tested for: published configs, the layout of its experts, and isolation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

import archon
from archon.checkpoint.formats.megatron.gpt_config import megatron_arguments
from archon.checkpoint.formats.megatron.sharding import MegatronLayout
from archon.engine.memory.weight_shards import ModelWeights, count_parameters
from archon.models.attention.meta import PackedAttention, PrefixAttention
from archon.models.attention.prefix.plan import shared_prefixes
from archon.models.attention.registry import candidates
from archon.models.gpt_oss import SPEC, GptOssModel, GptOssModelArgs, GptOssStateDictAdapter
from archon.models.layers.feed_forward import ClampedSwiGLU
from archon.parallel.layout import parse_layout
from archon.schema.errors import ConfigError
from archon.tools.check.isolation import check_isolation
from archon.tools.check.oracle import build_pair, family_config, pack, random_config, reference_logits, relative_error
from archon.tools.check.round_trip import fresh_model
from tests.models.test_prefix import answers
from tests.tolerances import FORMULA_FP64, INVARIANCE_FP64, PARITY_FP32

# The config.json of openai/gpt-oss-20b, but for its quantization; the larger one has more layers and experts.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
LARGE = PUBLISHED | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


@pytest.mark.parametrize(("config", "parameters"), [(PUBLISHED, 20_914_757_184), (LARGE, 116_829_156_672)])
def test_published_configs_have_as_many_parameters_as_published(config: dict[str, Any], parameters: int) -> None:
    adapter = GptOssStateDictAdapter(config)
    with torch.device("meta"):
        model = GptOssModel(adapter.args)
        reference = GptOssForCausalLM(GptOssConfig(**config))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {name: tuple(p.shape) for name, p in reference.named_parameters()} == adapter.hf_shapes()
    weights = ModelWeights.from_spec(SPEC, adapter.args)
    shapes = [w for layer in weights.layers for w in weights.distinct_layers[layer]]
    assert count_parameters((*weights.embedding, *weights.head, *shapes), parse_layout("d1"), 0).local == parameters


def test_the_published_config_says_what_the_model_is() -> None:
    args = GptOssModelArgs.from_hf_config(PUBLISHED)
    assert args.layer_windows == (128, None) * 12
    assert (args.rope_theta, args.rope_scaling.kind, args.rope_scaling.truncate) == (150_000.0, "yarn", False)
    layer = args.layer(0)
    assert layer.mixer.sinks and layer.mixer.bias and layer.mixer.out_bias
    experts = layer.feed_forward
    assert experts.hidden_act == ClampedSwiGLU(1.702, 7.0)
    assert (experts.n_experts, experts.top_k, experts.hidden_dim) == (32, 4, 2880)
    assert experts.normalize and experts.router_bias and experts.expert_biases


def test_a_window_that_the_layers_need_is_not_switched_off() -> None:
    with pytest.raises(ConfigError, match="'sliding_window' is None"):
        GptOssModelArgs.from_hf_config(PUBLISHED | {"sliding_window": None})


def test_norms_are_rounded_as_in_transformers() -> None:
    """Once, after the factor: bit for bit in bfloat16."""
    ours = GptOssModelArgs.from_hf_config(PUBLISHED).norm.build(64).bfloat16()
    theirs = GptOssRMSNorm(64, eps=1e-5).bfloat16()
    theirs.weight.data.normal_(1, 0.3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(50, 64, dtype=torch.bfloat16)
    assert torch.equal(ours(x), theirs(x))


def square_experts() -> tuple[GptOssStateDictAdapter, dict[str, Tensor]]:
    """An adapter whose experts' matrices are square, so that no shape says which way round they are, and a checkpoint
    of random numbers."""
    config = PUBLISHED | {"hidden_size": 6, "intermediate_size": 6, "num_hidden_layers": 1, "vocab_size": 5}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "layer_types": ["full_attention"]}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.7, "pad_token_id": None}
    adapter = GptOssStateDictAdapter(config)
    return adapter, {name: torch.randn(shape, dtype=torch.float64) for name, shape in adapter.hf_shapes().items()}


def test_experts_as_the_checkpoint_stores_them() -> None:
    """Token by token from the file's tensors: gate and up are the even and odd columns, and rows of x are multiplied
    from the left."""
    adapter, file = square_experts()
    model = GptOssModel(adapter.args).double()
    model.load_state_dict(adapter.from_hf(file))
    prefix = "model.layers.0.mlp."
    x = torch.randn(9, 6, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for t, row in enumerate(x):
        logits = file[f"{prefix}router.weight"] @ row + file[f"{prefix}router.bias"]
        best = logits.topk(2)
        for weight, e in zip(best.values.softmax(0), best.indices.tolist(), strict=True):
            both = row @ file[f"{prefix}experts.gate_up_proj"][e] + file[f"{prefix}experts.gate_up_proj_bias"][e]
            gate, up = both[0::2].clamp(max=0.7), both[1::2].clamp(-0.7, 0.7)
            hidden = (up + 1) * gate / (1 + (-1.702 * gate).exp())
            out = hidden @ file[f"{prefix}experts.down_proj"][e] + file[f"{prefix}experts.down_proj_bias"][e]
            expected[t] += weight * out
    assert relative_error(model.layers["0"].moe(x)[0], expected) <= FORMULA_FP64


def test_a_checkpoint_comes_back_bit_by_bit() -> None:
    adapter, file = square_experts()
    back = adapter.to_hf(adapter.from_hf(file))
    assert back.keys() == file.keys()
    assert all(torch.equal(back[name], file[name]) for name in file)


@torch.no_grad()
def test_a_folder_as_published_computes_what_transformers_does(tmp_path: Path) -> None:
    """Experts in 4-bit blocks, square; transformers is given what it makes of the blocks itself."""
    config = random_config(1, "gpt_oss", hidden_size=32, intermediate_size=32)
    theirs, _, _ = build_pair(config)
    state, file = theirs.state_dict(), dict[str, Tensor]()
    for name, tensor in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            file[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, columns, rows // 32), dtype=torch.uint8)
        file |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    theirs.load_state_dict(state)
    if config.tie_word_embeddings:
        del file["lm_head.weight"]
    save_file(file, tmp_path / "model.safetensors")
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | quantized))

    model, lengths = archon.load_model(tmp_path, dtype=torch.float32), [7, 1, 20]
    tokens, positions, cu_seqlens, longest = pack(lengths, config.vocab_size, 0)
    expected = reference_logits(theirs, tokens, lengths)
    assert relative_error(model(tokens, positions, cu_seqlens, longest), expected) <= PARITY_FP32


@pytest.mark.parametrize("longest", [6, 150], ids=["trees", "prefixes"])
def test_shared_beginnings_change_nothing(longest: int) -> None:
    config = random_config(4, "gpt_oss", vocab_size=103)
    model = fresh_model(family_config(config), 4, torch.float64)
    tokens, lengths = answers([6, 40, 6], per_prompt=4, longest=longest, seed=1)
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    weight = torch.randn(len(tokens), config.vocab_size, dtype=torch.float64)

    def gradients(*given: Any) -> list[Tensor]:
        model.zero_grad()
        logits = model(*given)
        (logits * weight).sum().backward()
        return [logits, *(p.grad for p in model.parameters())]

    plain = gradients(tokens, positions, cu_seqlens, max(lengths))
    rows = shared.rows
    found = gradients(tokens[rows], positions[rows], cu_seqlens, max(lengths), PrefixAttention(shared))
    for ours, wanted in zip(found, plain, strict=True):
        assert relative_error(ours, wanted) <= INVARIANCE_FP64


@pytest.mark.parametrize("seed", range(4))
def test_documents_do_not_see_each_other(seed: int) -> None:
    check_isolation(seed, "gpt_oss")


def test_sinks_are_shards_of_the_planner_and_start_as_in_transformers() -> None:
    adapter, _ = square_experts()
    shapes = ModelWeights.from_spec(SPEC, adapter.args).distinct_layers[0]
    (sinks,) = [w for w in shapes if w.name == "sinks"]
    assert (sinks.role, sinks.shape, sinks.local(parse_layout("t2"))) == ("heads", (2,), (1,))
    torch.manual_seed(0)
    model = GptOssModel(replace(adapter.args, n_heads=2000, n_kv_heads=1, initializer_range=0.5))
    model.init_weights()
    assert abs(model.layers["0"].attention.sinks.std().item() - 0.5) < 0.05


def test_megatron_core_has_no_such_model() -> None:
    with pytest.raises(ConfigError, match="the only value that archon converts to megatron-core"):
        megatron_arguments(square_experts()[0].args, MegatronLayout())


def test_a_backend_that_cannot_compute_a_layer_says_so() -> None:
    args = replace(square_experts()[0].args, attention_soft_cap=2.0)
    attention = args.layer(0).mixer.build(0, args.dim)
    meta = PackedAttention(torch.tensor([0, 3], dtype=torch.int32), 3)
    meta.backends = candidates("varlen")
    with pytest.raises(ConfigError, match="attn_type 'varlen' does not support soft_cap"):
        attention(torch.randn(3, args.dim), None, meta)
