"""`sft` and `rl` in a layout do what they do on one process: the same documents, samples, metrics and weights."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from archon.checkpoint.hf_io import load_model
from archon.engine.engine import ArchonEngine
from archon.parallel.control_plane import ControlPlane
from archon.rl import SFTTrainer
from archon.rl.bootstrap import warm_up
from archon.rl.experience_buffer import ExperienceBuffer
from archon.schema.errors import ConfigError
from archon.tools.check.rank_pool import Pool, RankError
from archon.training.config import WarmupConfig
from archon.training.metrics import read_jsonl
from tests.distributed.runs import explore_and_train, make_inputs, rl_config, sft_config, train_rl, train_sft
from tests.tolerances import SAME_RUN

pytestmark = pytest.mark.xdist_group("ranks")

# One process samples with its own weights and pushes what it packs; ranks gather theirs for a generator.
OF_THE_LAYOUT = ("seconds/", "samples_per_second", "tokens_per_second", "time", "micro_batches", "push/bytes")
SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("t2", "c2", "p2", "d2t2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def sft_alone(folder: Path) -> dict[str, Tensor]:
    return train_sft(str(folder), "d1", {})


@pytest.fixture(scope="module")
def rl_alone(folder: Path) -> dict[str, Tensor]:
    return train_rl(str(folder), "d1", {})


def processes(layout: str) -> int:
    return 4 if layout == "d2t2" else 2


def records(run_dir: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    rows = read_jsonl(Path(run_dir) / name)
    return [{key: value for key, value in row.items() if not key.startswith(OF_THE_LAYOUT)} for row in rows]


def assert_same(found: Any, expected: Any) -> None:
    """Equal, but for the rounding of floats."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=SAME_RUN, abs=SAME_RUN)
    else:
        assert found == expected


def assert_same_weights(ranks: list[dict[str, Tensor]], alone: dict[str, Tensor], run_dir: str) -> None:
    """Every rank has the same, which are those of the run on one process and of the export."""
    exported = dict(load_model(Path(run_dir) / "export").named_parameters())
    assert exported.keys() <= alone.keys()
    for name, tensor in alone.items():
        for weights in ranks:
            assert weights[name].equal(ranks[0][name])
        torch.testing.assert_close(ranks[0][name], tensor, rtol=0, atol=SAME_RUN)
        if name in exported:
            assert exported[name].equal(ranks[0][name])


@pytest.mark.parametrize("layout", ["d2", *SLOW])
def test_sft_trains_the_same_global_batches(
    layout: str, folder: Path, sft_alone: dict[str, Tensor], ranks: Callable[[int], Pool]
) -> None:
    """Nine rows a batch and 23 held-out ones: no rank's share is equal to the others'."""
    weights = ranks(processes(layout)).run(train_sft, str(folder), layout, {})
    config = sft_config(folder, layout)
    assert_same(records(config.run_dir), records(sft_config(folder, "d1").run_dir))
    assert_same_weights(weights, sft_alone, config.run_dir)


