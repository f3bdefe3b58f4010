"""Composite checkpoints whose encoders archon does not compute: names, published configs, images, and what trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from archon.checkpoint.hf_io import load_model, load_spec, save_model
from archon.cli.inspect import describe_weights
from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.models import get_model_spec
from archon.models.hf.names import rename_prefix
from archon.models.vision.images import ProcessedImage
from archon.schema.config import EngineConfig
from archon.schema.errors import BatchError, CheckpointError, ConfigError
from archon.tools.check.layouts import SequenceLoss, padded_batch
from archon.tools.check.oracle import (
    build_pair,
    hf_classes,
    hf_model,
    pack,
    random_config,
    reference_logits,
    relative_error,
)
from archon.tools.check.random_configs import draw_fields
from archon.tools.planner.inspection import inspect_checkpoint
from tests.tolerances import PARITY_FP32

TYPES = ("gemma3", "mistral3", "kimi_k25")
WEIGHTS = "model.safetensors"
LENGTHS = (5, 3)
VOCAB = 37
BIAS = "e_score_correction_bias"  # a buffer, which gradients do not train
Composite = tuple[Path, str, dict[str, torch.Tensor]]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.fixture(params=TYPES, scope="module")
def composite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Composite:
    """A checkpoint of transformers with an untied head, with the names of released files; its type and its tensors."""
    folder = tmp_path_factory.mktemp("composite") / "theirs"
    torch.manual_seed(0)
    config = random_config(0, request.param, tie_word_embeddings=False, vocab_size=VOCAB)
    hf_model(config).save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    if request.param == "kimi_k25":
        tensors = {released_kimi_name(name): tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / WEIGHTS)
    return folder, request.param, tensors


def released_kimi_name(name: str) -> str:
    """The name in a released file of a tensor that transformers 5.24 writes: it renames two modules by mistake."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    return name.removeprefix("model.") if name.startswith("model.mm_projector.") else name


