"""The programs and configurations of examples/ run as their first lines say."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RECIPE = "rl --config rl/recipes/arithmetic_cpu.yaml bootstrap=null actor.path=START run_dir=OUT total_steps=1"
SHORT = "evaluation.every=0 eval_data.limit=20 verify_export=false"
# Command of each example; START is a checkpoint and OUT a new path.
COMMANDS = {
    "plain_loop.py": "examples/plain_loop.py START OUT --steps 10",
    "add_family.py": "examples/add_family.py OUT",
    "custom_loss.py": "examples/custom_loss.py START OUT --steps 10",
    "sft_lora.py": "examples/sft_lora.py START OUT --steps 2",
    "multi_lora.yaml": "-m archon sft --config examples/multi_lora.yaml model.path=START run_dir=OUT total_steps=2",
    "dpo.py": "examples/dpo.py START OUT --steps 2",
    "grpo.py": "examples/grpo.py START OUT --steps 10",
    "reward.py": f"-m archon {RECIPE} {SHORT} reward=examples.reward.close_sum",
    "workflow.py": f"-m archon {RECIPE} {SHORT} workflow=examples.workflow.SecondTry",
    "agent.yaml": "-m archon rl --config examples/agent.yaml actor.path=START run_dir=OUT --dry-run",
    "evaluate.py": "examples/evaluate.py START --rows 20",
    "serve_and_query.py": "examples/serve_and_query.py START --port PORT",
    "vllm.yaml": "-m archon rl --config examples/vllm.yaml actor.path=START run_dir=OUT train_data.path=arithmetic "
    "reward=exact_match --dry-run",
}
HELPERS = {"doubles.py", "agent.py", "questions.py"}  # files that other examples name
PRINTED = {
    "plain_loop.py": r"step +10 loss \d",
    "custom_loss.py": r"step +10 loss \d\.\d+ token_prob 0\.",
    "add_family.py": r"gradients: all 21 equal within 1e-5",
    "sft_lora.py": r"PEFT loads a LoRA of rank 8",
    "grpo.py": r"after: \d+\.\d% of the greedy answers are right",
    "evaluate.py": r"start +\d+\.\d%  \[",
    "serve_and_query.py": r"12\+34=\d*\n",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of examples/README.md, warmed up for fewer steps."""
    path = tmp_path_factory.mktemp("examples") / "start"
    recipe = "rl/recipes/arithmetic_bootstrap.yaml"
    run(f"-m archon bootstrap --config {recipe} warmup.total_steps=20 warmup.target=null path={path}")
    return path


def run(command: str) -> str:
    """Run `python COMMAND` in the project's folder and return what it prints."""
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_runs(name: str, start: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        words = {"START": start, "OUT": tmp_path / "out", "PORT": probe.getsockname()[1]}
    command = re.sub("|".join(words), lambda found: str(words[found[0]]), COMMANDS[name])
    assert re.search(PRINTED.get(name, ""), run(command))


def test_every_example_is_listed_and_short() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    assert files == {*COMMANDS, *HELPERS}
    listed = set(re.findall(r"\]\(([a-z_]+\.(?:py|yaml))\)", (EXAMPLES / "README.md").read_text()))
    assert listed == files
    assert max(len((EXAMPLES / name).read_text().splitlines()) for name in files) <= 150


def test_the_calculator_of_the_agent_computes_and_nothing_else() -> None:
    from examples.agent import calculate

    assert calculate("12*(3+4)-1") == 83
    for text in ("__import__('os')", "2**10", "1/2", "x", "1+", "-1", "True+1"):
        with pytest.raises(ValueError, match="cannot compute"):
            calculate(text)


@pytest.mark.slow
def test_the_notebooks_run_in_their_order(tmp_path: Path) -> None:
    """Their cells are one program, with fewer steps."""
    (tmp_path / "rl").symlink_to(ROOT / "rl")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    printed = {
        "first_model": r"largest difference of logits: \d\.\de-0\d",
        "first_rl_run": r"right answers: \d+\.\d% at first",
        "read_a_plan": r"layout d8t2: rank 0 of 16",
    }
    notebooks = EXAMPLES / "notebooks"
    assert {file.stem for file in notebooks.iterdir()} == set(printed)
    for name, line in printed.items():
        cells = json.loads((notebooks / f"{name}.ipynb").read_text())["cells"]
        code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        code = re.sub(
            r"^((?:WARMUP_STEPS, )?STEPS) = .*$", r"\1 = " + ("20, 5" if "WARMUP" in code else "2"), code, flags=re.M
        )
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert re.search(line, run.stdout), run.stdout
