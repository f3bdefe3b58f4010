"""What ranks of megatron-core hold of a checkpoint, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from archon.checkpoint.convert import convert
from archon.checkpoint.formats.megatron.rank_files import MANIFEST_FILE, RANK_FILE
from archon.checkpoint.formats.megatron.sharding import MegatronLayout
from archon.checkpoint.hf_reader import HFCheckpoint
from archon.schema.errors import CheckpointError, LayoutError, UserError
from tests.checkpoint.conversions import EXPERTS, FAMILIES, SIZES, edit, read_back, to_megatron
from tests.checkpoint.tiny_checkpoints import QWEN2, assert_bitwise, make_checkpoint


@pytest.mark.parametrize(("heads", "groups", "tp"), [(4, 4, 2), (4, 2, 2), (6, 3, 3), (4, 1, 1), (8, 2, 4), (4, 1, 4)])
def test_qkv_is_fused_group_by_group(tmp_path: Path, heads: int, groups: int, tp: int) -> None:
    changes = QWEN2 | {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 48}
    ranks, hf = to_megatron(tmp_path, MegatronLayout(tp), **changes | {"intermediate_size": 36})
    width, names = 48 // heads, [f"mp_rank_{rank:02d}" for rank in range(tp)]

    for kind in ("weight", "bias"):
        q, k, v = (hf[f"model.layers.1.self_attn.{p}_proj.{kind}"] for p in "qkv")
        rows = []
        for group in range(groups):
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                rows += [q[head * width + i] for i in range(width)]
            rows += [k[group * width + i] for i in range(width)] + [v[group * width + i] for i in range(width)]
        name = f"decoder.layers.1.self_attention.linear_qkv.{kind}"
        assert torch.equal(torch.cat([load_file(ranks / r / RANK_FILE)[name] for r in names]), torch.stack(rows))


def test_the_other_forms(tmp_path: Path) -> None:
    ranks, hf = to_megatron(tmp_path, MegatronLayout(tp=2, ep=2), **FAMILIES["moe"])

    own = load_file(ranks / "mp_rank_01_001" / RANK_FILE)
    dense, experts = "model.layers.0.mlp.", "model.layers.1.mlp.experts.3."
    gate, up, down = (hf[f"{dense}{name}_proj.weight"] for name in ("gate", "up", "down"))
    assert torch.equal(own["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate[18:], up[18:]]))
    assert torch.equal(own["decoder.layers.0.mlp.linear_fc2.weight"], down[:, 18:])
    gate, up, down = (hf[f"{experts}{name}_proj.weight"] for name in ("gate", "up", "down"))
    local = "decoder.layers.1.mlp.experts.local_experts.1."
    assert torch.equal(own[f"{local}linear_fc1.weight"], torch.cat([gate[4:], up[4:]]))
    assert torch.equal(own[f"{local}linear_fc2.weight"], down[:, 4:])
    assert torch.equal(own["decoder.layers.1.mlp.router.weight"], hf["model.layers.1.mlp.gate.weight"])
    first = load_file(ranks / "mp_rank_00_000" / RANK_FILE)["embedding.word_embeddings.weight"]
    assert first.shape == (128, 24) and own["embedding.word_embeddings.weight"].shape == (128, 24)
    assert torch.equal(first[:61], hf["model.embed_tokens.weight"]) and not first[61:].any()


def test_the_spellings_of_transformer_engine(tmp_path: Path) -> None:
    ranks, hf = to_megatron(tmp_path, MegatronLayout(spec="te", experts="grouped"), **FAMILIES["moe"])

    own = load_file(ranks / "mp_rank_00" / RANK_FILE)
    norms = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "model.layers.0.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "model.layers.0.post_attention_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight": "model.layers.1.post_attention_layernorm.weight",
        "decoder.layers.1.mlp.experts.linear_fc2.weight3": "model.layers.1.mlp.experts.3.down_proj.weight",
    }
    for name, key in norms.items():
        assert torch.equal(own[name], hf[key]), name


DAMAGES = {
    "missing": (lambda t: t.pop("decoder.final_layernorm.weight"), "'decoder.final_layernorm.weight' is missing"),
    "no embedding": (lambda t: t.pop("embedding.word_embeddings.weight"), "'embedding.word_embeddings.weight' is miss"),
    "extra": (lambda t: t.update(spare=torch.ones(2)), "unknown key 'spare'"),
    "a bias": (
        lambda t: t.update({"decoder.layers.0.self_attention.linear_proj.bias": torch.ones(24)}),
        "unknown key 'decoder.layers.0.self_attention.linear_proj.bias'",
    ),
    "misshapen": (
        lambda t: t.update({"decoder.layers.1.mlp.linear_fc2.weight": torch.ones(24, 35)}),
        r"'decoder.layers.1.mlp.linear_fc2.weight' has shape \[24, 35\], expected \[24, 36\]",
    ),
    "of integers": (
        lambda t: t.update({"decoder.layers.1.mlp.linear_fc2.weight": torch.ones(24, 36, dtype=torch.int64)}),
        "'decoder.layers.1.mlp.linear_fc2.weight' is torch.int64",
    ),
    "a small vocabulary": (
        lambda t: t.update({"embedding.word_embeddings.weight": torch.ones(60, 24)}),
        "'embedding.word_embeddings.weight' has 60 rows over all ranks, fewer than the vocabulary of 61",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_with_a_key_is_named(tmp_path: Path, damage: str) -> None:
    change, said = DAMAGES[damage]
    ranks, _ = to_megatron(tmp_path, **SIZES)
    edit(ranks / "mp_rank_00" / RANK_FILE, change)

    with pytest.raises(CheckpointError, match=said) as error:
        convert(ranks, tmp_path / "back", "hf")

    assert str(ranks / "mp_rank_00" / RANK_FILE) in str(error.value)
    assert not [*tmp_path.glob("*back*"), *tmp_path.glob(".*")]


def test_extra_state_of_transformer_engine_is_no_weight(tmp_path: Path) -> None:
    ranks, weights = to_megatron(tmp_path, MegatronLayout(spec="te"), **SIZES)
    state = {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(3, dtype=torch.uint8)}
    edit(ranks / "mp_rank_00" / RANK_FILE, lambda tensors: tensors.update(state))

    convert(ranks, tmp_path / "back", "hf")

    assert_bitwise(read_back(tmp_path / "back"), weights)


@pytest.mark.parametrize(
    ("layout", "rank", "name"),
    [
        (MegatronLayout(tp=2), "mp_rank_01", "decoder.final_layernorm.weight"),
        (MegatronLayout(ep=2), "mp_rank_00_001", "decoder.layers.1.mlp.router.weight"),
        (MegatronLayout(pp=2), "mp_rank_00_001", "output_layer.weight"),
    ],
    ids=["tensor", "expert", "tied"],
)
def test_copies_that_differ_are_an_error(tmp_path: Path, layout: MegatronLayout, rank: str, name: str) -> None:
    ranks, _ = to_megatron(tmp_path, layout, tie_word_embeddings=True, **FAMILIES["moe"])
    edit(ranks / rank / RANK_FILE, lambda tensors: tensors[name].view(-1)[:1].add_(1))

    with pytest.raises(CheckpointError, match=f"{rank}/{RANK_FILE}: key '{name}' differs from"):
        convert(ranks, tmp_path / "back", "hf")


def test_padding_is_cut_only_where_nothing_is_lost(tmp_path: Path) -> None:
    ranks, weights = to_megatron(tmp_path, MegatronLayout(tp=2), **SIZES)
    edit(ranks / "mp_rank_01" / RANK_FILE, lambda tensors: tensors["output_layer.weight"][-1].fill_(0.5))

    with pytest.raises(CheckpointError, match=r"mp_rank_01/.*'output_layer.weight' has nonzero values in the padding"):
        convert(ranks, tmp_path / "back", "hf")
    convert(ranks, tmp_path / "back", "hf", drop_padding=True)

    assert_bitwise(read_back(tmp_path / "back"), weights)


@pytest.mark.parametrize(("multiple", "tp", "rows"), [(1, 1, 61), (1, 2, 62), (128, 2, 256), (7, 4, 84)])
def test_the_vocabulary_is_padded_to_a_multiple(tmp_path: Path, multiple: int, tp: int, rows: int) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **SIZES)
    convert(folder, tmp_path / "ranks", "megatron", layout=MegatronLayout(tp), vocab_multiple=multiple)
    convert(tmp_path / "ranks", tmp_path / "back", "hf")

    manifest = json.loads((tmp_path / "ranks" / MANIFEST_FILE).read_text())
    assert manifest["gpt_model"]["vocab_size"] == manifest["layout"]["vocab_rows"] == rows
    assert_bitwise(read_back(tmp_path / "back"), weights)


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        (MegatronLayout(tp=3), {}, "tp is 3; expected a divisor or a multiple of the number of key-value heads, 2"),
        (MegatronLayout(pp=3), {}, "pp is 3; expected a divisor of the 2 layers"),
        (MegatronLayout(ep=3), EXPERTS, "ep is 3; expected a divisor of the 4 experts"),
        (
            MegatronLayout(tp=2),
            {"intermediate_size": 37},
            "tp is 2; expected a divisor of the 37 features of a feed-forward",
        ),
        (
            MegatronLayout(tp=2),
            EXPERTS | {"moe_intermediate_size": 7},
            "tp is 2; expected a divisor of the 7 features of an exp",
        ),
        (MegatronLayout(tp=16), {}, "tp is 16; expected a divisor of the 4 attention heads"),
    ],
)
def test_a_layout_that_does_not_divide_the_model(
    tmp_path: Path, layout: MegatronLayout, changes: dict[str, Any], said: str
) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES | changes)
    with pytest.raises(LayoutError, match=said):
        convert(folder, tmp_path / "ranks", "megatron", layout=layout)
    assert not (tmp_path / "ranks").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, r"'model.layers.0.self_attn.o_proj.bias' and 1 more has no counterpart"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "RoPE is 'linear'"),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, "window is 4; expected None"),
    ],
)
def test_a_model_that_gpt_model_would_compute_otherwise(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES | changes)
    with pytest.raises(UserError, match=said):
        convert(folder, tmp_path / "ranks", "megatron")
    assert [*tmp_path.iterdir()] == [folder]


def test_a_degree_below_one() -> None:
    with pytest.raises(LayoutError, match="pp is 0; expected at least 1"):
        MegatronLayout(pp=0)


def test_ranks_next_to_a_config_name_the_conversion(tmp_path: Path) -> None:
    ranks, _ = to_megatron(tmp_path, **SIZES)
    assert (ranks / "config.json").is_file()
    with pytest.raises(CheckpointError, match="it holds Megatron ranks; archon convert"):
        HFCheckpoint(ranks)


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    ranks, _ = to_megatron(tmp_path, MegatronLayout(tp=2, pp=2), **SIZES)
    (ranks / "mp_rank_01_000").rename(tmp_path / "aside")
    with pytest.raises(CheckpointError, match="mp_rank_01_000 is missing among the ranks of tp 2, pp 2, ep 1"):
        convert(ranks, tmp_path / "back", "hf")
    (tmp_path / "aside").rename(ranks / "mp_rank_01")
    with pytest.raises(CheckpointError, match="its folders belong to several layouts"):
        convert(ranks, tmp_path / "back", "hf")


def test_pickles_are_refused(tmp_path: Path) -> None:
    ranks, _ = to_megatron(tmp_path, **SIZES)
    (ranks / "mp_rank_00" / RANK_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"it holds no {RANK_FILE}"):
        convert(ranks, tmp_path / "back", "hf")
    torch.save({}, ranks / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=r"model_optim_rng.pt: it is pickled"):
        convert(ranks, tmp_path / "back", "hf")


def test_every_byte_is_checked_against_the_manifest(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    convert(folder, tmp_path / "ranks", "megatron")
    file = tmp_path / "ranks" / "mp_rank_00" / RANK_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{RANK_FILE}: it was altered"):
        convert(tmp_path / "ranks", tmp_path / "back", "hf")
    (tmp_path / "ranks" / MANIFEST_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{MANIFEST_FILE}: it is damaged"):
        convert(tmp_path / "ranks", tmp_path / "back", "hf")
