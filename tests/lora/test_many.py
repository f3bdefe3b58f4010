"""Several adapters in one batch: each is trained as if it were alone.

Losses, gradients, norms and weights of every adapter equal those of a run with this adapter as the only one, on its
documents alone, in the steps in which it has some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.checkpoint.native import find_checkpoint, open_state
from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, LossFn, Metrics, loss_token_count, masked_sum
from archon.schema.config import EngineConfig
from archon.schema.errors import BatchError, CheckpointError, ConfigError, UserError
from archon.tools.doctor.checks import memory, replica_mismatches
from tests.engine.tiny import make_engine
from tests.lora.tiny import MOE

EXACT = 1e-10
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "moe": MOE}
CLIPPED = {"lr": 2e-2, "weight_decay": 0.1, "max_grad_norm": 0.05}
TWO: dict[str, dict[str, Any]] = {
    "poet": {"rank": 3, "alpha": 5.0, "init": "random", "seed": 1, "optimizer": CLIPPED},
    "judge": {
        "rank": 8,
        "alpha": 4.0,
        "rslora": True,
        "targets": ["q_proj", "down_proj"],
        "seed": 2,
        "optimizer": {"lr": 5e-3, "beta2": 0.99, "max_grad_norm": None},
        "scheduler": {"kind": "cosine", "warmup_steps": 2},
        "total_steps": 7,
    },
}
EIGHT = TWO | {
    f"a{index}": {
        "rank": 1 + index % 4,
        "alpha": 2.0,
        "init": "random",
        "seed": index,
        "optimizer": {"lr": 1e-3 * index},
    }
    for index in range(1, 7)
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    for name, hf in MODELS.items():
        make_engine(folder / f"made-{name}", hf=hf).save(folder / name)
    return {name: str(folder / name) for name in MODELS}


def engine_of(base: str, lora: dict[str, Any], **options: Any) -> ArchonEngine:
    defaults: dict[str, Any] = {"path": base, "device": "cpu", "dtype": "float64", "max_tokens_per_mb": 20}
    engine = ArchonEngine(EngineConfig.parse(defaults | {"lora": lora} | options))
    engine.initialize(10)
    return engine


def alone(base: str, lora: dict[str, Any], **options: Any) -> ArchonEngine:
    """Return an engine with one adapter, which has the values of one of several."""
    own = dict(lora)
    run = {key: own.pop(key) for key in ("optimizer", "scheduler") if key in own}
    total_steps = own.pop("total_steps", 10)
    defaults: dict[str, Any] = {"path": base, "device": "cpu", "dtype": "float64", "max_tokens_per_mb": 20}
    engine = ArchonEngine(EngineConfig.parse(defaults | run | {"lora": own} | options))
    engine.initialize(total_steps)
    return engine


def documents(step: int, loras: list[int]) -> dict[str, Tensor]:
    """A padded batch of documents of different lengths, the first half of each shared by all; row i is of adapter
    `loras[i]`."""
    generator = torch.Generator().manual_seed(step)
    n, width = len(loras), 14
    lengths = torch.randint(6, width + 1, (n,), generator=generator)
    ids = torch.randint(3, 90, (n, width), generator=generator)
    ids[:, :4] = ids[:1, :4]
    mask = torch.arange(width) < lengths.unsqueeze(1)
    trained = (torch.rand(n, width, generator=generator) < 0.7) & mask
    trained[:, 5] = True
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": trained.float(), "lora": torch.tensor(loras)}


def rows_of(batch: dict[str, Tensor], index: int) -> dict[str, Tensor] | None:
    """The documents of one adapter, without the field that says so."""
    own = batch["lora"] == index
    return {name: x[own] for name, x in batch.items() if name != "lora"} if own.any() else None


def plan(n_loras: int, steps: int) -> list[list[int]]:
    """The adapters of the documents of each step, mixed; some are absent in some steps."""
    generator = torch.Generator().manual_seed(n_loras)
    return [torch.randint(n_loras, (n_loras + 1,), generator=generator).tolist() for _ in range(steps)]


class ClippedLoss:
    """A loss that is not a weighted sum of logprobs, with an entropy."""

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        assert entropy is not None
        terms = (logprobs.exp() + 0.1 * entropy) * mb["loss_mask"]
        return -terms.sum(), {"entropy": masked_sum(entropy.detach(), mb["loss_mask"])}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def close(found: float, expected: float) -> bool:
    return abs(found - expected) <= EXACT * max(1.0, abs(expected))


@pytest.mark.parametrize(
    ("model", "loras", "loss"),
    [
        pytest.param("dense", TWO, CrossEntropyLoss(), id="dense-two-cross-entropy"),
        pytest.param("moe", TWO, ClippedLoss(), id="moe-two-any-loss"),
        pytest.param("dense", EIGHT, CrossEntropyLoss(), id="dense-eight-cross-entropy", marks=pytest.mark.slow),
        pytest.param("dense", EIGHT, ClippedLoss(), id="dense-eight-any-loss", marks=pytest.mark.slow),
        pytest.param("moe", EIGHT, CrossEntropyLoss(), id="moe-eight-cross-entropy", marks=pytest.mark.slow),
    ],
)
def test_each_adapter_is_trained_as_if_alone(
    bases: dict[str, str], model: str, loras: dict[str, dict[str, Any]], loss: LossFn
) -> None:
    several = engine_of(bases[model], {"loras": loras})
    single = {name: alone(bases[model], lora) for name, lora in loras.items()}
    absences = 0
    for step, ids in enumerate(plan(len(loras), 10)):
        batch = documents(step, ids)
        grads, _ = several.gradients(batch, loss, loss_token_count)
        metrics = several.train_batch(batch, loss, loss_token_count)
        several.step_lr_scheduler()
        losses = []
        for index, (name, engine) in enumerate(single.items()):
            own = rows_of(batch, index)
            mine = {key.removeprefix(f"{name}/"): x for key, x in metrics.items() if key.startswith(f"{name}/")}
            if own is None:
                absences += 1
                assert not mine
                continue
            expected_grads, _ = engine.gradients(own, loss, loss_token_count)
            for parameter, expected in expected_grads.items():
                owner, _, part = parameter.rpartition(".")
                assert relative(grads[f"{owner}.{name}.{part}"], expected) <= EXACT, (step, name, parameter)
            expected_metrics = engine.train_batch(own, loss, loss_token_count)
            engine.step_lr_scheduler()
            losses.append(expected_metrics["loss"])
            assert mine.keys() == expected_metrics.keys() - {"micro_batches", "tokens_computed"}
            assert all(close(x, expected_metrics[key]) for key, x in mine.items()), (step, name)
        assert close(metrics["loss"], sum(losses))
    assert absences >= 2, "adapters without a document in a step must be among the steps"
    for name, engine in single.items():
        weights = dict(several.lora_weights(name))
        expected_weights = dict(engine.lora_weights())
        assert weights.keys() == expected_weights.keys()
        assert all(relative(weights[key], x) <= EXACT for key, x in expected_weights.items()), name
        assert several.loras[name].steps == engine.step


@pytest.mark.parametrize("recompute", [{"mode": "full"}, {"mode": "selective", "selective": "op"}])
def test_recomputation_changes_nothing(bases: dict[str, str], recompute: dict[str, Any]) -> None:
    losses = []
    for options in ({}, {"activation_checkpoint": recompute}):
        engine = engine_of(bases["dense"], {"loras": TWO}, **options)
        for step in range(2):
            metrics = engine.train_batch(documents(step, [0, 1, 0]), CrossEntropyLoss(), loss_token_count)
            losses.append({name: x for name, x in metrics.items() if "/" in name})
    assert losses[:2] == losses[2:]


def test_an_adapter_without_documents_stays_as_it_is(bases: dict[str, str]) -> None:
    engine = engine_of(bases["dense"], {"loras": TWO})
    for step in range(3):
        engine.train_batch(documents(step, [0, 1, 0]), CrossEntropyLoss(), loss_token_count)
    before = {name: x.clone() for name, x in engine.lora_weights("poet")}
    engine.train_batch(documents(4, [1, 1]), CrossEntropyLoss(), loss_token_count)
    engine.step_lr_scheduler()
    assert all(torch.equal(x, before[name]) for name, x in engine.lora_weights("poet")), "momentum or decay moved it"


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_documents_score_as_with_their_adapter_alone_or_with_the_base(
    bases: dict[str, str], share_prefixes: bool
) -> None:
    """Also where documents of different adapters begin with the same tokens."""
    loras = {name: lora | {"init": "random"} for name, lora in TWO.items()}
    engine = engine_of(bases["dense"], {"loras": loras}, share_prefixes=share_prefixes, max_tokens_per_mb=128)
    batch = documents(0, [1, 0, -1, 1, 0, 0, -1])
    scores = engine.forward_batch(batch)
    engines = {index: alone(bases["dense"], lora) for index, lora in enumerate(loras.values())}
    engines[-1] = alone(bases["dense"], {"init": "zero"})
    for index, single in engines.items():
        own = rows_of(batch, index)
        assert own is not None
        assert relative(scores[batch["lora"] == index], single.forward_batch(own)) <= EXACT


def test_an_infinite_gradient_skips_the_step_of_its_adapter_alone(bases: dict[str, str]) -> None:
    class Broken(ClippedLoss):
        def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
            value, metrics = super().__call__(logprobs, entropy, mb)
            return (value * float("nan") if mb["lora"][0] == 0 else value), metrics

    engine, judge = engine_of(bases["dense"], {"loras": TWO}), alone(bases["dense"], TWO["judge"])
    before = {name: x.clone() for name, x in engine.lora_weights("poet")}
    batch = documents(0, [0, 1, 1, 0])
    metrics = engine.train_batch(batch, Broken(), loss_token_count)
    assert (metrics["poet/skipped"], metrics["judge/skipped"], engine.skipped_steps) == (1.0, 0.0, 1)
    assert all(torch.equal(x, before[name]) for name, x in engine.lora_weights("poet"))
    own = rows_of(batch, 1)
    assert own is not None
    judge.train_batch(own, ClippedLoss(), loss_token_count)
    expected = dict(judge.lora_weights())
    assert all(relative(x, expected[name]) <= EXACT for name, x in engine.lora_weights("judge"))
    resumed = engine_of(bases["dense"], {"loras": TWO})
    resumed.load_state_dict(engine.state_dict())
    counts = {name: (one.steps, one.skipped_steps) for name, one in resumed.loras.items()}
    assert counts == {"poet": (1, 1), "judge": (1, 0)}
    # The default of `max_skipped_in_a_row` counts the steps of one adapter, of which the second one is the last.
    stopping = {**TWO, "poet": TWO["poet"] | {"optimizer": CLIPPED | {"max_skipped_in_a_row": 2}}}
    stopped = engine_of(bases["dense"], {"loras": stopping})
    stopped.train_batch(batch, Broken(), loss_token_count)
    with pytest.raises(UserError, match="the gradient norm was not finite in 2 steps in a row, up to step 2"):
        stopped.train_batch(batch, Broken(), loss_token_count)


@pytest.mark.parametrize(("model", "dtype"), [("dense", "float32"), ("moe", "float32"), ("moe", "float64")])
def test_an_adapter_without_numbers_reaches_no_other(bases: dict[str, str], model: str, dtype: str) -> None:
    batch = documents(0, [0, 1, 1, 0])
    updated = []
    for spoiled in (False, True):
        engine = engine_of(bases[model], {"loras": TWO}, dtype=dtype, max_tokens_per_mb=128)
        for name, parameter in engine.model.named_parameters():
            if spoiled and name in engine.loras["poet"].names:
                parameter.data.fill_(torch.nan)
        metrics = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
        updated.append((dict(engine.lora_weights("judge")), metrics["judge/grad_norm"]))
        assert (metrics["poet/skipped"], metrics["judge/skipped"]) == (float(spoiled), 0.0)
    (expected, norm), (given, given_norm) = updated
    assert abs(norm - given_norm) <= 1e-5 * norm, "experts' products of other rows are rounded in another order"
    assert all(relative(x, expected[name]) <= 1e-5 for name, x in given.items())


def test_doctor_compares_and_counts_several_adapters(bases: dict[str, str]) -> None:
    engine = engine_of(bases["dense"], {"loras": TWO}, dtype="float32")
    engine.train_batch(documents(0, [0, 1]), CrossEntropyLoss(), loss_token_count)
    trained = sum(x.numel() for name in TWO for _, x in engine.lora_weights(name))
    steps = sum(len(own.parameters) for own in engine.loras.values())
    assert memory(engine)[0].optimizer == 4 * (2 * trained + steps)
    assert replica_mismatches(engine) == []


def test_a_resumed_run_of_several_adapters_is_the_same_bitwise(bases: dict[str, str], tmp_path: Path) -> None:
    steps = [[0, 0, 1], [0, 0], [1, 0, 1], [1, 1], [0, 1, 1]]

    def train(engine: ArchonEngine, first: int, last: int) -> list[dict[str, float]]:
        metrics = []
        for step in range(first, last):
            metrics.append(engine.train_batch(documents(step, steps[step]), CrossEntropyLoss(), loss_token_count))
            engine.step_lr_scheduler()
        return metrics

    third = EIGHT["a1"]  # never trained, so that it has no moments
    engine = engine_of(bases["dense"], {"loras": TWO | {"idle": third}})
    train(engine, 0, 2)
    engine.save(tmp_path / "native", format="native")
    rest = train(engine, 2, 5)
    other = engine_of(bases["dense"], {"loras": TWO | {"idle": third}})
    folder = find_checkpoint(tmp_path / "native")
    assert folder is not None
    with open_state(folder, other.fingerprint) as (_, state):
        other.load_state_dict(state["engine"])
    assert train(other, 2, 5) == rest
    ours, theirs = dict(engine.lora_weights()), dict(other.lora_weights())
    assert ours.keys() == theirs.keys() and all(torch.equal(theirs[name], x) for name, x in ours.items())
    with pytest.raises(CheckpointError):
        engine_of(bases["dense"], {"loras": TWO}).load(tmp_path / "native")


def test_one_adapter_is_exported_and_loaded_by_name(bases: dict[str, str], tmp_path: Path) -> None:
    loras = {name: lora | {"init": "random"} for name, lora in TWO.items()}
    engine = engine_of(bases["dense"], {"loras": loras}, dtype="float32")
    engine.save(tmp_path / "one", format="peft", lora="judge")
    engine.save(tmp_path / "all", format="peft")
    with pytest.raises(CheckpointError, match="it has LoRA folders, name one: judge, poet"):
        alone(bases["dense"], {"path": str(tmp_path / "all")})
    batch = documents(0, [1, 1, 1])
    single = alone(bases["dense"], {"path": str(tmp_path / "one")}, dtype="float32")
    own = rows_of(batch, 1)
    assert own is not None
    torch.testing.assert_close(engine.forward_batch(batch), single.forward_batch(own), rtol=1e-6, atol=1e-6)
    begun = {name: {"path": str(tmp_path / "all" / name)} for name in loras}
    other = engine_of(bases["dense"], {"loras": begun}, dtype="float32")
    expected = dict(engine.lora_weights())
    assert all(torch.equal(x, expected[name]) for name, x in other.lora_weights())
    fresh = engine_of(bases["dense"], {"loras": TWO}, dtype="float32")
    fresh.load_lora("judge", tmp_path / "one")
    assert all(torch.equal(x, dict(engine.lora_weights("judge"))[name]) for name, x in fresh.lora_weights("judge"))
    with pytest.raises(CheckpointError, match=r"other matrices, ranks or alphas than LoRA 'poet'"):
        fresh.load_lora("poet", tmp_path / "one")
    with pytest.raises(ConfigError, match="unknown LoRA 'nobody'; this model has poet, judge"):
        fresh.save(tmp_path / "none", format="peft", lora="nobody")
    with pytest.raises(ConfigError, match="merges a LoRA into the weights, and this model has 2"):
        fresh.save(tmp_path / "merged")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lora": torch.tensor([0, 2])}, "unknown LoRA index 2; expected 0 to 1"),
        ({"lora": None}, "selects no LoRA for its documents"),
        ({"lora": torch.tensor([0.0, 1.0])}, "selects no LoRA for its documents"),
        ({"lora": torch.tensor([0, -1])}, "LoRA index -1, the base model, and its weights are frozen"),
        (
            {"loss_mask": torch.tensor([[1.0] * 14, [0.0] * 14])},
            "the documents of LoRA 'judge' have nothing to train",
        ),
    ],
)
def test_a_batch_that_adapters_cannot_train_on_is_refused(
    bases: dict[str, str], change: dict[str, Any], complaint: str
) -> None:
    engine = engine_of(bases["dense"], {"loras": TWO})
    batch = {name: x for name, x in (documents(0, [0, 1]) | change).items() if x is not None}
    with pytest.raises(BatchError, match=complaint):
        engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lora": {"loras": {}}}, "loras is empty"),
        ({"lora": {"loras": TWO, "rank": 4}}, "rank configures a single LoRA, and loras names 2"),
        ({"lora": {"loras": {"a.b": {}}}}, "string should match pattern"),
        ({"lora": {"loras": {"x": {"path": "folder", "rank": 3}}}}, "rank configures a fresh LoRA"),
        ({"router_aux_loss_coef": 0.1}, "each of several LoRAs trains as if it were alone"),
        ({"optimizer": None}, "a LoRA has an optimizer, but the optimizer of the model is null"),
    ],
)
def test_what_several_adapters_cannot_be_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig.parse({"path": "base", "lora": {"loras": TWO}} | options)


def test_what_only_the_model_can_tell_is_refused(bases: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="compiled blocks do not support that; set compile to false"):
        engine_of(bases["dense"], {"loras": TWO}, compile=True)
    for name in ("train", "training"):
        with pytest.raises(ConfigError, match=f"a LoRA cannot be named '{name}', which PyTorch's modules use"):
            engine_of(bases["dense"], {"loras": {name: {}}})
    late = {"scheduler": {"kind": "linear", "warmup_steps": 3}, "total_steps": 3}
    with pytest.raises(ConfigError, match="leaves none of the 3 steps to decay in"):
        engine_of(bases["dense"], {"loras": {"late": late}})
