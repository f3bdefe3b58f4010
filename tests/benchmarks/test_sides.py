"""The sides that every machine has: what the benchmarks compare before they time."""

from __future__ import annotations

import pytest

from benchmarks import generate, head_memory, load, lora, step_check, time_to_reward, train_step
from benchmarks.checkpoints import SHAPES, make_checkpoint, make_lora, shape
from benchmarks.harness import BenchmarkError, check_close, check_same
from benchmarks.peer_models import hf_tensors
from tests.benchmarks.parameter_counts import parameters_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny")


def test_the_shapes_are_those_that_are_named():
    millions = {name: round(parameters_of(shape(name)) / 1e6) for name in SHAPES}
    assert millions["26M"] == 26
    assert millions["2.43GB"] == 1215  # in bfloat16: 2.43 GB
    assert [round(millions[name], -1) for name in ("0.6B", "1.7B", "8B")] == [600, 1720, 8190]
    assert sum(train_step.RAGGED_LENGTHS) == 3580 and len(train_step.RAGGED_LENGTHS) == 16


def test_a_checkpoint_has_the_parameters_its_shape_says(checkpoint):
    assert sum(tensor.numel() for tensor in hf_tensors(str(checkpoint)).values()) == parameters_of(shape("tiny"))


def check_steps(facts: dict[str, dict[str, float]], dtype: str = "float32") -> None:
    """The first two steps of three peers are archon's."""
    assert len(facts) == 4
    assert len(step_check.compare(facts, dtype)) == 9


