"""The table of what moves from Trinity-RFT: every row that works is exercised, and the page has exactly these rows."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from archon.generation import InProcessEngine
from tests.rl import rewards_for_tests as rewards
from tests.rl.compat.trinity.checkpoints import write_judge
from tests.rl.compat.trinity.conftest import GCONFIG
from tests.rl.compat.trinity.migration import README, ROWS, Row, Tools, written
from tests.small_qwen3 import small_model

WORKS = [row for row in ROWS if row.status == "works"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge"), "[1,0]")


@pytest.fixture
def engine(tokenizer: Any) -> InProcessEngine:
    """With room for the prompts of environments and agents, a token a character."""
    return InProcessEngine.from_model(small_model(len(tokenizer), max_seq_len=1024), tokenizer, max_slots=8)


@pytest.mark.slow
@pytest.mark.parametrize("row", WORKS, ids=[re.sub(r"[^\w]+", "_", row.name)[:60] for row in WORKS])
def test_what_the_table_says_works_does(adapted: Any, run_episode: Any, judge: Path, row: Row) -> None:
    def episode(workflow: Any, n_samples: int = 4, **arguments: Any) -> Any:
        given = {"reward_fn": rewards.count_digits, "gconfig": GCONFIG.new(n_samples=n_samples)} | arguments
        result, _ = run_episode(adapted(workflow, **given))
        return result

    assert row.exercise is not None
    served = {"model_path": str(judge), "dtype": "float32", "device": "cpu", "max_response_tokens": 8}
    row.exercise(Tools(episode, served))


def test_the_page_has_the_table() -> None:
    page = README.read_text()
    assert page == written(page), "run python -m tests.rl.compat.trinity.migration"


def test_every_name_of_archons_in_the_table_is_there() -> None:
    for row in ROWS:
        for path in re.findall(r"`(archon\.[\w.]+)`", row.note):
            module, _, name = path.rpartition(".")
            try:
                assert getattr(importlib.import_module(module), name) is not None
            except AttributeError:
                importlib.import_module(path)
