"""Starts of a run and of an engine in which rank 1 differs from rank 0 in one thing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from archon.engine.engine import ArchonEngine
from archon.parallel.control_plane import ControlPlane
from archon.rl import RLTrainer, SFTTrainer
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.training.config import SFTConfig
from archon.training.loop import join_processes
from tests.distributed.runs import rl_config

Change = Callable[[Path, dict[str, Any]], None]
SAVED = "saved/checkpoints/step-00000001"


def set_field(key: str, value: Any) -> Change:
    """Set a dotted key of the configuration."""

    def change(_: Path, values: dict[str, Any]) -> None:
        *sections, name = key.split(".")
        for section in sections:
            values = values.setdefault(section, {})
        values[name] = value

    return change


def replace_text(file: str, old: str, new: str) -> Change:
    """Replace text in a file, whose size stays the same."""
    assert len(old) == len(new)

    def change(machine: Path, _: dict[str, Any]) -> None:
        text = (machine / file).read_text()
        assert old in text
        (machine / file).write_text(text.replace(old, new, 1))

    return change


def change_last_weight(file: str, tensor: str) -> Change:
    """Change the last number of a tensor."""

    def change(machine: Path, _: dict[str, Any]) -> None:
        tensors = load_file(machine / file)
        tensors[tensor].view(-1)[-1] += 1
        save_file(tensors, machine / file, metadata={"format": "pt"})

    return change


def change_last_byte(file: str) -> Change:
    """Change the last byte of a file."""

    def change(machine: Path, _: dict[str, Any]) -> None:
        content = bytearray((machine / file).read_bytes())
        content[-1] ^= 1
        (machine / file).write_bytes(content)

    return change


def install_another_numpy(machine: Path, _: dict[str, Any]) -> None:
    """Make importlib.metadata find another version of numpy first."""
    folder = machine / "numpy-9.9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")


def set_environment(*_: Any) -> None:
    """Set a variable that turns TF32 off."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


def lower_precision(*_: Any) -> None:
    """Let torch compute float32 matmuls in TF32."""
    torch.set_float32_matmul_precision("high")


CHANGES: dict[str, Change] = {
    "environment": set_environment,
    "precision": lower_precision,
    "learning rate": set_field("model.optimizer.lr", 0.002),
    "seed": set_field("seed", 7),
    "section": set_field("model.optimizer", None),
    "run_dir": set_field("run_dir", "elsewhere"),
    "package": install_another_numpy,
    "weight": change_last_weight("checkpoint/model.safetensors", "model.norm.weight"),
    "tokenizer": replace_text("checkpoint/tokenizer.json", '"7": ', '"X": '),
    "missing file": lambda machine, _: (machine / "checkpoint" / "generation_config.json").unlink(),
    "adapter": change_last_weight(
        "adapter/adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    ),
    "saved state": change_last_byte(f"{SAVED}/tensors.safetensors"),
    "data": replace_text("train.jsonl", '"15="', '"16="'),
    "rows of a function": replace_text("rows_of_rank.py", "COUNT = 20", "COUNT = 19"),
    "rows from data": replace_text("count.txt", "20", "19"),
    "reward": replace_text("rewards_of_rank/score.py", "1.0", "0.5"),
    "helper of the reward": replace_text("rewards_of_rank/helper.py", "1", "2"),
}


@contextmanager
def machine_of_rank(folder: str, elsewhere: str, change: str, values: dict[str, Any]) -> Iterator[None]:
    """Enter a copy of `folder` for this rank, in which `change` is applied on rank 1."""
    rank = ControlPlane.world().rank
    machine = Path(elsewhere) / f"{change}-{rank}"
    shutil.copytree(folder, machine)
    if rank == 1:
        CHANGES[change](machine, values)
    sys.path.insert(0, str(machine))
    try:
        with chdir(machine):
            yield
    finally:
        os.environ.pop("NVIDIA_TF32_OVERRIDE", None)
        torch.set_float32_matmul_precision("highest")
        sys.path.remove(str(machine))
        for name in ("rows_of_rank", "rewards_of_rank", "rewards_of_rank.score", "rewards_of_rank.helper"):
            sys.modules.pop(name, None)


def start_runs(folder: str, elsewhere: str, starts: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return what this rank reports for each (change, fields) of an SFT run; "trained" if it runs."""
    reports = []
    for change, fields in starts:
        values = sft_values(f"{elsewhere}/run-{change}") | fields
        with machine_of_rank(folder, elsewhere, change, values):
            try:
                SFTTrainer(SFTConfig.parse(values)).train()
                reports.append("trained")
            except ConfigError as error:
                reports.append(str(error))
    return reports


def sft_values(run_dir: str, layout: str = "d2") -> dict[str, Any]:
    """Return the fields of an SFT run in the folder of a machine."""
    return {
        "run_dir": run_dir,
        "total_steps": 1,
        "batch_size": 4,
        "model": {"path": "checkpoint", "device": "cpu", "layout": layout, "optimizer": {"lr": 1e-3}},
        "train_data": {"path": "train.jsonl"},
    }


def start_rl_runs(folder: str, elsewhere: str, changes: list[str]) -> list[str]:
    """Return what this rank reports for each change of an RL run."""
    reports = []
    for change in changes:
        with machine_of_rank(folder, elsewhere, change, {}):
            fields = {"reward": "rewards_of_rank.score.one", "run_dir": f"{elsewhere}/rl-{change}"}
            config = rl_config(Path(folder), "d2", **fields)
            try:
                RLTrainer(join_processes(config, config.actor))
                reports.append("joined")
            except ConfigError as error:
                reports.append(str(error))
    return reports


def start_engines(folder: str, elsewhere: str, starts: list[tuple[str, int]]) -> list[str]:
    """Return what this rank reports for each (change, total_steps on rank 1) of an engine that a script initializes."""
    reports = []
    for change, total_steps in starts:
        values: dict[str, Any] = {"model": sft_values("")["model"]}
        with machine_of_rank(folder, f"{elsewhere}/engines-{total_steps}", change, values):
            try:
                steps = total_steps if ControlPlane.world().rank == 1 else 10
                ArchonEngine(EngineConfig.parse(values["model"])).initialize(steps)
                reports.append("initialized")
            except ConfigError as error:
                reports.append(str(error))
    return reports


def write_modules(folder: Path) -> None:
    """Write a dataset function and a reward with a helper, as a user has them next to a configuration."""
    (folder / "count.txt").write_text("20")
    rows = "[{'prompt': f'{i}=', 'response': str(i)} for i in range(COUNT)]"
    (folder / "rows_of_rank.py").write_text(
        f"COUNT = 20\n\ndef rows(split):\n    return {rows}\n\n"
        f"def from_data(split):\n    COUNT = int(open('count.txt').read())\n    return {rows}\n"
    )
    package = folder / "rewards_of_rank"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("SCALE = 1\n")
    (package / "score.py").write_text(
        "from .helper import SCALE\n\n\ndef one(prompt, completion, **_):\n    return 1.0 * SCALE\n"
    )
