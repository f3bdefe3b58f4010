"""The reward of programs: the last code block of an answer against the row's tests, in the sandbox."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.rl.config import RLConfig
from archon.rl.rewards import AsyncRewardWrapper, code_tests, get_reward_fn, verify_gold
from archon.rl.sandbox import Limits, Result, Sandbox
from archon.rl.trainer import RLTrainer
from archon.schema.errors import RewardError
from archon.training.metrics import read_jsonl
from tests.test_readme import shown

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5", "output": "9"}]
SUM = "print(sum(map(int, input().split())))"


def score(answer: str, tests: Any, name: str = "code_tests") -> float:
    value: float = get_reward_fn(name)("", answer, [], [], tests=tests)
    return value


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"Here it is:\n```python\n{ADD}```\nDone.", 1.0),
        (ADD, 1.0),
        (f"```\nnonsense(\n```\nBetter:\n~~~py\n{ADD}~~~", 1.0),
        (f"```python\n{ADD}```\nor\n```python\ndef add(a, b): return 3\n```", 0.0),
        ("def add(a, b): return 3", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_code_block_is_tested(answer: str, expected: float) -> None:
    assert score(answer, ASSERTS) == expected


def test_standard_output_is_compared_for_each_standard_input() -> None:
    assert score(SUM, SUMS) == 1.0
    assert score("print(3)", SUMS) == 0.0
    assert score("print('3  ')\nprint()", SUMS[:1]) == 1.0  # white space at ends of lines
    assert score("print(3); raise SystemExit(1)", SUMS[:1]) == 0.0


def test_tests_that_nest_deeply_are_code_that_fails() -> None:
    assert score(ADD, "[" * 10**5) == 0.0


def test_waiting_for_a_busy_sandbox_fails_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "TOTAL_SECONDS", 0.4)

    class Busy(Sandbox):
        def run(self, *program: Any, **limits: Any) -> Result:
            time.sleep(0.3)
            return super().run(*program, **limits)

    with Busy(workers=1) as busy:
        assert list(code_tests.passed_tests(ADD, ASSERTS[:1] * 3, busy)) == [True] * 3
        slow = "import time; time.sleep(0.3)"
        assert list(code_tests.passed_tests(slow, ["pass"] * 3, busy)) == [True, False, False]


def test_the_fraction_counts_passed_tests() -> None:
    assert score("print(3)", SUMS, "code_tests_fraction") == 0.5
    assert score("def add(a, b): return 3", ASSERTS, "code_tests_fraction") == 0.5
    assert score(ADD, ASSERTS, "code_tests_fraction") == 1.0


@pytest.mark.parametrize(
    "tests", [SUMS, '[{"input": "1 2", "output": "3"}]', {"inputs": ["1 2", "3 3"], "outputs": ["3", "6"]}]
)
def test_tests_have_the_forms_of_data_sets(tests: Any) -> None:
    assert score(SUM, tests) == 1.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "expected a list of 1 to 1,000 tests"),
        (None, "tests is None; expected a list"),
        ([{"input": "1"}], "a test is .*; expected code such as"),
        ([" "], "a test is ' '; expected code"),
        ({"inputs": ["1"], "outputs": []}, "are not lists of one length"),
    ],
)
def test_a_defect_of_the_data_is_an_error(tests: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(ADD, tests)


@pytest.mark.unsampled
@pytest.mark.parametrize(
    "answer",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "import sys\nsys.stdout.write('done'); sys.stdout.flush()\nsys.exit()",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import builtins\nbuiltins.AssertionError = None",
    ],
)
def test_a_program_that_skips_the_tests_fails_them(answer: str) -> None:
    assert score(answer, ASSERTS) == 0.0


def test_a_program_that_never_ends_fails_its_tests_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "LIMITS", Limits(wall_seconds=0.3, cpu_seconds=0.3))
    monkeypatch.setattr(code_tests, "TOTAL_SECONDS", 0.5)
    started = time.monotonic()
    assert score("while True: pass", ASSERTS * 20, "code_tests_fraction") == 0.0
    assert time.monotonic() - started < 2.0


def test_it_runs_in_worker_processes_and_gives_gold_programs_1() -> None:
    rows = [{"prompt": "Add two numbers.", "answer": ADD, "tests": ASSERTS}]
    assert verify_gold("code_tests", rows) == 1
    with AsyncRewardWrapper("code_tests", max_workers=1) as reward:
        with pytest.raises(RewardError, match="needs 'tests'"):
            reward.require_columns({"answer": ADD})
        assert asyncio.run(reward("", "import os; os.kill(os.getppid(), 9)", [], [], **rows[0])) == 0.0


def test_the_rows_of_the_guide_train_a_policy(rl_config: Callable[..., RLConfig], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in shown("code-rows", "json").strip().splitlines()]
    assert score(rows[0]["answer"], rows[0]["tests"]) == score(SUM, rows[1]["tests"]) == 1.0
    path = tmp_path / "problems.jsonl"
    # The small model knows digits, of which each is a program that prints nothing.
    gold = "import sys\nnumbers = sys.stdin.read().split()\nif numbers: print(sum(map(int, numbers)))"
    row = {"prompt": "1+2=", "answer": gold, "tests": [{"input": "", "output": ""}, *rows[1]["tests"]]}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(6)))
    config = rl_config(reward="code_tests_fraction", train_data={"path": str(path)}, total_steps=1)
    RLTrainer(config).train()
    step = read_jsonl(Path(config.run_dir) / "metrics.jsonl")[-1]
    assert 0 <= step["reward"] <= 0.5
    assert not any(value for name, value in step.items() if name.startswith("rollout/dropped/"))


def test_the_program_of_the_guide_prints_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    exec(shown("sandbox"), {})
    assert capsys.readouterr().out == "0 None cba\n\n"
