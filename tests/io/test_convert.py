"""Weights between Hugging Face, `dcp` and megatron-core: bitwise both ways, every key accounted for."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archon.checkpoint import model_fingerprint, save_state
from archon.convert import FileTensor, convert, find_format
from archon.engine import ArchonEngine
from archon.megatron_io import MANIFEST_FILE, RANK_FILE
from archon.megatron_layout import MegatronLayout
from archon.models.qwen3_moe.args import Qwen3MoEModelArgs
from archon.models.qwen3_moe.state_dict_adapter import Qwen3MoEStateDictAdapter
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, ConfigError, LayoutError, UserError
from tests.io.tiny_checkpoints import MOE, QWEN2, assert_bitwise, config_with, make_checkpoint

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 36}
EXPERTS: dict[str, Any] = MOE | {"num_experts": 4, "moe_intermediate_size": 8}
FAMILIES = {"qwen2": SIZES | QWEN2, "qwen3": SIZES, "moe": SIZES | EXPERTS}
LAYOUTS = [
    MegatronLayout(),
    MegatronLayout(tp=2),
    MegatronLayout(tp=4, pp=2),
    MegatronLayout(pp=2, spec="te", experts="grouped"),
    MegatronLayout(tp=2, pp=2, ep=2, experts="grouped"),
    MegatronLayout(ep=4),
]


def read_back(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def to_megatron(tmp_path: Path, layout: MegatronLayout | None = None, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    """The ranks' folder of a small checkpoint, without the manifest that would notice every change, and its weights."""
    folder, weights = make_checkpoint(tmp_path / "hf", **changes)
    convert(folder, tmp_path / "ranks", "megatron", layout=layout)
    (tmp_path / "ranks" / MANIFEST_FILE).unlink()
    return tmp_path / "ranks", weights


def edit(file: Path, change: Any) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_through_megatron_and_back_is_bitwise(
    tmp_path: Path, family: str, layout: MegatronLayout, tied: bool, dtype: torch.dtype
) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", dtype=dtype, tie_word_embeddings=tied, **FAMILIES[family])
    if layout.ep > 1 and family != "moe":
        with pytest.raises(LayoutError, match="the model has no experts"):
            convert(folder, tmp_path / "ranks", "megatron", layout=layout)
        return

    convert(folder, tmp_path / "ranks", "megatron", layout=layout)
    convert(tmp_path / "ranks", tmp_path / "back", "hf")

    assert len([*(tmp_path / "ranks").glob("mp_rank_*")]) == layout.tp * layout.pp * layout.ep
    assert_bitwise(read_back(tmp_path / "back"), weights)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_through_dcp_and_megatron_and_back_is_bitwise(tmp_path: Path, family: str, tied: bool) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", shards=3, tie_word_embeddings=tied, **FAMILIES[family])

    convert(folder, tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "out", "hf", like=folder)
    convert(tmp_path / "dcp", tmp_path / "ranks", "megatron", like=folder, layout=MegatronLayout(tp=2, pp=2))
    convert(tmp_path / "ranks", tmp_path / "others", "megatron", layout=MegatronLayout(tp=4, spec="te"))
    convert(tmp_path / "others", tmp_path / "again", "dcp")
    convert(tmp_path / "again", tmp_path / "back", "hf", like=folder)

    assert [find_format(tmp_path / name) for name in ("hf", "dcp", "ranks")] == ["hf", "dcp", "megatron"]
    assert_bitwise(read_back(tmp_path / "out"), weights)
    assert_bitwise(read_back(tmp_path / "back"), weights)


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

    with pytest.raises(CheckpointError, match=r"mp_rank_01/.*'output_layer.weight' has values in the padding"):
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
        (MegatronLayout(tp=3), {}, "tp 3 neither divides the 2 key-value heads nor is a multiple of their number"),
        (MegatronLayout(pp=3), {}, "pp 3 does not divide the 2 layers"),
        (MegatronLayout(ep=3), EXPERTS, "ep 3 does not divide the 4 experts"),
        (MegatronLayout(tp=2), {"intermediate_size": 37}, "tp 2 does not divide the 37 features of a feed-forward"),
        (MegatronLayout(tp=2), EXPERTS | {"moe_intermediate_size": 7}, "tp 2 does not divide the 7 features of an exp"),
        (MegatronLayout(tp=16), {}, "tp 16 does not divide the 4 attention heads"),
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
        ({"attention_bias": True}, r"'model.layers.0.self_attn.o_proj.bias' and 1 more has no place"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "RoPE is 'linear'"),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, "a sliding window is True"),
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


def test_a_critic_goes_to_dcp_and_back_but_not_to_megatron(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **SIZES)
    edit(
        folder / "model.safetensors", lambda t: (t.pop("lm_head.weight"), t.update({"score.weight": torch.ones(1, 24)}))
    )
    weights = load_file(folder / "model.safetensors")

    convert(folder, tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "hf", like=folder)

    assert_bitwise(read_back(tmp_path / "back"), weights)
    with pytest.raises(CheckpointError, match=r"'score.weight' has no place in megatron-core"):
        convert(folder, tmp_path / "ranks", "megatron")


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    ranks, _ = to_megatron(tmp_path, MegatronLayout(tp=2, pp=2), **SIZES)
    (ranks / "mp_rank_01_000").rename(tmp_path / "aside")
    with pytest.raises(CheckpointError, match="mp_rank_01_000 is missing among the ranks of tp 2, pp 2, ep 1"):
        convert(ranks, tmp_path / "back", "hf")
    (tmp_path / "aside").rename(ranks / "mp_rank_01")
    with pytest.raises(CheckpointError, match="its folders are of several layouts"):
        convert(ranks, tmp_path / "back", "hf")


