"""Training of adapters: the base stays as it is, checkpoints hold adapters alone, and a resumed run is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.checkpoint.hf_io import checkpoint_digest, load_model
from archon.checkpoint.native import find_checkpoint, open_state, save_state
from archon.checkpoint.safetensors_file import SafetensorsFile
from archon.models.lora.model import lora_parameter_names
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, ConfigError, LayoutError
from tests.engine.tiny import make_engine, sft_batch
from tests.lora.tiny import LORA, MOE, RANDOM, engine_of, train


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two checkpoints of the same sizes."""
    folder = tmp_path_factory.mktemp("bases")
    for seed in (0, 1):
        make_engine(folder / f"made{seed}", seed=seed).save(folder / str(seed))
    return str(folder / "0"), str(folder / "1")


def test_a_fresh_adapter_changes_nothing_and_training_changes_it_alone(bases: tuple[str, str]) -> None:
    engine = engine_of(bases[0])
    base = dict(load_model(bases[0]).named_parameters())
    whole = dict(engine.weights())
    assert whole.keys() == base.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in base.items())
    losses = train(engine, 12)
    assert losses[-2] < losses[0] - 0.3 and losses[-1] < losses[1] - 0.3
    frozen = {name: p for name, p in engine.model.named_parameters() if not p.requires_grad}
    assert frozen.keys() == base.keys()
    assert all(torch.equal(frozen[name], tensor) for name, tensor in base.items())
    assert len(engine.optimizer.state) == 2 * len(engine.lora)  # type: ignore[union-attr]


def test_weights_that_are_pushed_or_exported_have_the_adapters_added(bases: tuple[str, str], tmp_path: Path) -> None:
    engine = engine_of(bases[0], lora=RANDOM)
    tensors, parameters = dict(engine.weights()), dict(engine.model.named_parameters())
    a, b = (parameters[f"layers.1.feed_forward.w2.lora.{part}"] for part in "ab")
    expected = parameters["layers.1.feed_forward.w2.weight"] + 2.0 * b @ a
    torch.testing.assert_close(tensors["layers.1.feed_forward.w2.weight"], expected)
    engine.save(tmp_path / "merged")
    merged = dict(load_model(tmp_path / "merged").named_parameters())
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())


def test_experts_adapters_are_added_to_their_matrices(tmp_path: Path) -> None:
    """Of rank 3, which a grouped product takes padded, against the same model with merged weights."""
    make_engine(tmp_path / "made", hf=MOE).save(tmp_path / "base")
    engine = engine_of(str(tmp_path / "base"), lora={"rank": 3, "alpha": 5.0, "init": "random"})
    engine.save(tmp_path / "merged")
    merged = engine_of(str(tmp_path / "merged"), lora=None, optimizer=None)
    batch = sft_batch()
    torch.testing.assert_close(engine.forward_batch(batch), merged.forward_batch(batch), rtol=1e-5, atol=1e-6)
    base = engine_of(str(tmp_path / "base"), lora=None, optimizer=None)
    assert (base.forward_batch(batch) - merged.forward_batch(batch)).abs().max() > 0.01


def test_a_bfloat16_base_stays_bfloat16_and_its_adapters_are_float32(bases: tuple[str, str]) -> None:
    engine = engine_of(bases[0], dtype="bfloat16")
    dtypes = {p.requires_grad: p.dtype for p in engine.model.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    train(engine, 1)
    assert engine.optimizer is not None
    moments = [moment["exp_avg"] for moment in engine.optimizer.state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}


def test_an_export_wider_than_its_base_keeps_what_the_base_would_round_away(
    bases: tuple[str, str], tmp_path: Path
) -> None:
    engine = engine_of(bases[0], dtype="bfloat16", lora=LORA | {"init": "random", "alpha": 1e-3})
    engine.save(tmp_path / "merged", dtype=torch.float32)
    merged = dict(load_model(tmp_path / "merged").named_parameters())
    parameters = dict(engine.model.named_parameters())
    for name, size in engine.lora.items():
        a, b = (parameters[part] for part in lora_parameter_names(name))
        assert merged[name].dtype == torch.float32
        torch.testing.assert_close(merged[name] - parameters[name], size.scale * b @ a, rtol=1e-3, atol=1e-7)


def test_a_checkpoint_holds_adapters_alone_and_a_resumed_run_is_the_same(
    bases: tuple[str, str], tmp_path: Path
) -> None:
    engine = engine_of(bases[0])
    train(engine, 3)
    engine.save(tmp_path / "native", format="native")
    files = list((tmp_path / "native").rglob("*.safetensors"))
    names = {name for file in files for name in SafetensorsFile(file).entries}
    assert names and not any("tok_embeddings" in name or name.endswith("wq.weight") for name in names)
    rest = train(engine, 3, first=3)
    other = engine_of(bases[0])
    folder = find_checkpoint(tmp_path / "native")
    assert folder is not None
    with open_state(folder, other.fingerprint) as (_, state):
        other.load_state_dict(state["engine"])
    assert train(other, 3, first=3) == rest
    ours, theirs = dict(engine.lora_weights()), dict(other.lora_weights())
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"lora": LORA | {"rank": 2}}, r"adapters\.layers\.0\.attention\.wq\.weight\.rank is 4 there and 2 here; resume"),
    ({"lora": LORA | {"alpha": 9.0}}, r"adapters\.layers\.0\.attention\.wq\.weight\.alpha is 8\.0 there and 9\.0 here"),
    ({"path": 1}, r"its LoRAs were trained on another base: digest \w{16} there, \w{16} here; set path"),
    (
        {"lora": LORA | {"targets": ["q_proj"]}},
        r"adapters\.layers\.0\.attention\.\w+\.weight is .* there and None here",
    ),
    ({"lora": None}, r"LoRAs are trained there and all weights here; set lora as it was"),
]


