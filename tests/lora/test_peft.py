"""Adapters as PEFT's: the real `peft` loads what archon writes, archon loads what it writes, both compute the same."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from archon.checkpoint.hf_reader import read_hf_config
from archon.checkpoint.peft.config import config_fields, read_config
from archon.checkpoint.peft.export import export_lora
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.lora.layers import LoRALayer
from archon.models.lora.model import initializers
from archon.models.lora.targets import LoRASize
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, ConfigError
from tests.engine.tiny import sft_batch
from tests.lora.oracle import TOKENS, TOLERANCE, base_of, difference, engine_of, logits_of, their_logits, theirs

FAMILIES = ("llama", "qwen2", "qwen3", "olmo3", "granite", "smollm3", "gemma3_text", "arcee", "starcoder2", "cohere2")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_peft_computes_with_archons_adapter_what_archon_does(model_type: str, tmp_path: Path) -> None:
    base = base_of(model_type, tmp_path / "base")
    lora = {
        "rank": 4,
        "alpha": 6,
        "init": "random",
        "rslora": model_type == "qwen3",
        "rank_pattern": {"q_proj": 8, "layers.0.mlp.down_proj": 2},
        "alpha_pattern": {"o_proj": 3},
    }
    engine = engine_of(base, lora=lora, optimizer={"lr": 1e-3})
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    engine.save(tmp_path / "adapter", "peft")
    ours = logits_of(engine)
    assert difference(their_logits(theirs(base)), ours) > 0.05
    assert difference(their_logits(theirs(base, tmp_path / "adapter")), ours) <= TOLERANCE
    engine.save(tmp_path / "merged")
    assert difference(their_logits(theirs(tmp_path / "merged")), ours) <= TOLERANCE
    again = engine_of(base, lora={"path": str(tmp_path / "adapter")})
    assert torch.equal(logits_of(again), ours)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_archon_computes_with_pefts_adapter_what_peft_does(model_type: str, tmp_path: Path) -> None:
    base = base_of(model_type, tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=7,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"v_proj": 3},
        alpha_pattern={"down_proj": 2},
        use_rslora=model_type == "llama",
        init_lora_weights=False,
        lora_dropout=0.1,
    )
    model = peft.get_peft_model(theirs(base), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    engine = engine_of(base, lora={"path": str(tmp_path / "adapter")})
    assert {size.rank for size in engine.lora.values()} == {3, 4}
    assert difference(logits_of(engine), their_logits(model)) <= TOLERANCE


def test_dropout_of_a_loaded_lora_is_kept(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = adapter
    shutil.copytree(folder, tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"lora_dropout": 0.05}))
    engine = engine_of(base, lora={"path": str(tmp_path / "lora")}, optimizer={})
    engine.save(tmp_path / "out", format="peft")
    export_lora(tmp_path / "lora", tmp_path / "again", base)
    for name in ("out", "again"):
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["lora_dropout"] == 0.05


def test_ranks_and_scales_of_patterns_are_pefts(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    fields: dict[str, Any] = {
        "rank_pattern": {"q_proj": 8, r"layers\.[1-9]\.mlp\.down_proj": 2, "proj": 3},
        "alpha_pattern": {"o_proj": 3.0, "layers.0.mlp.up_proj": 9.0, "up_proj": 1.0},
    }
    engine = engine_of(base, lora={"rank": 4, "alpha": 6, **fields})
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", **fields)
    layers = peft.get_peft_model(theirs(base), config).base_model.model.named_modules()
    expected = {name: (x.r["default"], x.scaling["default"]) for name, x in layers if hasattr(x, "lora_A")}
    found = {engine.adapter.hf_names(name)[0].removesuffix(".weight"): size for name, size in engine.lora.items()}
    assert {name: (size.rank, size.scale) for name, size in found.items()} == expected
    assert len({*expected.values()}) > 4


def test_gradients_and_a_step_are_pefts(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    # In float64: Adam turns the rounding of a small gradient into a part of its learning rate.
    options = {"dtype": "float64", "optimizer": {"lr": 1e-2, "weight_decay": 0.1}}
    engine = engine_of(base, lora={"rank": 4, "init": "random"}, **options)
    engine.save(tmp_path / "adapter", "peft")
    model = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "adapter", is_trainable=True).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    batch = {"input_ids": TOKENS[None], "attention_mask": torch.ones(1, len(TOKENS), dtype=torch.bool)}
    batch["loss_mask"] = batch["attention_mask"].long()
    for _ in range(2):
        metrics = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
        loss = model(TOKENS[None], labels=TOKENS[None]).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    engine.save(tmp_path / "trained", "peft")
    written = load_file(tmp_path / "trained" / "adapter_model.safetensors")
    expected = {name.replace(".default.", "."): p.detach() for name, p in trained.items()}
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(written[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["zero", "gaussian", "random"])
@pytest.mark.parametrize("experts", [None, 3])
def test_first_values_are_pefts(kind: Literal["zero", "gaussian", "random"], experts: int | None) -> None:
    """A is drawn as PEFT draws it, of one matrix or of each expert's; B too starts at 0, unless it is random."""
    in_features, out_features, rank = 600, 40, 25
    modules = nn.ModuleDict({"own": LoRALayer(in_features, out_features, rank, 1.0, experts)})
    parameters = dict(modules.named_parameters())
    with torch.no_grad():
        for name, fill in initializers(modules, kind):
            fill(parameters.pop(name))
    assert not parameters
    config = peft.LoraConfig(r=rank, target_modules=["0"], init_lora_weights="gaussian" if kind == "gaussian" else True)
    layer = peft.get_peft_model(nn.Sequential(nn.Linear(in_features, out_features)), config).base_model.model[0]
    a, expected = modules["own"].a.detach(), layer.lora_A["default"].weight.detach()
    # The standard deviation of 15,000 draws is within 3 % of its limit; another dimension would be 20 % off or more.
    assert a.std().item() == pytest.approx(expected.std().item(), rel=0.05)
    if kind == "gaussian":
        assert a.std().item() == pytest.approx(1 / rank, rel=0.03)
        assert a.abs().max() > 3 / rank
    else:
        assert 0.99 / math.sqrt(in_features) < a.abs().max() <= 1 / math.sqrt(in_features)
    b = modules["own"].b.detach()
    if kind == "random":
        assert 0.95 / math.sqrt(rank) < b.abs().max() <= 1 / math.sqrt(rank)
    else:
        assert not b.any() and not layer.lora_B["default"].weight.any()