def test_pickles_are_refused(tmp_path: Path) -> None:
    ranks, _ = to_megatron(tmp_path, **SIZES)
    (ranks / "mp_rank_00" / RANK_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"it holds no {RANK_FILE}"):
        convert(ranks, tmp_path / "back", "hf")
    torch.save({}, ranks / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=r"model_optim_rng.pt: it is pickled"):
        convert(ranks, tmp_path / "back", "hf")


def test_the_manifest_vouches_for_every_byte(tmp_path: Path) -> None:
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


def test_tensors_to_be_fused_must_have_one_dtype(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **FAMILIES["moe"])
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    edit(folder / "model.safetensors", lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    with pytest.raises(CheckpointError, match=rf"linear_fc1.weight' is one tensor .* '{name}' is torch.bfloat16"):
        convert(folder, tmp_path / "ranks", "megatron")
    with pytest.raises(CheckpointError, match=rf"'{name}' torch.bfloat16, but both are one tensor"):
        convert(folder, tmp_path / "dcp", "dcp")


def engine(path: Path, **changes: Any) -> ArchonEngine:
    made = ArchonEngine(EngineConfig(path=str(path), dtype="float32", max_tokens_per_mb=64, **changes))
    made.initialize(total_steps=1)
    return made


def test_a_dcp_of_the_engine_is_read_and_one_that_was_made_is_loaded(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **FAMILIES["moe"])
    engine(folder).save(tmp_path / "saved", format="dcp")
    other, _ = make_checkpoint(tmp_path / "other", seed=1, **FAMILIES["moe"])

    convert(tmp_path / "saved", tmp_path / "out", "hf", like=folder)
    convert(folder, tmp_path / "made", "dcp")
    loaded = engine(other)
    loaded.load(tmp_path / "made")
    loaded.save(tmp_path / "back", format="hf")

    assert_bitwise(read_back(tmp_path / "out"), weights)
    assert_bitwise(read_back(tmp_path / "back"), weights)


def test_a_dcp_of_another_model(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    other, _ = make_checkpoint(tmp_path / "other", **SIZES | {"intermediate_size": 40})
    convert(folder, tmp_path / "dcp", "dcp")
    with pytest.raises(CheckpointError, match="it was written by another model: hidden_dim is 36 there and 40 here"):
        convert(tmp_path / "dcp", tmp_path / "out", "hf", like=other)
    with pytest.raises(ConfigError, match=r"it holds no config.json; name the Hugging Face checkpoint"):
        convert(tmp_path / "dcp", tmp_path / "out", "hf")


def test_balancing_biases_are_not_dropped(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **FAMILIES["moe"])
    args = Qwen3MoEModelArgs.from_hf_config(config_with(**FAMILIES["moe"]), balance_by_bias=True)
    adapter = Qwen3MoEStateDictAdapter(config_with(**FAMILIES["moe"]))
    model = adapter.from_hf(weights) | {"layers.1.moe.router.expert_bias": torch.zeros(4)}
    save_state(tmp_path / "even", 3, {"engine": {"model": model}}, fingerprint=model_fingerprint(args))
    model["layers.1.moe.router.expert_bias"][2] = 0.1
    save_state(tmp_path / "moved", 3, {"engine": {"model": model}}, fingerprint=model_fingerprint(args))

    convert(tmp_path / "even", tmp_path / "out", "hf", like=folder)

    assert_bitwise(read_back(tmp_path / "out"), weights)
    with pytest.raises(CheckpointError, match="1 balancing biases are not 0"):
        convert(tmp_path / "moved", tmp_path / "lost", "hf", like=folder)


@pytest.mark.parametrize("to", ["hf", "dcp", "megatron"])
def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    read = FileTensor.read

    def failing(tensor: FileTensor, box: Any = None) -> Tensor:
        if tensor.entry.name == "model.norm.weight":
            raise OSError(28, "No space left on device")
        return read(tensor, box)

    monkeypatch.setattr(FileTensor, "read", failing)
    with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device"):
        convert(folder, tmp_path / "out", to)
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("to", ["hf", "dcp", "megatron"])
def test_nothing_is_replaced(tmp_path: Path, to: Any) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    with pytest.raises(CheckpointError, match="hf: it exists; name a new folder"):
        convert(folder, folder, to)
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty", to)
    assert [*(tmp_path / "empty").iterdir()]


@pytest.mark.parametrize("to", ["dcp", "megatron"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **FAMILIES["moe"] | {"num_hidden_layers": 6})
    read, alive, most = FileTensor.read, [0], [0]

    def counted(tensor: FileTensor, box: Any = None) -> Tensor:
        part = read(tensor, box)
        alive[0] += part.nbytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(part, lambda size: alive.__setitem__(0, alive[0] - size), part.nbytes)
        return part

    monkeypatch.setattr(FileTensor, "read", counted)
    convert(folder, tmp_path / "out", to)

    largest = max(tensor.nbytes for tensor in weights.values())
    assert 0 < most[0] <= 3 * largest < sum(tensor.nbytes for tensor in weights.values()) / 3
