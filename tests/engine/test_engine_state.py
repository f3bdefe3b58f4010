"""Bitwise resume and repetition, skipped steps, offloading, and refused uses."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import archon
from archon.checkpoint.hf_reader import read_hf_config
from archon.checkpoint.native import load_latest, save_state
from archon.engine.batch import PackedBatch
from archon.engine.build import resolve_device
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, ConfigError, LayoutError, UserError
from tests.engine.tiny import LENGTHS, make_engine, sft_batch

SFT = CrossEntropyLoss()
TRAINING_FIELDS: dict[str, Any] = {
    "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
    "scheduler": {"kind": "cosine", "warmup_steps": 2},
    "max_tokens_per_mb": 30,
}
TRAINING = TRAINING_FIELDS | {"total_steps": 10}


def train(engine: ArchonEngine, steps: range) -> list[dict[str, float]]:
    """Step on batches that draw on every random generator."""
    history = []
    for step in steps:
        lengths = [n + random.randrange(3) + int(np.random.randint(3)) + int(torch.randint(3, ())) for n in LENGTHS]
        history.append(engine.train_batch(sft_batch(lengths, seed=step), SFT, loss_token_count))
        engine.step_lr_scheduler()
        engine.version += 1
    return history


def seed_everything() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def weights(engine: ArchonEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, dtype: str) -> None:
    engine = make_engine(tmp_path, dtype=dtype, **TRAINING)
    train(engine, range(3))
    save_state(tmp_path / "checkpoints", engine.step, engine.state_dict())
    straight = train(engine, range(3, 6))

    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    resumed = make_engine(tmp_path, dtype=dtype, seed=7, **TRAINING)
    loaded = load_latest(tmp_path / "checkpoints")
    assert loaded is not None
    resumed.load_state_dict(loaded[1])

    assert (resumed.step, resumed.version) == (3, 3)
    assert train(resumed, range(3, 6)) == straight
    assert_bitwise(weights(resumed), weights(engine))


def test_a_state_from_before_the_first_step_resumes_too(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, **TRAINING)
    start = copy.deepcopy(engine.state_dict())
    straight = train(engine, range(2))
    engine.load_state_dict(start)
    assert engine.step == 0
    assert train(engine, range(2)) == straight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_are_bitwise_equal(tmp_path: Path, dtype: str) -> None:
    results = []
    for _ in range(2):
        seed_everything()
        engine = make_engine(tmp_path, dtype=dtype, **TRAINING)
        results.append((train(engine, range(3)), weights(engine)))
    assert results[0][0] == results[1][0]
    assert_bitwise(results[0][1], results[1][1])


def test_deterministic_mode_refuses_what_depends_on_timing_and_trains(tmp_path: Path) -> None:
    try:
        engine = make_engine(tmp_path, deterministic=True, **TRAINING)
        assert torch.are_deterministic_algorithms_enabled()
        assert train(engine, range(2))[-1]["skipped"] == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = make_engine(tmp_path, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert_bitwise(weights(make_engine(tmp_path, seed=1)), weights(first))
    # The masters of a bfloat16 engine are those of a float32 one.
    assert_bitwise(weights(make_engine(tmp_path, seed=1, dtype="bfloat16")), weights(first))
    other = weights(make_engine(tmp_path, seed=2))
    assert not torch.equal(other["layers.0.attention.wq.weight"], weights(first)["layers.0.attention.wq.weight"])


def explosive(after: int) -> Any:
    """Cross-entropy, infinite from call `after` on."""
    calls = [0]

    def loss_fn(logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> Tensor:
        calls[0] += 1
        loss = -(logprobs * mb["loss_mask"]).sum()
        return loss * float("inf") if calls[0] > after else loss

    return loss_fn


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_whose_gradient_is_not_finite_is_skipped_and_counted(
    tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tmp_path, dtype=dtype, optimizer={"lr": 1e-2, "max_skipped_in_a_row": 3})
    loss_fn = explosive(after=1)
    assert engine.train_batch(sft_batch(), loss_fn, loss_token_count)["skipped"] == 0
    before = copy.deepcopy(engine.state_dict())

    metrics = engine.train_batch(sft_batch(), loss_fn, loss_token_count)

    assert metrics["skipped"] == 1 and engine.skipped_steps == 1 and engine.step == 2
    assert "step 2 skipped: its gradient norm is not finite" in caplog.text
    assert_bitwise(engine.state_dict()["model"], before["model"])
    for name, moments in engine.state_dict()["optimizer"].items():
        assert_bitwise(moments, before["optimizer"][name])
    # A good step in between resets the count.
    engine.train_batch(sft_batch(), SFT, loss_token_count)
    for _ in range(2):
        engine.train_batch(sft_batch(), loss_fn, loss_token_count)
    with pytest.raises(UserError, match=r"not finite in 3 steps in a row, up to step 6; lower optimizer\.lr"):
        engine.train_batch(sft_batch(), loss_fn, loss_token_count)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_one_infinite_element_of_a_gradient_is_enough_to_skip_a_step(
    tmp_path: Path, value: float, max_norm: float | None
) -> None:
    engine = make_engine(tmp_path, optimizer={"lr": 1e-2, "max_grad_norm": max_norm})
    before = weights(engine)
    hook = engine.model.get_parameter("norm.weight").register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor([3]), value)
    )
    metrics = engine.train_batch(sft_batch(), SFT, loss_token_count)
    assert metrics["grad_norm"] == pytest.approx(abs(value), nan_ok=True)
    assert metrics["skipped"] == 1
    assert_bitwise(weights(engine), before)
    hook.remove()
    assert engine.train_batch(sft_batch(), SFT, loss_token_count)["skipped"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_error_half_way_leaves_no_gradient_to_the_next_step(tmp_path: Path, dtype: str) -> None:
    def fails_on_the_second(logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> Tensor:
        if mb.max_seqlen == max(LENGTHS):  # the other micro-batch has come before
            raise RuntimeError("of the loss function")
        return -logprobs.sum()

    engine = make_engine(tmp_path, dtype=dtype, max_tokens_per_mb=30)
    with pytest.raises(RuntimeError, match="of the loss function"):
        engine.train_batch(sft_batch(), fails_on_the_second, loss_token_count)
    if dtype == "bfloat16":
        with pytest.raises(ConfigError, match=r"train_batch, and its gradients cannot be undone; call initialize\(\)"):
            engine.train_batch(sft_batch(), SFT, loss_token_count)
        engine.initialize()
    fresh = make_engine(tmp_path, dtype=dtype, max_tokens_per_mb=30)
    assert engine.train_batch(sft_batch(), SFT, loss_token_count) == fresh.train_batch(
        sft_batch(), SFT, loss_token_count
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_and_back_changes_nothing(tmp_path: Path, dtype: str) -> None:
    engine = make_engine(tmp_path, dtype=dtype, **TRAINING)
    train(engine, range(2))
    twin = make_engine(tmp_path, dtype=dtype, **TRAINING)
    twin.load_state_dict(copy.deepcopy(engine.state_dict()))
    engine.model.norm.weight.grad = torch.zeros_like(engine.model.norm.weight)

    engine.offload()
    assert all(p.grad is None for p in engine.model.parameters())
    for call in (engine.state_dict, lambda: train(engine, range(1)), lambda: engine.forward_batch(sft_batch())):
        with pytest.raises(ConfigError, match="offloaded; call onload"):
            call()
    engine.onload()

    assert engine.model.output is not None
    assert engine.model.output.weight is engine.model.tok_embeddings.weight
    seed_everything()
    straight = train(engine, range(2, 4))
    seed_everything()
    assert train(twin, range(2, 4)) == straight


def test_tied_weights_stay_one_parameter(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(tmp_path, dtype=dtype)
        engine.train_batch(sft_batch(), SFT, loss_token_count)
        assert engine.model.output is not None
        assert engine.model.output.weight is engine.model.tok_embeddings.weight
        names = [name for name, _ in engine.weights()]
        assert "output.weight" not in names and len(names) == len(set(names))


def test_a_state_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "a", **TRAINING)
    train(engine, range(1))
    state = engine.state_dict()
    deeper = make_engine(tmp_path / "b", hf={"num_hidden_layers": 4}, **TRAINING)
    with pytest.raises(CheckpointError, match=r"parameters are not this model's: it lacks layers\.3\.attention"):
        deeper.load_state_dict(state)
    wider = make_engine(tmp_path / "c", hf={"intermediate_size": 80}, **TRAINING)
    with pytest.raises(CheckpointError, match=r"w1.weight' is torch.float32 \(70, 48\) in the checkpoint, expected"):
        wider.load_state_dict(state)
    frozen = make_engine(tmp_path / "a", optimizer=None)
    with pytest.raises(CheckpointError, match="has an optimizer state and this engine does not"):
        frozen.load_state_dict(state)
    broken = copy.deepcopy(state)
    del broken["optimizer"]["norm.weight"]
    with pytest.raises(CheckpointError, match=r"optimizer entries are not this model's: it lacks norm\.weight"):
        engine.load_state_dict(broken)


def test_hf_weights_are_every_parameter_by_its_hugging_face_name(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="bfloat16")
    exported = dict(engine.hf_weights())
    assert {name: tuple(x.shape) for name, x in exported.items()} == engine.adapter.hf_shapes()
    native = weights(engine)
    assert torch.equal(exported["model.layers.1.self_attn.q_proj.weight"], native["layers.1.attention.wq.weight"])


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"device": "tpu"}, ConfigError, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"device": "cuda:99999999999999999999"}, ConfigError, "device must be auto, cpu, cuda or cuda:N, got 'cuda:9"),
        ({"device": "cuda:\u0663"}, ConfigError, "device must be auto, cpu, cuda or cuda:N, got"),
        ({"device": "mps"}, ConfigError, "device must be auto, cpu, cuda or cuda:N, got 'mps'"),
        ({"device": "cuda:97"}, ConfigError, "'cuda:97' was requested, but PyTorch sees"),
        ({"layout": "d2c2"}, LayoutError, "the layout needs 4 processes, but 1 are running"),
        ({"layout": "q2"}, LayoutError, "'q' is not one of"),
        ({"scheduler": {"kind": "cosine"}}, ConfigError, "cosine needs total_steps"),
        ({"attn_type": "varlen", "device": "cpu"}, ConfigError, "attn_type 'varlen' cannot run here"),
        ({"init_score": True}, ValueError, "set is_critic = true as well"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, config: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make_engine(tmp_path, **config)


def test_an_export_loads_back_bitwise(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dtype="bfloat16", **TRAINING)
    train(engine, range(1))
    engine.save(tmp_path / "out")
    assert_bitwise(dict(archon.load_model(tmp_path / "out").named_parameters()), weights(engine))
    again = ArchonEngine(EngineConfig(path=str(tmp_path / "out"), dtype="bfloat16", device="cpu"))
    again.initialize()
    assert_bitwise(weights(again), weights(engine))
    other = make_engine(tmp_path, seed=5)
    other.load(tmp_path / "out")
    assert_bitwise(weights(other), weights(engine))
    engine.save(tmp_path / "narrow", dtype=torch.bfloat16)
    assert {p.dtype for p in archon.load_model(tmp_path / "narrow").parameters()} == {torch.bfloat16}


NORM, QUERY = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight"


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_an_export_has_the_dtypes_of_the_checkpoint_rounded_once(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    make_engine(tmp_path, hf={"dtype": "bfloat16"}).save(tmp_path / "base")
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert {x.dtype for x in base.values()} == {torch.bfloat16}
    save_file(base | {NORM: base[NORM].float()}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    config = EngineConfig.model_validate(
        {"path": str(tmp_path / "base"), "device": "cpu", "lora": lora} | TRAINING_FIELDS
    )
    engine = ArchonEngine(config)
    engine.initialize(10)
    train(engine, range(1))
    engine.save(tmp_path / "out", format="hf")
    exported, wide = load_file(tmp_path / "out" / "model.safetensors"), dict(engine.hf_weights())
    assert stored_dtypes(tmp_path / "out") == stored_dtypes(tmp_path / "base")
    assert_bitwise(exported, {name: x.to(exported[name].dtype) for name, x in wide.items()})
    assert not torch.equal(exported[QUERY], base[QUERY])
    assert read_hf_config(tmp_path / "out")["dtype"] == "bfloat16"
    # A run that reads the native checkpoint continues from the weights before rounding.
    engine.save(tmp_path / "state", format="native")
    resumed = ArchonEngine(config)
    resumed.initialize(10)
    resumed.load(tmp_path / "state")
    assert_bitwise(dict(resumed.hf_weights()), wide)


def test_the_dtype_of_an_export_is_an_option_which_its_config_names(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hf={"dtype": "bfloat16"}, export_dtype="float32")
    engine.save(tmp_path / "wide")
    assert {*stored_dtypes(tmp_path / "wide").values()} == {torch.float32}
    assert read_hf_config(tmp_path / "wide")["dtype"] == "float32"
    assert_bitwise(weights(engine), dict(archon.load_model(tmp_path / "wide").named_parameters()))
    engine.save(tmp_path / "narrow", dtype=torch.float16)
    assert {*stored_dtypes(tmp_path / "narrow").values()} == {torch.float16}


def test_a_critic_from_an_actor_gets_a_fresh_score_and_the_actors_body(tmp_path: Path) -> None:
    actor = make_engine(tmp_path)
    actor.save(tmp_path / "actor")
    config = EngineConfig(path=str(tmp_path / "actor"), device="cpu", is_critic=True, init_score=True, seed=3)
    critics = [ArchonEngine(config) for _ in range(2)]
    for critic in critics:
        critic.initialize()
    assert_bitwise(weights(critics[0]), weights(critics[1]))
    score = weights(critics[0]).pop("score.weight")
    assert score.abs().max() > 0
    body = {name: x for name, x in weights(critics[0]).items() if name != "score.weight"}
    assert_bitwise(body, weights(actor))
    plain = ArchonEngine(config.model_copy(update={"init_score": False}))
    with pytest.raises(CheckpointError, match="score"):
        plain.initialize()


def test_save_refuses_what_it_does_not_do(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    with pytest.raises(ConfigError, match="format='native' keeps every dtype"):
        engine.save(tmp_path / "out", format="native", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="format must be 'hf', 'peft' or 'native', got 'gguf'"):
        engine.save(tmp_path / "out", format="gguf")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="asynchronous=True needs format='native'"):
        engine.save(tmp_path / "out", asynchronous=True)
    assert not (tmp_path / "out").exists()


def test_auto_takes_a_gpu_where_there_is_one() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
