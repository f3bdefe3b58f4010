"""Rewards of programs: the program of an answer runs in the sandbox against the row's tests."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from archon.rl.sandbox import Limits, Runner
from archon.rl.sandbox.default import default_runner
from archon.schema.errors import RewardError

LIMITS = Limits(wall_seconds=4.0, cpu_seconds=4.0)
"""Limits of one test. An honest test takes milliseconds."""
TOTAL_SECONDS = 10.0
"""Seconds in which the tests of an answer run, below the 15 s of `rollout.reward_timeout`.

Waiting for a busy sandbox does not count: it may cost the sample, and must not fail the tests.
"""
MAX_TESTS = 1000

_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
_DONE = "\n\nimport sys as _sys\n_sys.stdout.flush()\n_sys.stdout.write({mark!r})\n"


def code_tests_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, tests: Any, **data: Any
) -> float:
    """Return 1.0 if the program of the answer passes all tests of the row, else 0.0; see `passed_tests`."""
    programs = _read_tests(tests)
    return float(all(passed_tests(completions, programs)))


def code_tests_fraction_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, *, tests: Any, **data: Any
) -> float:
    """Return the share of the row's tests that the program of the answer passes; see `passed_tests`."""
    programs = _read_tests(tests)
    return sum(passed_tests(completions, programs)) / len(programs)


def passed_tests(
    completion: str, tests: Iterable[str | tuple[str, str]], runner: Runner | None = None
) -> Iterable[bool]:
    """Yield for each test whether the answer's program passes it.

    The program is the last fenced code block of the answer, or the whole answer if it has none. Each test runs in a
    new process. A test that breaks a limit of the sandbox fails, as do the tests after `TOTAL_SECONDS`.

    Args:
        completion: the answer.
        tests: code that runs after the program and raises if it is wrong, such as `assert add(1, 2) == 3`; or a pair
            (standard input, expected output). Outputs are equal if they differ in white space at ends of lines only.
        runner: runs the programs; None: the sandbox of this process.
    """
    code = extract_code(completion)
    runner = runner or default_runner()
    left = TOTAL_SECONDS
    for test in tests:
        if left <= 0:
            yield False
            continue
        limits = replace(LIMITS, wall_seconds=min(LIMITS.wall_seconds, left))
        if isinstance(test, str):
            # A program that exits before the test prints no mark.
            mark = secrets.token_hex(16)
            source = f"{code}\n\n{test}{_DONE.format(mark=mark)}"
            result = runner.run(["python", "main.py"], {"main.py": source}, limits=limits)
            passed = result.ok and result.stdout.endswith(mark)
        else:
            stdin, expected = test
            result = runner.run(["python", "main.py"], {"main.py": code}, stdin, limits)
            passed = result.ok and _lines(result.stdout) == _lines(expected)
        left -= result.seconds
        yield passed


def extract_code(completion: str) -> str:
    """Return the last fenced code block of an answer, or the whole answer if it has none."""
    blocks = [match[2] for match in _FENCE.finditer(completion)]
    return blocks[-1] if blocks else completion


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _read_tests(tests: Any) -> list[str | tuple[str, str]]:
    """Return the tests of a row, in any of the forms that data sets use."""
    value = tests
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = tests  # code
    if isinstance(value, str):
        value = [value]
    if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
        inputs, outputs = value["inputs"], value["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise RewardError("code_tests: tests.inputs and tests.outputs are not lists of one length; fix the row")
        value = [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TESTS:
        raise RewardError(f"code_tests: tests is {tests!r:.80}; expected a list of 1 to {MAX_TESTS:,} tests")
    return [_read_test(test) for test in value]


def _read_test(test: Any) -> str | tuple[str, str]:
    if isinstance(test, str) and test.strip():
        return test
    if isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
        return test["input"], test["output"]
    raise RewardError(
        f'code_tests: a test is {test!r:.80}; expected code such as "assert add(1, 2) == 3", or '
        '{"input": "1 2", "output": "3"}'
    )