def test_a_batch_and_held_out_rows_may_be_fewer_than_the_ranks(
    folder: Path, ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    """The second batch of an epoch of 90 rows has one row, and one row is held out."""
    held_out = {"path": str(folder), "split": "test", "limit": 1}
    changes = {"total_steps": None, "batch_size": 89, "eval_data": held_out}
    one, two = ({"run_dir": str(tmp_path / layout), **changes} for layout in ("d1", "d2"))
    alone = train_sft(str(folder), "d1", one)
    weights = ranks(2).run(train_sft, str(folder), "d2", two)
    assert len(records(two["run_dir"])) == 2
    # A rank without a row computes an untrained copy of one.
    computed = {"tokens": 0, "tokens_computed": 0}
    for found, expected in zip(records(two["run_dir"]), records(one["run_dir"]), strict=True):
        assert_same(found | computed, expected | computed)
    assert_same_weights(weights, alone, two["run_dir"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2", *SLOW])
def test_rl_samples_and_trains_the_same(
    layout: str, folder: Path, rl_alone: dict[str, Tensor], ranks: Callable[[int], Pool]
) -> None:
    """With refills, two minibatches, a reference model and both evaluations."""
    weights = ranks(processes(layout)).run(train_rl, str(folder), layout, {})
    config, alone = rl_config(folder, layout), rl_config(folder, "d1")
    assert_same(records(config.run_dir), records(alone.run_dir))
    assert_same(records(config.run_dir, "trajectories.jsonl"), records(alone.run_dir, "trajectories.jsonl"))
    assert_same_weights(weights, rl_alone, config.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [("d2", "t2"), ("p2", "d2")], ids=" then ".join)
def test_explorer_and_trainer_of_several_processes_do_as_those_of_one(
    layouts: tuple[str, str], ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    """The explorer loads what the trainer has saved in another layout, and each step's groups are there once."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        make_inputs(folder)
    explore_and_train(str(alone), "d1", "d1")
    ranks(2).run(explore_and_train, str(shared), *layouts)
    for mode in ("explore", "train"):
        assert_same(records(str(shared / mode)), records(str(alone / mode)))
    both = [ExperienceBuffer(folder / "buffer.db") for folder in (alone, shared)]
    assert len(both[0]) == len(both[1]) >= 8
    for one, other in zip(*(buffer.read(range(len(buffer))) for buffer in both), strict=True):
        assert one.prompt == other.prompt
        assert one.trajectories is not None and other.trajectories is not None
        torch.testing.assert_close(other.trajectories, one.trajectories, rtol=0, atol=SAME_RUN)


def test_a_run_goes_on_where_it_stood(
    folder: Path, sft_alone: dict[str, Tensor], ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Bitwise: with steps saved one after the other, and a second start that finds them."""
    changes = {"run_dir": str(tmp_path / "run"), "resume": True, "checkpoint": {"every": 2}}
    ranks(2).run(train_sft, str(folder), "d2", changes | {"total_steps": 2})
    halves = ranks(2).run(train_sft, str(folder), "d2", changes)
    whole = ranks(2).run(train_sft, str(folder), "d2", {"run_dir": str(tmp_path / "whole")})
    for found, expected in zip(halves, whole, strict=True):
        assert all(found[name].equal(expected[name]) for name in expected)


def test_sft_evaluates_unequal_numbers_of_micro_batches(
    folder: Path, ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Held-out rows are too long for two of them to be one micro-batch: of nine a rank has five, the other four."""
    most = 9
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    assert 2 * min(len(row["prompt"] + row["response"]) for row in rows) > most

    def changes(layout: str) -> dict[str, Any]:
        model = sft_config(folder, layout).model.model_dump() | {"max_tokens_per_mb": most}
        return {"run_dir": str(tmp_path / layout), "total_steps": 2, "model": model}

    train_sft(str(folder), "d1", changes("d1"))
    ranks(2).run(train_sft, str(folder), "d2", changes("d2"), timeout=60.0)
    found, alone = records(str(tmp_path / "d2")), records(str(tmp_path / "d1"))
    assert "eval/loss" in alone[-1]
    assert_same(found, alone)


def train_until_one_rank_has_enough(folder: str, run_dir: str) -> int:
    """The steps done where the probe of rank 1 alone says at the second that it is enough."""

    def probe(engine: ArchonEngine, step: int) -> tuple[dict[str, float], bool]:
        return {}, step == 2 and ControlPlane.world().rank == 1

    trainer = SFTTrainer(sft_config(Path(folder), "d2", run_dir=run_dir), probe=probe)
    trainer.train()
    return trainer.step


def test_one_rank_that_has_enough_ends_the_run_on_all(
    folder: Path, ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    found = ranks(2).run(train_until_one_rank_has_enough, str(folder), str(tmp_path / "run"), timeout=60.0)
    assert found == [2, 2]
    assert (tmp_path / "run" / "export").is_dir()


def warm_up_with_a_late_signal(folder: str, run_dir: str) -> int:
    """What the warm-up returns where a signal reaches rank 1 alone, after the last step, while it exports."""
    save = ArchonEngine.save

    def save_then_signal(engine: ArchonEngine, *args: Any, **kwargs: Any) -> None:
        save(engine, *args, **kwargs)
        if ControlPlane.world().rank == 1:
            signal.raise_signal(signal.SIGTERM)

    warmup = WarmupConfig.parse({"total_steps": 2, "batch_size": 9, "train_data": {"path": folder}})
    with mock.patch.object(ArchonEngine, "save", save_then_signal):
        return warm_up(warmup, sft_config(Path(folder), "d2").model, Path(run_dir))


def test_a_signal_to_one_rank_late_in_a_warm_up_stops_all(
    folder: Path, ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Or one would leave, and the others go on to make the checkpoint with it."""
    found = ranks(2).run(warm_up_with_a_late_signal, str(folder), str(tmp_path / "run"), timeout=60.0)
    assert found == [signal.SIGTERM] * 2


def train_with_own_rows_held_out(folder: str, elsewhere: str) -> str:
    """What this rank is told where, beneath one path, it finds other held-out rows than the other."""
    machine = Path(elsewhere) / str(ControlPlane.world().rank)
    (machine / "held_out").mkdir(parents=True)
    rows = (Path(folder) / "test.jsonl").read_text().splitlines()
    (machine / "held_out" / "test.jsonl").write_text("\n".join(rows[: 5 + 9 * ControlPlane.world().rank]))
    changes = {"run_dir": f"{elsewhere}/run", "eval_data": {"path": "held_out", "split": "test"}}
    try:
        with chdir(machine):
            train_sft(folder, "d2", changes)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_other_held_out_rows_on_another_rank_are_refused(
    folder: Path, ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    """The ranks would evaluate different numbers of batches."""
    for message in ranks(2).run(train_with_own_rows_held_out, str(folder), str(tmp_path), timeout=60.0):
        assert re.fullmatch(
            r"rank 1 has held_out/test.jsonl=511 bytes .*, rank 0 has 179 bytes .*; every machine needs the same files",
            message,
        )


def test_fewer_rows_than_ranks_are_refused(folder: Path, ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    changes = {"run_dir": str(tmp_path / "run"), "batch_size": 1}
    with pytest.raises(RankError, match=r"batch_size = 1 leaves some of the 2 data-parallel ranks without a document"):
        ranks(2).run(train_sft, str(folder), "d2", changes)
