"""What the guide of environments shows is run unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from archon.rl import GenerationHyperparameters, RLTrainer
from archon.rl.config import RLConfig
from archon.rl.environments import EnvironmentWorkflow
from tests.serve.scripted import Scripted
from tests.test_readme import shown


@pytest.mark.slow
def test_the_run_on_a_game_is_made_as_the_guide_shows(short_run: Callable[..., RLConfig], tmp_path: Path) -> None:
    given = yaml.safe_load(shown("game", "yaml")) | {"run_dir": str(tmp_path / "guess"), "total_steps": 1}
    given["gconfig"]["n_samples"] = 2
    assert RLTrainer(short_run(**given)).train()["turns"] >= 1


def test_the_environment_of_the_guide_scores_its_actions(
    speaker: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "guide_environment.py").write_text(shown("own"))
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=8)
    workflow = EnvironmentWorkflow(gconfig, speaker, "guide_environment.Parity")
    group = asyncio.run(workflow.arun_episode(Scripted(speaker, ["odd", "even"]), {"seed": 4}))
    assert group is not None and sorted(group["rewards"].tolist()) == [0.0, 1.0]
