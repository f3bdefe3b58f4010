"""`kill -9` of any rank at any moment of a run with asynchronous saves leaves the previous checkpoint whole, and the
resumed run is bitwise the uninterrupted one."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from archon.checkpoint.atomic import KILL_POINTS
from archon.engine.engine import ArchonEngine
from archon.schema.config import EngineConfig
from tests.checkpoint.killing import AFTER_LATEST, assert_checkpoints_whole
from tests.conftest import Kills
from tests.distributed.cases import write_config
from tests.distributed.killed_run import RANKS, STEPS, Run

pytestmark = pytest.mark.xdist_group("ranks")

SAVE = 3
OF_EVERY_RANK = ("save.begin", "save.staged", "save.tensor", "save.tensors_written", "save.all_written", "save.end")
OF_RANK_0 = tuple(point for point in KILL_POINTS if point.startswith("save."))
QUICK = [("save.tensor", 3), ("save.renamed", 0)]
FURTHER = [(p, 0) for p in OF_RANK_0] + [(p, rank) for rank in (1, 3) for p in OF_EVERY_RANK]


class Reference:
    """A run that nothing interrupted, of a fresh model or of adapters of `base`."""

    def __init__(self, folder: Path, base: str | None = None) -> None:
        write_config(folder / "model" / "config", "tied")
        self.folder, self.base = folder, base
        (folder / "whole").mkdir()
        run = Run(folder / "whole", base=base)
        run.until_ready()
        begin = time.monotonic()
        assert run.finish() == [0] * RANKS
        self.seconds = time.monotonic() - begin
        self.digests = run.digests()
        (last,) = (folder / "whole" / "run").glob("step-*")
        boxes = json.loads((last / "index.json").read_text()).values()
        files = [box["file"] for item in boxes for box in item["boxes"]]
        self.tensors = [files.count(f"tensors-{rank:05d}.safetensors") for rank in range(RANKS)]

    def passage(self, point: str, rank: int) -> str:
        """The kill point in the save under test, as ARCHON_KILL_AT wants it."""
        if point == "save.tensor":
            return f"{point}:{(SAVE - 1) * self.tensors[rank] + self.tensors[rank] // 2}"
        return f"{point}:{SAVE - 1 if point == 'save.old_hidden' else SAVE}"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


def resume(reference: Reference, folder: Path) -> None:
    run = Run(folder, base=reference.base)
    assert run.finish() == [0] * RANKS
    assert run.digests() == reference.digests
    assert assert_checkpoints_whole(folder / "run") == STEPS
    assert [*(folder / "run").glob(".*")] == []


@pytest.mark.parametrize(
    ("point", "rank"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER if case not in QUICK)],
)
def test_kill_of_a_rank_inside_a_save_and_resume_is_bitwise(
    reference: Reference, point: str, rank: int, kills: Kills
) -> None:
    folder = reference.folder / f"{point}-{rank}"
    folder.mkdir()
    assert Run(folder, reference.passage(point, rank), rank).finish()[rank] == -signal.SIGKILL
    latest = assert_checkpoints_whole(folder / "run")
    if rank and point == "save.all_written":
        assert latest in (SAVE - 1, SAVE)  # rank 0 needs this one no more
    else:
        assert latest == (SAVE if point in AFTER_LATEST else SAVE - 1)
    resume(reference, folder)
    kills.add(point, rank=rank, latest_step=latest)


def assert_kills_resume_bitwise(reference: Reference, kills: Kills) -> None:
    """A run is killed until it has come to its end, then another is begun; the last one is let finish."""
    chance, number, latest = random.Random(3), 0, -1
    (reference.folder / "random0").mkdir()
    while kills.done < kills.wanted:
        folder = reference.folder / f"random{number}"
        run = Run(folder, base=reference.base)
        run.until_ready()
        victim, after = chance.randrange(RANKS), chance.uniform(0, reference.seconds)
        time.sleep(after)
        run.ranks[victim].kill()
        codes = run.finish()
        before, latest = latest, assert_checkpoints_whole(folder / "run")
        assert latest >= before
        if codes[victim] == -signal.SIGKILL:
            kills.add(f"{after:.3f} s", rank=victim, latest_step=latest)
        if latest >= STEPS - 1:
            resume(reference, folder)
            number, latest = number + 1, -1
            (reference.folder / f"random{number}").mkdir()
    resume(reference, reference.folder / f"random{number}")


@pytest.mark.slow
def test_kill_of_a_rank_at_random_moments_and_resume_is_bitwise(reference: Reference, kills: Kills) -> None:
    assert_kills_resume_bitwise(reference, kills)


@pytest.mark.slow
def test_kill_of_a_rank_that_trains_adapters_at_random_moments_and_resume_is_bitwise(
    tmp_path: Path, kills: Kills
) -> None:
    config = EngineConfig(path=write_config(tmp_path / "config", "tied"), device="cpu", init_from_scratch=True)
    engine = ArchonEngine(config)
    engine.initialize()
    engine.save(tmp_path / "base")
    assert_kills_resume_bitwise(Reference(tmp_path, str(tmp_path / "base")), kills)
