"""A configuration of AReaL is refused in one line that says where archon's keys are."""

from __future__ import annotations

from pathlib import Path

import pytest

from archon.cli import main


@pytest.mark.parametrize("command", ["rl", "sft", "preference"])
def test_a_configuration_of_areal_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gsm8k.yaml"
    file.write_text("experiment_name: gsm8k\ntrial_name: first\nactor: {path: model, eps_clip: 0.4}\n")
    with pytest.raises(SystemExit):
        main([command, "--config", str(file), "--dry-run"])
    error = capsys.readouterr().err
    assert "experiment_name is a key of AReaL" in error and "docs/moving/areal.md" in error