def test_a_config_without_rank_and_alpha_has_pefts_defaults(tmp_path: Path) -> None:
    notes = {"unsloth_version": "2025.3", "auto_mapping": {"unsloth_fixed": True}}  # of unsloth, without effect
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **notes}))
    found, default = read_config(tmp_path / "adapter_config.json"), peft.LoraConfig()
    assert (found.rank, found.alpha, found.rslora) == (default.r, default.lora_alpha, default.use_rslora)
    assert found.modules is default.target_modules and found.layers is default.layers_to_transform


def test_patterns_hold_every_rank_and_alpha_that_is_not_the_commonest() -> None:
    sizes = {"a": (4, 6.0), "b": (4, 6.0), "c": (4, 4.0), "d": (6, 6.0), "e": (6, 4.0)}
    fields = config_fields({name: LoRASize(*size, False) for name, size in sizes.items()}, [*sizes], [], "base", 0.0)
    for name, (rank, alpha) in sizes.items():
        assert fields["rank_pattern"].get(name, fields["r"]) == rank
        assert fields["alpha_pattern"].get(name, fields["lora_alpha"]) == alpha


def test_a_rank_between_the_sides_of_a_matrix_is_allowed(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    shapes = engine_of(base).adapter.native_shapes
    low, high = sorted(shapes["layers.0.feed_forward.w2.weight"])
    assert low < high
    for rank, allowed in ((low + 1, True), (high, True), (high + 1, False)):
        lora = {"rank": rank, "alpha": 1.0, "targets": ["layers.0.mlp.down_proj"]}
        if allowed:
            assert engine_of(base, lora=lora).lora["layers.0.feed_forward.w2.weight"].rank == rank
        else:
            with pytest.raises(ConfigError, match=f"has rank {rank}, more than its matrix has rows and columns"):
                engine_of(base, lora=lora)


def test_an_export_keeps_other_files_and_refuses_values_that_are_not_finite(tmp_path: Path) -> None:
    engine = engine_of(base_of("llama", tmp_path / "base"), lora={"rank": 2, "init": "random"})
    engine.save(tmp_path / "adapter", "peft")
    (tmp_path / "adapter" / "README.md").write_text("the card of a run")
    engine.save(tmp_path / "adapter", "peft")  # replaces its own files
    assert not (tmp_path / "adapter" / "README.md").exists()
    (tmp_path / "adapter" / "notes.txt").write_text("keep me")
    with pytest.raises(
        CheckpointError, match=r"it holds 'notes.txt', which is not part of a LoRA export and would be lo"
    ):
        engine.save(tmp_path / "adapter", "peft")
    assert (tmp_path / "adapter" / "notes.txt").read_text() == "keep me"
    parameter = next(p for name, p in engine.full_model.named_parameters() if name.endswith("wq.lora.b"))
    for value in (float("nan"), float("inf")):
        parameter.data[0, 0] = value
        with pytest.raises(CheckpointError, match=r"q_proj.lora_B.weight' has values that are not finite"):
            engine.save(tmp_path / "broken", "peft")
    assert not (tmp_path / "broken").exists()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter of it."""
    folder = tmp_path_factory.mktemp("adapter")
    base = base_of("llama", folder / "base")
    engine_of(base, lora={"rank": 2}).save(folder / "adapter", "peft")
    return base, folder / "adapter"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"use_dora": True}, "key .*lora_magnitude_vector' is missing, and use_dora of adapter_config.json is true"),
        ({"use_dora": "true"}, "use_dora is 'true'; expected true or false"),
        ({"bias": "all"}, "bias is 'all', which archon does not support"),
        ({"modules_to_save": ["lm_head"]}, r"lm_head.weight' is missing, and modules_to_save of .* names its module"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which archon does not support"),
        ({"lora_bias": True}, "lora_bias is True, which archon does not support"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\], which archon does not support"),
        ({"layer_replication": [[0, 2]]}, r"layer_replication is \[\[0, 2\]\], which archon does not support"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\], which archon does not support"),
        ({"lora_dropout": 1.5}, "lora_dropout is 1.5; expected a probability below 1"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected 'LORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changed the base's weights"),
        ({"a_field_of_tomorrow": 3}, "a_field_of_tomorrow is 3, which archon does not support"),
        ({"r": 4}, "has rank 2, but adapter_config.json says 4"),
        ({"r": "2"}, "r is '2'; expected a positive whole number"),
        ({"r": 2.5}, "r is 2.5; expected a positive whole number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; expected a positive number"),
        ({"lora_alpha": -1}, "lora_alpha is -1; expected a positive number"),
        ({"rank_pattern": {"q_proj": 5}}, "has rank 2, but adapter_config.json says 5"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern has '\(', which is no regular expression of names: missing \)"),
        ({"use_rslora": "false"}, "use_rslora is 'false'; expected true or false"),
        ({"r": 2**40}, "r is 1099511627776; expected a positive whole number below 2147483648"),
        ({"lora_alpha": 1e308}, "lora_alpha is 1e\\+308; expected a positive number below 2147483648"),
        ({"rank_pattern": {"q_proj": 0}}, r"config.json: rank_pattern\['q_proj'\] is 0; expected a positive whole"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\]; expected positive numbers by module names"),
    ],
)
def test_a_config_that_cannot_be_honored_is_refused(
    adapter: tuple[Path, Path], tmp_path: Path, fields: dict[str, Any], complaint: str
) -> None:
    base, folder = adapter
    config = json.loads((folder / "adapter_config.json").read_text()) | fields
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=complaint):
        engine_of(base, lora={"path": str(tmp_path)})


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda x: x.pop(KEY), f"key {KEY!r} is missing"),
        (
            lambda x: x.update({"odd": x[KEY].clone()}),
            "key 'odd' is no LoRA of this model's linear layers; of another model",
        ),
        (
            lambda x: x.update({KEY: x[KEY][:, 1:].clone()}),
            r"has shapes \(2, 59\) and \(60, 2\), expected \(2, 60\) and \(60, 2\); of another model",
        ),
        (lambda x: x.update({KEY: x[KEY] * float("nan")}), "has values that are not finite"),
        (lambda x: x.update({KEY: x[KEY].double().fill_(1e300)}), "has values that are not finite"),
        (
            lambda x: x.update({KEY: x[KEY].fill_(float("nan")).to(torch.float8_e4m3fn)}),
            "has values that are not finite",
        ),
        (lambda x: x.update({KEY: x[KEY].long()}), "expected a matrix of floating-point numbers"),
        (
            lambda x: [x.update({key.replace("layers.0", "layers.99"): x.pop(key)}) for key in [*x] if ".0." in key],
            r"layers\.99\..* is no LoRA of this model's linear layers; of another model",
        ),
        (lambda x: x.clear(), "it holds no tensors"),
    ],
)
def test_tensors_of_another_adapter_are_refused(
    adapter: tuple[Path, Path], tmp_path: Path, change: Any, complaint: str
) -> None:
    base, folder = adapter
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    with pytest.raises(CheckpointError, match=complaint):
        engine_of(base, lora={"path": str(tmp_path)})


def test_a_pickle_is_never_read(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = adapter
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin is a pickle, which is never read"):
        engine_of(base, lora={"path": str(tmp_path)})


@pytest.mark.parametrize(
    ("lora", "complaint"),
    [
        ({"targets": ["q_proj", "query"]}, r"lora\.targets has 'query', which is none of this model's linear layers"),
        ({"targets": []}, r"targets is \[\], which selects no module"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern has '\(', which is no regular expression of names: missing \)"),
        ({"rank_pattern": {"q_proj": 0}}, "got 0, input should be greater than or equal to 1"),
        ({"alpha_pattern": {"q_proj": 0}}, "got 0, input should be greater than 0"),
        ({"rank": 10**9}, "has rank 1000000000, more than its matrix has rows and columns"),
    ],
)
def test_senseless_adapters_are_refused(adapter: tuple[Path, Path], lora: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        engine_of(adapter[0], lora=lora)


def test_a_model_without_adapters_has_none_to_export(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format='peft' writes LoRAs, and this model has none"):
        engine_of(adapter[0]).save(tmp_path / "adapter", "peft")


def test_an_adapters_folder_where_a_checkpoint_is_expected_is_named(adapter: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match="it holds a LoRA, which needs its base"):
        read_hf_config(adapter[1])


def test_a_path_and_a_fresh_adapter_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="rank configures a fresh LoRA, and path = 'x' loads one"):
        EngineConfig.parse({"path": "base", "lora": {"path": "x", "rank": 3}})