def test_a_training_step_of_archon_is_that_of_transformers(checkpoint):
    options = {"threads": 1, "checkpoint": str(checkpoint), "model": "tiny", "device": "cpu", "dtype": "float32"}
    options |= {"lengths": [9, 1, 33, 17], "max_tokens_per_mb": 40}
    check_steps({side: train_step.prepare(side, options)[0] for side in ("archon", *train_step.RAGGED_AIMS)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_step_of_archons_adapter_is_that_of_peft(checkpoint, tmp_path, dtype):
    lora_path = make_lora(tmp_path, checkpoint, rank=3)
    options = {"threads": 1, "checkpoint": str(checkpoint), "model": "tiny", "device": "cpu", "dtype": dtype}
    options |= {"lengths": [9, 1, 33, 17], "max_tokens_per_mb": 40, "loras": [str(lora_path)]}
    facts = {side: lora.prepare(side, options)[0] for side in ("archon", *lora.OF_ONE)}
    check_steps(facts, dtype)
    width = 2 if dtype == "bfloat16" else 4  # what a generator is sent
    assert facts["archon"]["base_bytes"] == width * parameters_of(shape("tiny"))
    assert facts["archon"]["lora_bytes"] == width * sum(t.numel() for t in hf_tensors(str(lora_path)).values())


def test_several_adapters_take_the_same_steps_in_one_batch_and_one_after_the_other(checkpoint, tmp_path):
    loras = [str(make_lora(tmp_path / str(seed), checkpoint, rank=3, seed=seed)) for seed in range(3)]
    options = {"threads": 1, "checkpoint": str(checkpoint), "model": "tiny", "device": "cpu", "dtype": "float32"}
    options |= {"lengths": [9, 5, 17], "max_tokens_per_mb": 40, "loras": loras}
    facts = {side: lora.prepare(side, options)[0] for side in ("archon", *lora.OF_EIGHT)}
    assert len(step_check.compare(facts, "float32")) == 6


def test_the_heads_of_both_sides_agree():
    options = {"threads": 1, "tokens": 33, "dim": 16, "vocab": 101}
    facts = {side: head_memory.prepare(side, options)[0] for side in (*head_memory.SPEED_AIMS, head_memory.PEER)}
    ours = facts.pop(head_memory.SUM)
    for what, value in ours.items():
        check_close(what, value, {side: fact[what] for side, fact in facts.items()}, head_memory.TOLERANCE)


def test_generation_gives_forced_lengths_and_equal_tokens(checkpoint):
    lengths = [3, 9, 1, 6, 4]
    options = {"threads": 1, "checkpoint": str(checkpoint), "model": "tiny", "device": "cpu", "dtype": "float32"}
    options |= {"lengths": lengths, "slots": 2, "prompt_length": 32}
    tokens = {side: generate.prepare(side, options)[0]["tokens"] for side in ("archon", generate.DYNAMIC)}
    assert [len(answer) for answer in tokens["archon"]] == lengths
    assert generate.compare("peer", tokens["archon"], tokens[generate.DYNAMIC], options) == []
    wrong = [list(answer) for answer in tokens["archon"]]
    wrong[1][4] = (wrong[1][4] + 1) % shape("tiny")["vocab_size"]
    with pytest.raises(BenchmarkError, match="more than a near tie"):
        generate.compare("peer", tokens["archon"], wrong, options)


@pytest.mark.slow
def test_where_vllm_is_not_installed_the_record_says_how_to_get_it(checkpoint, tmp_path, monkeypatch):
    options = {"threads": 1, "checkpoint": str(checkpoint), "model": "tiny", "device": "cpu", "dtype": "float32"}
    options |= {"lengths": [3, 5], "slots": 2, "prompt_length": 32}
    monkeypatch.setenv("ARCHON_VLLM", str(tmp_path / "nowhere"))
    sides = (generate.ARCHON, generate.DYNAMIC, generate.VLLM)
    record = generate.measure("even", options, 1, sides, generate.AIMS["even"])
    reason = "ModuleNotFoundError: No module named 'vllm' (to install it: .ci/setup_vllm)"
    assert record.missing == {generate.VLLM: reason}
    ratios = {name: ratio.aim for name, ratio in record.ratios.items()}
    assert generate.VLLM not in record.sides and [*ratios.values()] == [">= 1.4"]


def test_ragged_lengths_spread_over_their_range():
    lengths = generate.case_lengths("ragged", quick=False)
    assert (len(lengths), min(lengths), max(lengths), round(sum(lengths) / 128)) == (128, 16, 256, 136)
    assert lengths != sorted(lengths)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_reader_gives_the_same_weights(dtype, tmp_path):
    made = make_checkpoint(tmp_path, "tiny", dtype="bfloat16", shards=2)
    options = {"threads": 1, "checkpoint": str(made), "dtype": dtype}
    hashes = {}
    for side in (load.ARCHON, load.TRANSFORMERS, load.DCP, load.MEMORY):
        facts, run = load.prepare(side, options)
        assert facts["model_bytes"] == parameters_of(shape("tiny")) * (2 if dtype == "bfloat16" else 4)
        assert run(touch="trained")["seconds"] > 0
        hashes[side] = facts["hashes"]
    assert hashes.pop(load.MEMORY) == {}, "it reads nothing"
    check_same("weights", hashes.pop(load.ARCHON), hashes)


def test_writing_every_byte_changes_none(checkpoint):
    options = {"threads": 1, "checkpoint": str(checkpoint), "dtype": "float32"}
    before, after = load.load_transformers(options), load.load_transformers(options)
    load.write_all(after)
    assert [load.digest(p) for p in before.parameters()] == [load.digest(p) for p in after.parameters()]


def test_the_clock_of_time_to_reward_leaves_evaluations_out(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time_to_reward.time, "perf_counter", lambda: now)
    rewards = iter([0.1, 0.3, 0.5, 0.4])

    def evaluate() -> float:
        nonlocal now
        now += 100.0
        return next(rewards)

    progress = time_to_reward.Progress(evaluate, budget=10.0, every=4.0)
    done = False
    while not done:
        now += 2.0
        done = progress.step(trained=8, generated=16)
    result = progress.result()
    assert [(point["seconds"], point["reward"]) for point in result["curve"]] == [
        (0, 0.1),
        (4, 0.3),
        (8, 0.5),
        (10, 0.4),
    ]
    assert (result["steps"], result["trained_per_second"], result["generated_per_second"]) == (5, 4.0, 8.0)
    assert time_to_reward.first_time(result["curve"], 0.3) == 4
    assert time_to_reward.first_time(result["curve"], 0.6) is None


def test_a_reward_never_reached_is_a_miss_and_not_left_out():
    def run(*rewards: float) -> dict:
        curve = [{"seconds": 10.0 * i, "steps": i, "reward": reward} for i, reward in enumerate(rewards)]
        return {"curve": curve, "training_seconds": 20.0, "trained_per_second": 5.0, "generated_per_second": 5.0}

    for ours, met in ((run(0.3, 0.6, 0.7), True), (run(0.3, 0.4, 0.4), False)):
        record = time_to_reward.harness.new_record("time_to_reward", "x", threads=1)
        theirs = run(0.3, 0.4, 0.5, 0.5, 0.6)
        time_to_reward.summarize(record, {time_to_reward.ARCHON: [ours], time_to_reward.TRL: [theirs]})
        ratio = record.ratios["TRL / archon, time to TRL's best reward"]
        assert ratio.aim_met is met
        assert bool(record.notes) is not met
