"""`kill -9` at any moment of a save leaves the previous checkpoint whole, and the resumed run is bitwise the other.

The number of kills at random moments is the fixture's (`ARCHON_KILLS`).
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from archon.checkpoint.atomic import KILL_POINTS
from tests.checkpoint import killing
from tests.checkpoint.tiny_checkpoints import make_checkpoint
from tests.conftest import Kills
from tests.engine.tiny import make_engine

SAVE_POINTS = [point for point in KILL_POINTS if point.startswith("save.")]
EXPORT_POINTS = [point for point in KILL_POINTS if point.startswith("export.")]


def run_to_the_end(folder: Path, *base: str) -> tuple[str, float]:
    """The digest of a run that is never killed, and the seconds it took."""
    process = killing.start(killing.train, folder, *base)
    while not (folder / "ready").exists():
        assert process.is_alive()
        time.sleep(0.005)
    begin = time.monotonic()
    assert killing.finish(process) == 0
    return (folder / "digest").read_text(), time.monotonic() - begin


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    return run_to_the_end(tmp_path_factory.mktemp("uninterrupted"))


def test_every_kill_point_is_of_a_save_or_an_export() -> None:
    assert sorted(KILL_POINTS) == sorted(SAVE_POINTS + EXPORT_POINTS)


def test_a_run_is_bitwise_the_same_twice(tmp_path: Path, uninterrupted: tuple[str, float]) -> None:
    assert killing.finish(killing.start(killing.train, tmp_path)) == 0
    assert (tmp_path / "digest").read_text() == uninterrupted[0]


def kill_inside(folder: Path, point: str, save: int, kills: Kills) -> None:
    """Kill inside the given save, check what is left, resume to the end."""
    process = killing.start(killing.train, folder, kill_at=killing.passage(point, save))
    assert killing.finish(process) == -signal.SIGKILL
    # A first save that was killed between its rename and its pointer is whole, and there is no other.
    is_first = save == 1 and point in ("save.renamed", "save.latest_written")
    expected = save if point in killing.AFTER_LATEST or is_first else save - 1
    latest = killing.assert_checkpoints_whole(folder / "run")
    assert latest == (expected or -1)
    assert killing.finish(killing.start(killing.train, folder)) == 0
    assert [*(folder / "run").glob(".*")] == []
    kills.add(point, save=save, latest_step=latest)


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_kill_inside_a_save_leaves_the_previous_checkpoint_and_resume_is_bitwise(
    tmp_path: Path, point: str, uninterrupted: tuple[str, float], kills: Kills
) -> None:
    kill_inside(tmp_path, point, 4, kills)
    assert (tmp_path / "digest").read_text() == uninterrupted[0]


@pytest.mark.parametrize("point", [point for point in SAVE_POINTS if point != "save.old_hidden"])
def test_kill_inside_the_first_save(tmp_path: Path, point: str, uninterrupted: tuple[str, float], kills: Kills) -> None:
    kill_inside(tmp_path, point, 1, kills)
    assert (tmp_path / "digest").read_text() == uninterrupted[0]


def assert_kills_resume_bitwise(folder: Path, reference: tuple[str, float], kills: Kills, *base: str) -> None:
    """Run that end before they are killed are restarted and do not count."""
    digest, seconds = reference
    chance, run, finished, latest = random.Random(3), 0, 0, -1
    while kills.done < kills.wanted or not finished:
        current = folder / str(run)
        current.mkdir(exist_ok=True)
        process = killing.start(killing.train, current, *base)
        if kills.done < kills.wanted:
            after = killing.kill_at_random(process, current / "ready", seconds / 2, chance)
        before, latest = latest, killing.assert_checkpoints_whole(current / "run")
        assert latest >= before
        if killing.finish(process) == 0:
            assert (current / "digest").read_text() == digest
            run, finished, latest = run + 1, finished + 1, -1
        else:
            assert process.exitcode == -signal.SIGKILL
            kills.add(f"{after:.3f} s", latest_step=latest)


def test_kill_at_random_moments_of_a_run_and_resume_is_bitwise(
    tmp_path: Path, uninterrupted: tuple[str, float], kills: Kills
) -> None:
    assert_kills_resume_bitwise(tmp_path, uninterrupted, kills)


@pytest.mark.slow
def test_kill_at_random_moments_of_training_adapters_and_resume_is_bitwise(tmp_path: Path, kills: Kills) -> None:
    base = tmp_path / "base"
    make_engine(tmp_path).save(base)
    (tmp_path / "whole").mkdir()
    assert_kills_resume_bitwise(tmp_path, run_to_the_end(tmp_path / "whole", str(base)), kills, str(base))


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "old", seed=1)
    make_checkpoint(tmp_path / "new", seed=2)
    return tmp_path


@pytest.mark.parametrize("point", EXPORT_POINTS)
def test_kill_inside_an_export_leaves_the_previous_or_the_new_one(two_models: Path, point: str, kills: Kills) -> None:
    killing.export(two_models, "old")
    assert killing.finish(killing.start(killing.export, two_models, "new", kill_at=point)) == -signal.SIGKILL
    found = killing.which_export(two_models)
    assert found == ("new" if point in killing.AFTER_PUBLISHING else "old")
    killing.export(two_models, "new")
    assert killing.which_export(two_models) == "new"
    assert [*two_models.glob(".*")] == []
    kills.add(point, export_found=found)


@pytest.mark.parametrize("point", EXPORT_POINTS)
def test_kill_inside_the_first_export_leaves_none_or_the_whole(two_models: Path, point: str, kills: Kills) -> None:
    assert killing.finish(killing.start(killing.export, two_models, "new", kill_at=point)) == -signal.SIGKILL
    published = point in killing.AFTER_PUBLISHING
    assert (two_models / "out").exists() is published
    assert not published or killing.which_export(two_models) == "new"
    kills.add(point, export_found="new" if published else None)


def test_kill_at_random_moments_of_exports(two_models: Path, kills: Kills) -> None:
    killing.export(two_models, "old")
    chance = random.Random(4)
    while kills.done < kills.wanted:
        process = killing.start(killing.export_in_turns, two_models)
        after = killing.kill_at_random(process, two_models / "ready", 0.5, chance)
        assert process.exitcode == -signal.SIGKILL
        kills.add(f"{after:.3f} s", export_found=killing.which_export(two_models))
    killing.export(two_models, "old")
    assert killing.which_export(two_models) == "old"
    assert [*two_models.glob(".*")] == []
