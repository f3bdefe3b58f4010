"""docs/tasks/lora.md: its commands and programs run in the order of the page, with small numbers of steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from archon.checkpoint.hf_io import load_model
from archon.training.metrics import read_jsonl
from tests.cli.conftest import Outcome, archon

__all__ = ["archon"]  # pytest finds fixtures by their names here
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tasks" / "lora.md"
SMALLER = {
    "bootstrap": ("warmup.total_steps=20", "warmup.target=null", "warmup.batch_size=16"),
    "sft": ("batch_size=8",),
    "preference": ("total_steps=2", "batch_size=4"),
    "generate": ("max_new_tokens=4", "greedy=true"),
}


def blocks() -> list[tuple[str, str, str]]:
    """Name, language and text of the page's blocks, in order."""
    return re.findall(r"<!-- test: ([\w-]+) -->\n```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_page_runs(archon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rl").symlink_to(ROOT / "rl")
    monkeypatch.chdir(tmp_path)
    said: dict[str, list[Outcome]] = {}
    for name, language, text in blocks():
        if language == "python":
            exec(compile(text, f"{PAGE}: {name}", "exec"), {})
            continue
        for line in text.splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "archon"
            given = [x.replace("total_steps=120", "total_steps=5") for x in arguments]
            smaller = list(SMALLER.get(arguments[0], ()))
            if arguments[0] == "sft" and given == arguments:
                smaller.append("total_steps=3")
            done = archon(*given, *smaller)
            assert done.code == 0, f"{line}\n{done.out}{done.err}"
            said.setdefault(name, []).append(done)
    steps = [row["step"] for row in read_jsonl(tmp_path / "runs/lora_sft/metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3, 4, 5], "the resumed run goes on"
    assert "it fits this checkpoint" in said["use"][0].out
    unmerged, merged, from_peft = said["use"][1].out, said["export"][2].out, said["from-peft"][0].out
    assert unmerged == merged == from_peft
    assert {*dict(load_model("merged").named_parameters())} == {*dict(load_model("runs/start").named_parameters())}
