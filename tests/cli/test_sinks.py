"""Metrics sent elsewhere: exactly what metrics.jsonl receives, and nothing that a tracker does can end a run."""

from __future__ import annotations

import importlib.util
import io
import math
import sys
import textwrap

import pytest
from rich.console import Console

from archon.schema.config import MetricsConfig, OptimizerConfig
from archon.schema.errors import ConfigError
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner

# What W&B and Trackio have in common, in a module that keeps what it was asked.
STAND_IN = """
    calls, error = [], None

    class Run:
        def define_metric(self, name, step_metric):
            calls.append(("define_metric", name, step_metric))

        def log(self, numbers, step=None):
            if error is not None:
                raise error
            calls.append(("log", numbers, step))

        def finish(self, exit_code=0):
            calls.append(("finish", exit_code))

    def init(**facts):
        if error is not None:
            raise error
        calls.append(("init", facts))
        return Run()
"""
EVENTS = """
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append(("open", folder, purge_step))

        def add_scalar(self, name, value, step, walltime):
            calls.append(("scalar", name, value, step))

        def flush(self):
            pass

        def close(self):
            calls.append(("close",))
"""


@pytest.fixture
def trackers(tmp_path, monkeypatch):
    """Stand-ins of wandb and trackio as packages on the path: modules with `calls` and an `error` to raise."""
    names = ("wandb", "trackio")
    for name in names:
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(textwrap.dedent(STAND_IN))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def tensorboard(tmp_path, monkeypatch):
    path = tmp_path / "stand_in_tensorboard.py"
    path.write_text(textwrap.dedent(EVENTS))
    spec = importlib.util.spec_from_file_location("torch.utils.tensorboard", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return module


def open_run(folder, *sinks, resume=False, console=None):
    return Runner(folder, OptimizerConfig(lr=3e-4), resume=resume, sinks=MetricsConfig(sinks=sinks), console=console)


def logged(module):
    return [call[1:] for call in module.calls if call[0] == "log"]


def numbers_of(record):
    return {name: float(value) for name, value in record.items() if name not in ("step", "time")}


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_sinks_receive_what_the_file_receives(archon, command, request, trackers, tensorboard, tmp_path):
    overrides = request.getfixturevalue(f"{command}_overrides")
    done = archon(command, *overrides, "metrics.sinks=[wandb,trackio,tensorboard]", "metrics.project=sums")
    assert done.code == 0, done.err
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    assert logged(trackers["trackio"]) == [(numbers_of(record), record["step"]) for record in records]
    assert logged(trackers["wandb"]) == [({"step": record["step"]} | numbers_of(record), None) for record in records]
    scalars = [call[1:] for call in tensorboard.calls if call[0] == "scalar"]
    assert scalars == [(name, value, r["step"]) for r in records for name, value in numbers_of(r).items()]
    for module in trackers.values():
        kind, facts = module.calls[0]
        assert kind == "init" and (facts["project"], facts["name"]) == ("sums", "run")
        assert facts["config"]["total_steps"] == 2
        assert module.calls[-1] == ("finish", 0)
    assert ("define_metric", "*", "step") in trackers["wandb"].calls
    assert tensorboard.calls[0] == ("open", str(tmp_path / "run" / "tensorboard"), 1)
    assert tensorboard.calls[-1] == ("close",)


def test_what_is_no_finite_number_arrives_as_such_and_what_is_none_does_not(tmp_path, trackers):
    with open_run(tmp_path / "run", "trackio") as runner:
        numbers = {"loss": math.nan, "high": math.inf, "low": -math.inf, "on": True}
        runner.metrics.write(1, numbers | {"list": [1], "text": "x"})
    [(sent, step)] = logged(trackers["trackio"])
    assert step == 1 and sent.keys() == numbers.keys()
    assert math.isnan(sent["loss"]) and (sent["high"], sent["low"], sent["on"]) == (math.inf, -math.inf, 1.0)


@pytest.mark.parametrize(("sink", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_package_is_named_before_anything_is_made(archon, sft_overrides, tmp_path, monkeypatch, sink, module):
    monkeypatch.setitem(sys.modules, module, None)
    expected = f"metrics.sinks: {sink} cannot be imported"
    for dry_run in ((), ("--dry-run",)):
        complaint = archon("sft", *sft_overrides, f"metrics.sinks=[{sink}]", *dry_run).complaint
        assert expected in complaint and f"pip install 'archon-engine[{sink}]'" in complaint
        assert not (tmp_path / "run").exists()


def test_an_unknown_sink_is_refused(archon, sft_overrides):
    assert "metrics.sinks.0: got 'mlflow'" in archon("sft", *sft_overrides, "metrics.sinks=[mlflow]").complaint


def test_a_sink_that_cannot_be_started_ends_the_run_before_it_begins(tmp_path, trackers):
    trackers["wandb"].error = OSError("no network\nat all")
    with pytest.raises(ConfigError, match=r"wandb cannot be started \(OSError: no network at all\); fix it, or leave"):
        open_run(tmp_path / "run", "trackio", "wandb").__enter__()
    assert trackers["trackio"].calls[-1] == ("finish", 0), "what was started is closed"
    with open_run(tmp_path / "run"):
        pass  # nothing holds the directory, and nothing was recorded


def test_a_sink_that_fails_costs_one_warning_and_never_the_run(tmp_path, trackers):
    screen = io.StringIO()
    with open_run(tmp_path / "run", "wandb", "trackio", console=Console(file=screen, width=200)) as runner:
        for step in range(1, 6):
            trackers["wandb"].error = RuntimeError("quota\nexceeded") if step >= 3 else None
            runner.metrics.write(step, {"loss": 1.0 / step})
    assert [numbers["step"] for numbers, _ in logged(trackers["wandb"])] == [1, 2]
    assert [step for _, step in logged(trackers["trackio"])] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    warnings = [line for line in screen.getvalue().splitlines() if "warning" in line]
    assert warnings == [
        "warning: metrics no longer go to wandb, which failed (RuntimeError: quota exceeded); metrics.jsonl has them"
    ]


def test_a_record_is_on_disk_before_it_goes_anywhere(tmp_path, trackers):
    trackers["wandb"].Run.log = lambda self, numbers: trackers["wandb"].calls.append(
        ("seen", len(read_jsonl(tmp_path / "run" / "metrics.jsonl")))
    )
    with open_run(tmp_path / "run", "wandb") as runner:
        runner.metrics.write(1, {"loss": 1.0})
    assert ("seen", 1) in trackers["wandb"].calls


def test_a_run_that_an_error_ends_is_told_as_failed(tmp_path, trackers):
    with pytest.raises(ZeroDivisionError), open_run(tmp_path / "run", "wandb"):
        raise ZeroDivisionError
    assert trackers["wandb"].calls[-1] == ("finish", 1)


def test_a_resumed_run_goes_on_where_it_was(tmp_path, trackers, tensorboard):
    sinks = ("wandb", "trackio", "tensorboard")
    with open_run(tmp_path / "run", *sinks) as runner:
        for step in (1, 2, 3):
            runner.metrics.write(step, {"loss": 1.0})
    with open_run(tmp_path / "run", *sinks, resume=True) as runner:
        runner.rewind(1)
        runner.metrics.write(2, {"loss": 2.0})
    first, again = (call[1] for call in trackers["wandb"].calls if call[0] == "init")
    assert first["id"] == again["id"] and first["resume"] == again["resume"] == "allow"
    assert [call[1]["resume"] for call in trackers["trackio"].calls if call[0] == "init"] == ["never", "allow"]
    opened = [call[2] for call in tensorboard.calls if call[0] == "open"]
    assert opened == [1, 2], "from step 2 on, what the first process wrote is void"
    with open_run(tmp_path / "another", "wandb"):
        pass
    assert trackers["wandb"].calls[-3][1]["id"] != first["id"]


def test_without_sinks_nothing_is_imported(tmp_path, trackers):
    for name in trackers:
        del sys.modules[name]
    with open_run(tmp_path / "run") as runner:
        runner.metrics.write(1, {"loss": 1.0})
    assert trackers.keys().isdisjoint(sys.modules)


def test_tensorboard_reads_what_the_file_says_and_of_repeated_steps_the_last(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_run(tmp_path / "run", "tensorboard") as runner:
        for step in (1, 2, 3):
            runner.metrics.write(step, {"loss": 1.0 / step, "eval/reward": math.nan, "rollout/dropped/x": step})
    with open_run(tmp_path / "run", "tensorboard", resume=True) as runner:
        runner.rewind(1)
        runner.metrics.write(2, {"loss": 20.0})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), purge_orphaned_data=True).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "eval/reward", "rollout/dropped/x"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    times = [record["time"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert [event.wall_time for event in events.Scalars("loss")] == pytest.approx(times)
    assert math.isnan(events.Scalars("eval/reward")[0].value)
