"""`benchmarks.gpu`: stages that crash, hang or are interrupted, and the summary of aims and predictions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from archon.models.flops import MatmulShape
from archon.tools.bench.origin import spread
from benchmarks import gpu, gpu_predictions, gpu_step, harness
from benchmarks.checkpoints import shape
from benchmarks.gpu import Attempt, is_complete, run_stages, summary
from benchmarks.record import Record, read_records
from tests.benchmarks.parameter_counts import parameters_of

CRASH = "import os; print('about to crash', flush=True); os.abort()"
HANG = "import time; print('hangs', flush=True); time.sleep(1000)"


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def writes(path: Path) -> list[str]:
    return python(f"open({str(path)!r}, 'w').write('measured')")


def test_a_stage_that_crashes_or_hangs_loses_only_itself(tmp_path: Path) -> None:
    commands = {
        "crash": (python(CRASH), 60.0),
        "hang": (python(HANG), 1.0),
        "impossible": (python(f"print('no vLLM'); raise SystemExit({gpu.IMPOSSIBLE})"), 60.0),
        "good": (writes(tmp_path / "record"), 60.0),
    }
    attempts = run_stages(commands, tmp_path, minutes=2)
    assert [attempt.outcome for attempt in attempts] == ["failed", "out of time", "impossible", "done"]
    assert "about to crash" in attempts[0].reason and "exit code -6" in attempts[0].reason
    assert "hangs" in attempts[1].reason and attempts[1].seconds < 10
    assert (tmp_path / "record").read_text() == "measured"


def test_the_workers_of_a_stage_end_with_it(tmp_path: Path) -> None:
    stage = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid)"
    run_stages({"stage": (python(stage), 60.0)}, tmp_path, minutes=1)
    stat = Path(f"/proc/{(tmp_path / 'stage.log').read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_interrupted_run_keeps_what_is_measured_and_starts_nothing_more(tmp_path: Path) -> None:
    commands = {
        "good": (writes(tmp_path / "record"), 60.0),
        "hang": (python(HANG), 60.0),
        "later": (writes(tmp_path / "later"), 60.0),
    }

    def interrupt() -> None:
        while not (tmp_path / "hang.log").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    attempts = run_stages(commands, tmp_path, minutes=2)
    assert [attempt.outcome for attempt in attempts] == ["done", "interrupted", "not started"]
    assert (tmp_path / "record").exists() and not (tmp_path / "later").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_all_stages_together_have_a_limit(tmp_path: Path) -> None:
    commands = {"hang": (python(HANG), 60.0), "later": (writes(tmp_path / "later"), 60.0)}
    attempts = run_stages(commands, tmp_path, minutes=1 / 60)
    assert [attempt.outcome for attempt in attempts] == ["out of time", "not started"]


def a_record(case: str, **rates: float) -> Record:
    record = harness.new_record("gpu", case, threads=1)
    record.sides = {side: spread([rate], "tok/s") for side, rate in rates.items()}
    return record


def test_a_stage_is_complete_once_every_side_was_measured_or_is_missing(tmp_path: Path) -> None:
    (tmp_path / "gpu.unfinished.jsonl").write_text("")
    assert not is_complete(tmp_path, "correctness")
    record = a_record("train-0.6B", archon=1.0)
    assert not is_complete(tmp_path, "train-0.6B")
    record.missing = {gpu_step.LIGER: gpu_step.PENDING}
    record.write(tmp_path)
    assert not is_complete(tmp_path, "train-0.6B")
    record.missing = {gpu_step.LIGER: "ModuleNotFoundError: No module named 'liger_kernel'"}
    record.write(tmp_path)
    assert is_complete(tmp_path, "train-0.6B")


def test_the_summary_compares_aims_and_predictions_and_profiles_a_missed_aim(tmp_path: Path) -> None:
    predicted = {prediction.case: prediction for prediction in gpu_predictions.read_predictions()}
    near = predicted["train-0.6B"].value
    missed = a_record("train-0.6B", archon=0.5 * near)
    missed.profiles = {"archon": {"GEMM": 0.16, "idle": 0.5}}
    missed.write(tmp_path)
    a_record("train-1.7B", archon=1.05 * predicted["train-1.7B"].value).write(tmp_path)
    a_record("train-prefixes", **{"archon": 300.0, gpu_step.UNSHARED: 100.0}).write(tmp_path)
    tests = [{"test": "a", "ok": True}, {"test": "b", "ok": False}]
    (tmp_path / "gpu.jsonl").write_text("\n".join(map(json.dumps, tests)))
    text = "\n".join(summary(tmp_path, [Attempt("train-fp8", "out of time", reason="log ends with: x")]))
    assert "tests on the GPU: 1 passed, 1 failed\n  failed: b" in text
    assert "aim MISSED; prediction refuted (0.50×)\n  measured ms: idle 500, GEMM 160\n  predicted ms: GEMM 160" in text
    assert "Qwen3-1.7B, 4 × 4,096 tokens): 47" in text and "aim met; prediction confirmed (1.05×)" in text
    assert "answers of 256): 3 ×" in text and "aim met; prediction refuted (1.42×)" in text
    assert "tensorwise): not measured; aim 1.2, predicted 1.2 ×" in text
    assert "train-fp8: out of time: log ends with: x" in text


def test_every_stage_has_a_limit_within_the_command_and_every_aim_a_stage() -> None:
    assert all(stage.seconds <= 300 for stage in gpu.STAGES.values())
    assert {f"train-{case}" for case in gpu_step.CASES} <= gpu.STAGES.keys()
    assert {prediction.case for prediction in gpu_predictions.predictions()} <= gpu.STAGES.keys()
    aims = {f"train-{name}": case.aim for name, case in gpu_step.CASES.items() if case.aim is not None}
    for prediction in gpu_predictions.predictions():
        if prediction.case in aims:
            assert (aims[prediction.case].bound, aims[prediction.case].side) == (prediction.aim, prediction.side)


def test_the_recorded_predictions_are_those_of_the_code() -> None:
    recorded, current = gpu_predictions.read_predictions(), gpu_predictions.predictions()
    assert recorded == current, "run python -m benchmarks.gpu_predictions --write"


@pytest.mark.parametrize("name", ["0.6B", "1.7B", "8B", "30B-A3B-4L"])
def test_predictions_count_the_parameters_and_flops_of_the_models(name: str) -> None:
    model, config = gpu_predictions.Model(name), shape(name)
    work = MatmulShape.from_hf_config(config)
    router = config.get("num_experts", 0) * config["hidden_size"] * config["num_hidden_layers"]
    assert model.blocks + model.head + router == work.active
    assert model.weights == pytest.approx(parameters_of(config), rel=1e-3)
    # Attention has two matmuls forward and five backward; `MatmulShape` counts only four backward.
    counted = work.packed([4096] * 4).causal - 6 * work.active * 4 * 4096
    assert model.attention_flops(4, 4096) == pytest.approx(counted * 7 / 6)


def test_the_measured_attention_rate_gives_back_its_measurement() -> None:
    model = gpu_predictions.Model("0.6B")
    seconds = model.attention_flops(8, 4096) / model.layers / gpu_predictions.ATTENTION_LONG
    assert seconds == pytest.approx(3.96e-3, rel=0.01)  # the rate has three digits


def test_a_prediction_adds_up_and_names_what_it_assumes() -> None:
    for prediction in gpu_predictions.predictions():
        assert prediction.assumes and min(prediction.parts_ms.values()) >= 0
    step = gpu_predictions.predictions()[0]
    assert step.value == pytest.approx(8 * 4096e3 / sum(step.parts_ms.values()), rel=5e-3)
    assert step.is_confirmed(1.14 * step.value) and not step.is_confirmed(0.84 * step.value)


def test_the_wheels_have_no_torch_and_carry_the_kernels() -> None:
    found = gpu.wheels()
    assert not any(requirement.startswith("torch>") for requirement in found)
    assert {"liger-kernel", "torchao", "quack-kernels", "pytest"} <= set(found)
    assert any(requirement.startswith("transformers") for requirement in found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", sorted(gpu.STAGES.keys() - {"rl-vllm"}))
def test_every_stage_runs_in_miniature(tmp_path: Path, stage: str) -> None:
    """On the CPU, with tiny models; vLLM's sleep mode needs a GPU."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--miniature", "--rounds", "1", "--threads", "1"]
    command += ["--out", str(tmp_path), "--minutes", "25", "--stage", stage]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{stage}: done after" in done.stdout, done.stdout
    assert is_complete(tmp_path, stage)
    records = read_records(tmp_path)
    assert [record.case for record in records] == ([] if stage == "correctness" else [stage])
    for record in records:
        assert all(check.difference <= check.tolerance for check in record.checks) and record.command
        if stage.startswith("train-"):
            assert record.profiles and any(gpu_step.PLANNED in name for name in record.ratios)
        if stage in {"rl", "rl-0.6B"}:
            assert {"rollout", "score", "update", "push"} <= record.sides.keys()