@pytest.mark.parametrize(("options", "complaint"), OTHERS)
def test_a_checkpoint_of_another_base_or_size_is_refused(
    bases: tuple[str, str], tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    engine = engine_of(bases[0])
    engine.save(tmp_path, format="native")
    if "path" in options:
        options = {"path": bases[1]}
    assert checkpoint_digest(bases[0]) != checkpoint_digest(bases[1])
    with pytest.raises(CheckpointError, match=complaint) as refused:
        engine_of(bases[0], **options).load(tmp_path)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


def test_a_checkpoint_of_all_weights_is_none_of_adapters(bases: tuple[str, str], tmp_path: Path) -> None:
    engine_of(bases[0], lora=None).save(tmp_path, format="native")
    with pytest.raises(CheckpointError, match="LoRAs are trained here and all weights there; set lora to null"):
        engine_of(bases[0]).load(tmp_path)


@pytest.mark.parametrize(("change", "complaint"), [("missing", "wq.lora.a"), ("extra", "wx.lora.a")])
def test_a_state_with_another_key_is_refused(
    bases: tuple[str, str], tmp_path: Path, change: str, complaint: str
) -> None:
    engine = engine_of(bases[0])
    state = engine.state_dict()
    tensor = state["model"].pop("layers.0.attention.wq.lora.a")
    if change == "extra":
        state["model"] |= {"layers.0.attention.wq.lora.a": tensor, "layers.0.attention.wx.lora.a": tensor}
    save_state(tmp_path, 1, {"engine": state}, fingerprint=engine.fingerprint)
    with pytest.raises(CheckpointError, match=f"layers.0.attention.{complaint}") as refused:
        engine.load(tmp_path)
    assert len(str(refused.value).splitlines()) == 1


def test_the_base_is_not_read_again_at_every_save(
    bases: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(bases[0])
    read = list[str]()

    def digest(path: str) -> str:
        read.append(path)
        return checkpoint_digest(path)

    monkeypatch.setattr("archon.engine.engine_io.checkpoint_digest", digest)
    for _ in range(3):
        engine.save(tmp_path, format="native")
    engine.load(bases[1])
    engine.save(tmp_path, format="native")
    assert read == [bases[0], bases[1]]


def test_checkpoint_and_adapter_name_the_base_that_was_loaded_last(bases: tuple[str, str], tmp_path: Path) -> None:
    engine = engine_of(bases[0])
    engine.load(bases[1])
    engine.save(tmp_path / "adapter", format="peft")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == bases[1]
    engine.save(tmp_path / "native", format="native")
    engine_of(bases[1]).load(tmp_path / "native")
    with pytest.raises(CheckpointError):
        engine_of(bases[0]).load(tmp_path / "native")


def test_a_stage_without_adapters_is_refused(bases: tuple[str, str]) -> None:
    with pytest.raises(LayoutError, match=r"stage 1 of the pipeline, .* has no LoRA to train"):
        engine_of(bases[0], layout="p2", lora=LORA | {"targets": ["layers.0.self_attn.q_proj"]})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"init_from_scratch": True}, "lora needs the weights of a checkpoint, and init_from_scratch = true"),
        ({"router_bias_update_rate": 0.1}, "changes biases of the base model, which lora freezes"),
        ({"lora": {"rank": 0}}, "input should be greater than or equal to 1"),
        ({"lora": {"dropout": 1}}, "input should be less than 1"),
    ],
)
def test_what_adapters_cannot_be_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig.parse({"path": "base", "lora": LORA} | options)


@pytest.mark.parametrize("recompute", [{"mode": "full"}, {"mode": "selective", "selective": "op"}])
def test_recomputation_changes_nothing(bases: tuple[str, str], recompute: dict[str, Any]) -> None:
    recomputed = engine_of(bases[0], activation_checkpoint=recompute, lora=RANDOM)
    assert train(recomputed, 2) == train(engine_of(bases[0], lora=RANDOM), 2)
