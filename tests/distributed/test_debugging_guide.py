"""docs/tasks/debug.md: its commands run, and say what the page says they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from archon.generation.types import GeneratorConfig
from archon.parallel import dims, process_group
from archon.rl.config import ControlConfig
from archon.schema.config import EngineConfig
from tests.distributed.cases import write_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tasks" / "debug.md"
TESTED = ["collectives: correct in every group", "replicas after a step: bitwise equal"]
TOLD = {"hangs": TESTED, "memory": ["parameters", "2 × h100-80gb", "rank 3 of 4"], "communication": TESTED}


def block(name: str, language: str) -> str:
    found = re.search(rf"<!-- test: {name} -->\n```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found, name
    return found[1]


def run(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    scripts = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_its_commands_run(name: str, tmp_path: Path) -> None:
    write_config(tmp_path / "start", "dense")
    told = ""
    for line in block(name, "bash").splitlines():
        words = line.split()
        program = {
            "archon": [sys.executable, "-m", "archon"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        }
        done = run(tmp_path, program[words[0]] + words[1:])
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        told += done.stdout
    assert all(words in told for words in TOLD[name]), told


@pytest.mark.slow
def test_a_tensor_that_differs_is_named_on_the_ranks_that_hold_it(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(block("wrong", "python"))
    done = run(tmp_path, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "wrong.py"])
    assert done.returncode == 0, done.stderr
    assert (
        "norm differs between ranks: rank 0: torch.float32 [4], sum 4; rank 1: torch.float32 [4], sum 4.00000"
        in done.stdout
    )
    assert "rank 0: differs" in done.stdout and "rank 1: differs" in done.stdout


@pytest.mark.slow
def test_its_time_limit_is_set(tmp_path: Path) -> None:
    code = block("timeout", "python") + (
        "from torch.distributed import distributed_c10d\n"
        "print(distributed_c10d._get_default_timeout('gloo'), distributed_c10d._get_default_timeout('nccl'))\n"
    )
    assert run(tmp_path, [sys.executable, "-c", code]).stdout.split() == ["0:05:00", "0:05:00"]


def test_the_page_names_settings_and_messages_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in ("stall_s", "timeout_s", "max_tokens_per_mb", "activation_checkpoint", "compile"):
        assert name in page and name in EngineConfig.model_fields
    assert "activation_checkpoint: {mode: auto}" in page
    EngineConfig.model_validate({"path": "start", "activation_checkpoint": {"mode": "auto"}})
    assert "generator.memory_gib" in page and "memory_gib" in GeneratorConfig.model_fields
    assert "control.shuffle_rewards" in page and "shuffle_rewards" in ControlConfig.model_fields
    sources = "".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in (dims, process_group))
    for message in (
        "dp_replicate × dp_shard × cp × tp × pp = ",
        "the layout needs ",
        " cannot join the others within ",
    ):
        assert message in page and message in sources