def test_kimi_files_of_transformers_are_read_and_exported_as_released(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = hf_model(random_config(1, "kimi_k25", tie_word_embeddings=False))
    theirs.save_pretrained(tmp_path / "theirs")
    written = load_file(tmp_path / "theirs" / WEIGHTS)
    assert {name for name in written if released_kimi_name(name) != name}
    save_model(load_model(tmp_path / "theirs", text_only=True), tmp_path / "ours", like=tmp_path / "theirs")
    assert_same(tmp_path / "ours", {released_kimi_name(name): tensor for name, tensor in written.items()})
    read = type(theirs).from_pretrained(tmp_path / "ours")
    assert all(torch.equal(x, y) for x, y in zip(read.parameters(), theirs.parameters(), strict=True))


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(found[key].dtype == x.dtype and torch.equal(found[key], x) for key, x in expected.items())


def test_every_naming_is_read_and_exported_with_the_names_of_transformers(composite: Composite, tmp_path: Path) -> None:
    folder, _, tensors = composite
    adapter, config = load_spec(folder, text_only=True).adapter, json.loads((folder / "config.json").read_text())
    first, *others = type(adapter).composite_names
    in_memory = {rename_prefix(key, {file: memory for memory, file in first.items()}): x for key, x in tensors.items()}
    assert others and in_memory.keys() != tensors.keys()
    expected = dict(load_model(folder, text_only=True).named_parameters())
    for number, prefixes in enumerate(others):
        named = write(tmp_path / str(number), config, {rename_prefix(k, prefixes): x for k, x in in_memory.items()})
        model = load_model(named, text_only=True)
        assert all(torch.equal(weight, expected[name]) for name, weight in model.named_parameters())
        save_model(model, tmp_path / f"{number}-out", like=named)
        assert_same(tmp_path / f"{number}-out", tensors)


def test_one_key_under_another_naming_is_refused(composite: Composite, tmp_path: Path) -> None:
    folder, _, tensors = composite
    config = json.loads((folder / "config.json").read_text())
    key = next(key for key in tensors if "self_attn.o_proj" in key and "vision" not in key)
    strange = {("xmodel." + name if name == key else name): x for name, x in tensors.items()}
    with pytest.raises(CheckpointError, match=f"unknown key 'xmodel.{re.escape(key)}'"):
        load_model(write(tmp_path / "strange", config, strange), text_only=True)


def test_training_changes_the_decoder_alone_and_an_image_is_refused(composite: Composite, tmp_path: Path) -> None:
    folder, _, tensors = composite
    config = {"path": str(folder), "device": "cpu", "dtype": "float32", "vision": "off"}
    engine = ArchonEngine(EngineConfig.model_validate(config | {"optimizer": {"lr": 0.1}}))
    engine.initialize(total_steps=2)
    batch = padded_batch(LENGTHS, VOCAB, 0)
    engine.train_batch(batch, SequenceLoss(), loss_token_count)
    engine.save(tmp_path / "out")
    trained = load_file(tmp_path / "out" / WEIGHTS)
    assert trained.keys() == tensors.keys()
    kept = {key for key, x in tensors.items() if torch.equal(trained[key], x)}
    computed = load_spec(folder, text_only=True).adapter.hf_shapes().keys()
    idle = {key for key in kept if ".experts." in key or key.endswith(BIAS)}  # experts that no token chose
    assert kept - idle == tensors.keys() - computed and len(kept - idle) >= 5
    image = ProcessedImage(torch.zeros(4, 12), (1, 2, 2))
    with pytest.raises(BatchError, match="the batch has images, and this is a text model; expected a text batch"):
        engine.forward_batch(batch | {"images": [[image], []]})


def test_encoders_are_bytes_of_files_and_no_parameters_to_train(composite: Composite) -> None:
    folder, model_type, tensors = composite
    inspection = inspect_checkpoint(folder, json.loads((folder / "config.json").read_text()))
    computed = load_spec(folder, text_only=True).adapter.hf_shapes()
    if get_model_spec(model_type).text is None:
        parameters = sum(tensors[key].numel() for key in computed if not key.endswith(BIAS))
        assert inspection.parameters == parameters and inspection.image_flops is None
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert describe_weights(folder)[0].startswith(f"{size:,} bytes")


# The text parts of published configs, as far as known, with the number of parameters of the text decoder.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Gemma 3 4B": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        },
        3_880_263_168,
    ),
    "Gemma 3 27B": (
        {
            "model_type": "gemma3",
            "text_config": {
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "model_type": "gemma3_text",
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        27_009_346_304,
    ),
    "Kimi K2.5": (
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "auto_map": {"AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
            "bos_token_id": 163584,
            "dtype": "bfloat16",
            "eos_token_id": 163585,
            "ignore_index": -100,
            "media_placeholder_token_id": 163605,
            "model_type": "kimi_k25",
            "pad_token_id": 163839,
            "text_config": {
                "architectures": ["DeepseekV3ForCausalLM"],
                "attention_bias": False,
                "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
                "aux_loss_alpha": 0.001,
                "ep_size": 1,
                "first_k_dense_replace": 1,
                "hidden_act": "silu",
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "kv_lora_rank": 512,
                "max_position_embeddings": 262144,
                "model_type": "kimi_k2",
                "moe_intermediate_size": 2048,
                "moe_layer_freq": 1,
                "n_group": 1,
                "n_routed_experts": 384,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "num_attention_heads": 64,
                "num_experts_per_tok": 8,
                "num_hidden_layers": 61,
                "num_key_value_heads": 64,
                "num_nextn_predict_layers": 0,
                "pretraining_tp": 1,
                "q_lora_rank": 1536,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "rms_norm_eps": 1e-5,
                "rope_scaling": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 64.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096,
                    "type": "yarn",
                },
                "rope_theta": 50000.0,
                "routed_scaling_factor": 2.827,
                "scoring_func": "sigmoid",
                "seq_aux": True,
                "tie_word_embeddings": False,
                "topk_group": 1,
                "topk_method": "noaux_tc",
                "v_head_dim": 128,
                "vocab_size": 163840,
            },
            "use_unified_vision_chunk": True,
            "video_placeholder": "<|kimi_k25_video_placeholder|>",
            "vision_config": {"model_type": "kimi_k25_vision", "mm_hidden_size": 1152},
        },
        1_026_408_232_448,
    ),
    "Mistral Small 3.1 24B": (
        {
            "model_type": "mistral3",
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
            "text_config": {
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "max_position_embeddings": 131072,
                "model_type": "mistral",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e9,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "vision_config": {"model_type": "pixtral"},
        },
        23_572_403_200,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_composite_configs_give_the_decoders_parameter_count(name: str) -> None:
    config, count = PUBLISHED[name]
    assert inspect_checkpoint("published", config).refused == []
    spec = get_model_spec(config["model_type"], text_only=True)
    shapes = spec.state_dict_adapter_class(config).stored_shapes.values()
    assert sum(torch.Size(shape).numel() for shape in shapes) == count


def test_a_soft_cap_that_a_composite_model_does_not_apply_is_refused() -> None:
    config = PUBLISHED["Gemma 3 4B"][0]
    capped = config | {"text_config": config["text_config"] | {"final_logit_softcapping": 30.0}}
    with pytest.raises(ConfigError, match=r"'final_logit_softcapping' is 30\.0; expected null in a composite config"):
        get_model_spec("gemma3").model_args_class.from_hf_config(capped)


@pytest.mark.parametrize("seed", range(3))
def test_mistral3_with_a_decoder_of_type_mistral_computes_as_transformers(seed: int) -> None:
    text = draw_fields(seed, "mistral") | {"model_type": "mistral"}
    whole = draw_fields(seed, "mistral3") | {"text_config": text, "tie_word_embeddings": bool(seed % 2)}
    theirs, ours, _ = build_pair(hf_classes("mistral3")[0](**whole), seed=seed)
    tokens, positions, bounds, longest = pack([9, 41], ours.args.vocab_size, seed)
    with torch.no_grad():
        difference = relative_error(ours(tokens, positions, bounds, longest), reference_logits(theirs, tokens, [9, 41]))
    assert difference <= PARITY_FP32 and ours.args.query_beta is None


def test_a_decoder_without_a_type_or_of_another_family_is_refused() -> None:
    config = PUBLISHED["Mistral Small 3.1 24B"][0]
    for model_type in (None, "llama"):
        text = config["text_config"] | {"model_type": model_type}
        with pytest.raises(ConfigError, match=f"text_config.model_type' is {model_type!r}; expected 'ministral3' or"):
            get_model_spec("mistral3").model_args_class.from_hf_config(config | {"text_config": text})
