"""Every Hugging Face key and every parameter is accounted for exactly once, both ways."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import Qwen2ForSequenceClassification, Qwen3ForSequenceClassification

from archon.models import BaseArchonModel, BaseModelArgs, BaseStateDictAdapter, NativeTarget, get_model_spec
from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs, Qwen3StateDictAdapter
from archon.models.spec import FAMILIES
from archon.schema.errors import CheckpointError
from archon.tools.check.family import REFERENCES
from archon.tools.check.oracle import build_pair, checkpoint_tensors, hf_classes, random_config
from archon.tools.check.round_trip import EXPORTED_AS_RELEASED
from tests.models.test_hf_config import PUBLISHED, read

SEEDS = [(family, seed) for family in FAMILIES for seed in range(6)]
TIED, UNTIED = (
    next(s for s in range(40) if random_config(s, "qwen3").tie_word_embeddings == tied) for tied in (True, False)
)


def hf_state(seed: int, family: str = "qwen3") -> tuple[Any, dict[str, torch.Tensor], BaseStateDictAdapter]:
    config = random_config(seed, family, REFERENCES.get(family))
    reference, _, adapter = build_pair(config, model_type=family)
    state = checkpoint_tensors(reference)
    return config, {name: tensor for name, tensor in state.items() if not adapter.is_passthrough(name)}, adapter


@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_every_parameter_maps_to_hugging_face_and_back_bitwise(family: str, seed: int) -> None:
    _, state, adapter = hf_state(seed, family)
    native = adapter.from_hf(state)
    assert sorted(native) == sorted(adapter.stored_shapes)
    adapter = adapter.for_keys(state) if family in EXPORTED_AS_RELEASED else adapter
    back = adapter.to_hf(native)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert adapter.hf_shapes() == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_more_than_ten_experts_keep_their_numbers_in_whatever_order_they_come() -> None:
    config = hf_classes("qwen3_moe")[0](
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=11,
        intermediate_size=8, moe_intermediate_size=4, num_experts=12, num_experts_per_tok=2,
    )  # fmt: skip
    adapter = get_model_spec("qwen3_moe").state_dict_adapter_class(config)
    shapes = sorted(adapter.hf_shapes().items())  # experts 0, 1, 10, 11, 2
    state = {name: torch.randn(shape) for name, shape in shapes}
    native = adapter.from_hf(state)
    for ours, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        for expert in range(12):
            matrix = native[f"layers.0.moe.experts.{ours}"][expert]
            assert torch.equal(matrix, state[f"model.layers.0.mlp.experts.{expert}.{theirs}.weight"]), expert


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_transformers_has(name: str) -> None:
    config = read(name)
    config_class, model_class = hf_classes(config["model_type"])
    with torch.device("meta"):
        reference = model_class(config_class(**config))
    adapter = get_model_spec(config["model_type"]).state_dict_adapter_class(config)
    assert adapter.hf_shapes() == {name: tuple(t.shape) for name, t in checkpoint_tensors(reference).items()}
    for native, shape in adapter.native_shapes.items():
        pairs = adapter.convert_single_to_hf(native, torch.empty(shape, device="meta"))
        stacked = ".experts." in native
        assert len(pairs) == (shape[0] if stacked else 1)
        for row, (hf_name, _) in enumerate(pairs):
            assert adapter.hf_to_native(hf_name) == (NativeTarget(native, row if stacked else None),)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.q_proj.weights",
        "model.layers.99.self_attn.q_proj.weight",
        "model.layers.00.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate_proj.bias",
        "layers.0.self_attn.q_proj.weight",
        "score.weight",
    ],
)
def test_an_unknown_key_is_refused_by_name(key: str) -> None:
    _, state, adapter = hf_state(UNTIED)
    with pytest.raises(CheckpointError, match=f"unknown key '{key}'"):
        adapter.from_hf(state | {key: torch.zeros(1)})


def test_a_missing_key_is_named() -> None:
    _, state, adapter = hf_state(UNTIED)
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"keys missing: 'model.layers.1.mlp.up_proj.weight'"):
        adapter.from_hf(state)


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    config, state, adapter = hf_state(UNTIED)
    state["model.norm.weight"] = torch.ones(3)
    with pytest.raises(
        CheckpointError, match=rf"'model.norm.weight' has shape \(3,\), expected \({config.hidden_size},\)"
    ):
        adapter.from_hf(state)


def test_old_exports_rotary_buffers_are_skipped() -> None:
    _, state, adapter = hf_state(UNTIED)
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert adapter.hf_to_native(key) == ()
    assert adapter.from_hf(state | {key: torch.zeros(4)}).keys() == adapter.from_hf(state).keys()


def test_a_tied_checkpoint_may_repeat_its_embedding_only_bitwise() -> None:
    _, state, adapter = hf_state(TIED)
    assert adapter.hf_to_native("lm_head.weight") == (NativeTarget("tok_embeddings.weight", must_equal=True),)
    embedding = state["model.embed_tokens.weight"]
    assert "output.weight" not in adapter.from_hf(state | {"lm_head.weight": embedding.clone()})
    changed = embedding.clone()
    changed[0, 0] = torch.nextafter(changed[0, 0], torch.tensor(9.0))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        adapter.from_hf(state | {"lm_head.weight": changed})


def test_a_tied_model_exports_one_tensor_for_both() -> None:
    _, state, adapter = hf_state(TIED)
    model = Qwen3Model(adapter.args)
    exported = adapter.to_hf(model.state_dict())
    assert "output.weight" in model.state_dict()
    assert exported.keys() == state.keys()


def test_export_wants_every_parameter_and_nothing_else() -> None:
    _, state, adapter = hf_state(UNTIED)
    native = adapter.from_hf(state)
    with pytest.raises(CheckpointError, match=r"parameters missing from the export: 'norm.weight'"):
        adapter.to_hf({name: tensor for name, tensor in native.items() if name != "norm.weight"})
    with pytest.raises(CheckpointError, match=r"'extra.weight' is not part of this model"):
        adapter.to_hf(native | {"extra.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"'norm.weight' has shape \(2,\)"):
        adapter.to_hf(native | {"norm.weight": torch.zeros(2)})


@pytest.mark.parametrize("hf_class", [Qwen2ForSequenceClassification, Qwen3ForSequenceClassification])
def test_a_critic_has_the_keys_of_a_sequence_classifier_of_one_label(hf_class: Any) -> None:
    config = random_config(0, "qwen2" if "2" in hf_class.__name__ else "qwen3")
    config.num_labels = 1
    state = dict(hf_class(config).named_parameters())
    adapter = get_model_spec(config.model_type).state_dict_adapter_class(config, is_critic=True)
    native = adapter.from_hf(state)
    assert native["score.weight"].shape == (1, config.hidden_size)
    assert "output.weight" not in native
    back = adapter.to_hf(native)
    assert all(torch.equal(back[name], state[name]) for name in state)
    with pytest.raises(CheckpointError, match=r"unknown key 'lm_head.weight': this critic"):
        adapter.hf_to_native("lm_head.weight")


@pytest.mark.parametrize("seed", [TIED, UNTIED])
def test_a_critic_from_an_actor_skips_the_head_and_expects_no_score(seed: int) -> None:
    config, state, _ = hf_state(seed)
    with pytest.raises(CheckpointError, match=r"lm_head|score"):
        Qwen3StateDictAdapter(config, is_critic=True).from_hf(state)
    adapter = Qwen3StateDictAdapter(config, is_critic=True, init_score=True)
    native = adapter.from_hf(state)
    assert set(adapter.native_shapes) - set(native) == {"score.weight"}
    assert set(adapter.loadable_names()) == set(native)
    assert adapter.hf_to_native("lm_head.weight") == ()
    with pytest.raises(CheckpointError, match=r"unknown key 'score.weight'"):
        adapter.hf_to_native("score.weight")


def test_the_folder_is_named_in_errors() -> None:
    adapter = Qwen3StateDictAdapter(random_config(UNTIED, "qwen3"), "/checkpoints/mine")
    with pytest.raises(CheckpointError, match="unknown key 'x' in /checkpoints/mine"):
        adapter.hf_to_native("x")


MIXED = next(
    seed
    for seed in range(18)
    if not random_config(seed, "qwen3_moe").mlp_only_layers
    and random_config(seed, "qwen3_moe").decoder_sparse_step == 1
)
LAST = f"model.layers.{random_config(MIXED, 'qwen3_moe').num_hidden_layers - 1}.mlp"


def test_every_expert_is_accounted_for() -> None:
    config, state, adapter = hf_state(MIXED, "qwen3_moe")
    last = config.num_experts - 1
    key = f"{LAST}.experts.{last}.down_proj.weight"
    assert key in state
    with pytest.raises(CheckpointError, match=f"keys missing: '{key}'"):
        adapter.from_hf({name: tensor for name, tensor in state.items() if name != key})
    with pytest.raises(CheckpointError, match=f"'{key}' has shape"):
        adapter.from_hf(state | {key: state[key][1:]})
    for extra in (
        f"{LAST}.experts.{last + 1}.down_proj.weight",
        f"{LAST}.experts.0.down_proj.bias",
        f"{LAST}.gate.bias",
    ):
        with pytest.raises(CheckpointError, match=f"unknown key '{extra}'"):
            adapter.from_hf(state | {extra: torch.zeros(1)})
    native = adapter.from_hf(state)
    stack = f"layers.{config.num_hidden_layers - 1}.moe.experts.w2"
    with pytest.raises(CheckpointError, match=f"'{stack}' has shape"):
        adapter.to_hf(native | {stack: native[stack][1:]})


class StackedModel(BaseArchonModel):
    """A family whose blocks hold one parameter for several Hugging Face tensors."""

    args_class: ClassVar[type[BaseModelArgs]] = Qwen3ModelArgs

    def build_block(self, layer: int) -> nn.Module:
        block = nn.Module()
        block.experts = nn.Parameter(torch.empty(3, 5, 2))
        return block


class StackedAdapter(BaseStateDictAdapter):
    model_class = StackedModel
    from_hf_map: ClassVar = {
        "embed": "tok_embeddings.weight",
        "norm": "norm.weight",
        "head": "output.weight",
        "layers.{}.experts.{}.up": "layers.{}.experts",
    }


def test_a_stacked_parameter_is_one_tensor_here_and_one_for_each_expert_there() -> None:
    adapter = StackedAdapter(random_config(UNTIED, "qwen3"))
    shapes = adapter.hf_shapes()
    assert shapes["layers.1.experts.2.up"] == (5, 2)
    state = {name: torch.randn(shape) for name, shape in reversed(shapes.items())}
    native = adapter.from_hf(state)
    assert torch.equal(native["layers.1.experts"][2], state["layers.1.experts.2.up"])
    assert adapter.hf_to_native("layers.0.experts.2.up") == (NativeTarget("layers.0.experts", 2),)
    back = adapter.to_hf(native)
    assert all(torch.equal(back[name], state[name]) for name in state)
    with pytest.raises(CheckpointError, match=r"unknown key 'layers.0.experts.3.up'"):
        adapter.hf_to_native("layers.0.experts.3.up")
