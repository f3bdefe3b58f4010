"""Rollouts that run ahead of a trainer with several ranks, on two servers: as bounded as in one process."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.parallel.layout import parse_layout
from archon.tools.check.rank_pool import Pool
from archon.training.metrics import read_jsonl
from tests.distributed.ahead import BATCH, N_SAMPLES, run_config, train
from tests.distributed.runs import make_inputs
from tests.distributed.test_failing import GRACE_SECONDS, torchrun
from tests.remote.twin import VLLMTwin
from tests.rl.conftest import fresh_checkpoint

pytestmark = pytest.mark.xdist_group("ranks")

STEPS = 5
ALL = os.environ.get("ARCHON_AHEAD") == "all"
"""Whether every case is run, as by `make test-ahead`, or a sample."""
LAYOUTS = ("d2", "t2", "p2", "d2t2")
STALENESS = (0, 2, 8)
FAST, SAMPLE = ("d2", 2), ("d2t2", 8)


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    make_inputs(folder)
    return folder / "blank"


@pytest.fixture(scope="module")
def servers(blank: Path) -> Iterator[list[VLLMTwin]]:
    """Two, of few slots, so that pushes interrupt answers."""
    checkpoint = fresh_checkpoint(blank, blank.parent / "served")
    started = [VLLMTwin(checkpoint, max_slots=2) for _ in range(2)]
    yield started
    for server in started:
        server.stop()


@pytest.fixture
def folder(blank: Path, tmp_path: Path) -> Path:
    (tmp_path / "blank").symlink_to(blank)
    return tmp_path


def trained(folder: Path) -> list[int]:
    """The prompts in the dump of trajectories."""
    rows = read_jsonl(folder / "run" / "trajectories.jsonl")
    return [group for _, group in sorted({(row["step"], row["group"]) for row in rows})]


def assert_shares(seen: list[dict[str, Any]]) -> None:
    """Data-parallel ranks train on disjoint rows, together on all of the batch; other ranks as theirs do."""
    parts = {rank["dp"]: rank["own"] for rank in seen}
    assert all(rank["own"] == parts[rank["dp"]] for rank in seen)
    for step, rows in enumerate(seen[0]["rows"]):
        own = [part[step] for part in parts.values()]
        assert rows.total() == BATCH * N_SAMPLES and all(own)
        assert sum(own, Counter()) == rows


@pytest.mark.parametrize(
    ("layout", "staleness"),
    [
        FAST,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(LAYOUTS, STALENESS)
            if case == SAMPLE or (ALL and case != FAST)
        ),
    ],
)
def test_every_prompt_is_trained_once_and_no_token_is_too_old(
    layout: str, staleness: int, folder: Path, servers: list[VLLMTwin], ranks: Callable[[int], Pool]
) -> None:
    for server in servers:
        server.requests.clear()
    config = run_config(folder, layout, staleness, [server.url for server in servers])
    seen = ranks(parse_layout(layout).world_size).run(train, config)
    first = seen[0]
    assert all(rank["prompts"] == first["prompts"] and rank["rows"] == first["rows"] for rank in seen)
    assert all(rank["version"] == STEPS for rank in seen)
    prompts = [index for step in first["prompts"] for index in step]
    assert len(prompts) == len(set(prompts)) == STEPS * BATCH
    assert set(prompts) <= set(range((STEPS + staleness) * BATCH)), "more prompts were taken than the bound admits"
    assert all(0 <= age <= staleness for age in first["ages"])
    assert (max(first["ages"]) > 0) == (staleness > 0), "nothing ran ahead, so nothing was tested"
    assert_shares(seen)
    assert all(len(server.generated()) > N_SAMPLES * BATCH for server in servers)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("d2", "t2")], ids=" then ".join)
def test_a_signal_to_one_rank_ends_a_rollout_and_the_resumed_run_trains_each_prompt_once(
    before: str, after: str, folder: Path, servers: list[VLLMTwin], ranks: Callable[[int], Pool]
) -> None:
    """Of what ran ahead when it was stopped nothing is lost, in another layout either."""
    urls = [server.url for server in servers]
    waits = {"workflow": "tests.distributed.ahead.WaitsInStep3", "resume": True}
    seen = ranks(2).run(train, run_config(folder, before, 2, urls, **waits), True, timeout=60)
    assert [(rank["exit_code"], rank["step"]) for rank in seen] == [(143, 2)] * 2
    assert len(trained(folder)) == 2 * BATCH
    ranks(2).run(train, run_config(folder, after, 2, urls, resume=True))
    assert len(trained(folder)) == len(set(trained(folder))) == STEPS * BATCH
    assert set(range(2 * BATCH)) <= set(trained(folder))


@pytest.mark.slow
def test_in_process_the_controllers_generator_answers_while_all_train(
    folder: Path, ranks: Callable[[int], Pool]
) -> None:
    evaluation = {"eval_data": {"path": "arithmetic", "split": "test"}, "evaluation": {"every": 2, "max_prompts": 4}}
    seen = ranks(2).run(train, run_config(folder, "d2", 2, None, **evaluation))
    assert len(trained(folder)) == len(set(trained(folder))) == STEPS * BATCH
    assert 0 < max(seen[0]["ages"]) <= 2
    assert_shares(seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ("LosesARankInStep3", r"archon: rank 1 \(process \d+ on \S+\) died"),
        *([("FailsInStep3", "archon: this can never be asked")] if ALL else []),
    ],
)
def test_what_ends_one_rank_ends_all_within_seconds_with_one_error(
    workflow: str, message: str, folder: Path, servers: list[VLLMTwin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the others wait for a batch that never comes."""
    changes = {"workflow": f"tests.distributed.ahead.{workflow}"}
    config = run_config(folder, "d2", 2, [server.url for server in servers], **changes)
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    monkeypatch.setenv("ENDS_IN", str(folder / "end"))
    code, output, ended = torchrun("archon", "rl", "--config", str(folder / "run.yaml"))
    assert code == 1
    # torchrun asks those that are left to end, of which rank 0 tells.
    errors = [
        line for line in output.splitlines() if line.startswith("archon: ") and "saving, then exiting" not in line
    ]
    assert len(errors) == (3 if "died" in message else 1) and re.search(message, errors[0]), output
    assert ended - float((folder / "end").read_text()) < GRACE_SECONDS
