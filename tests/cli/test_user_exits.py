"""`sys.exit` and its like in user code: one line that names the place, and an exit code other than 0."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from archon.rl import RLVRWorkflow

ROW = {"prompt": "1+1=", "response": "2"}


def rows_exit(split):
    sys.exit(0)


def rows_generator(split):
    yield ROW
    raise GeneratorExit


def rows_canceled(split):
    raise asyncio.CancelledError


def rows_recursion(split):
    def odd(n):
        return even(n)

    def even(n):
        return odd(n)

    return [odd(1)]


def rows_stop(split):
    raise StopIteration


def rows_memory(split):
    raise MemoryError


def rows_interrupt(split):
    raise KeyboardInterrupt


class Leaving(RLVRWorkflow):
    async def arun_episode(self, engine, data):
        result = await super().arun_episode(engine, data)
        await self.leave()
        return result


class Exits(Leaving):
    async def leave(self):
        sys.exit(0)


class Interrupts(Leaving):
    async def leave(self):
        raise KeyboardInterrupt


class Recurses(Leaving):
    async def leave(self):
        rows_recursion("train")


class Stops(Leaving):
    async def leave(self):
        raise StopIteration


class ExitsInATask(Leaving):
    async def leave(self):
        async def quit_early():
            sys.exit(0)

        await asyncio.gather(quit_early(), asyncio.sleep(60))


class ExitsInTheConstructor(RLVRWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer):
        sys.exit(0)


class ExitsAtTheEnd(RLVRWorkflow):
    async def aclose(self):
        sys.exit(0)


async def interrupting_reward(prompt, completions, prompt_ids, completion_ids, **data):
    raise KeyboardInterrupt


HERE = "test_user_exits.py:"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("rows_exit", "ended with sys.exit(0) at"),
        ("rows_generator", "ended with GeneratorExit at"),
        ("rows_canceled", "ended with CancelledError at"),
        ("rows_recursion", "ended with RecursionError at"),
        ("rows_stop", "ended with StopIteration at"),
    ],
)
@pytest.mark.parametrize("command", ["rl", "sft"])
def test_a_dataset_function_that_leaves_is_an_error(archon, request, command, function, reason):
    overrides = request.getfixturevalue(f"{command}_overrides")
    complaint = archon(command, *overrides, f"train_data.path=python:{__name__}.{function}").complaint
    assert f"dataset function python:{__name__}.{function} {reason}" in complaint and HERE in complaint


def test_a_dataset_function_without_memory_or_with_ctrl_c_is_one_line(archon, sft_overrides):
    path = f"train_data.path=python:{__name__}"
    assert "rows_memory: out of memory" in archon("sft", *sft_overrides, f"{path}.rows_memory").complaint
    interrupted = archon("sft", *sft_overrides, f"{path}.rows_interrupt")
    assert interrupted.code == 130 and interrupted.err.split() == ["archon:", "interrupted"]


def test_a_module_that_exits_while_it_is_imported_is_an_error(archon, sft_overrides, tmp_path, monkeypatch):
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    complaint = archon("sft", *sft_overrides, "train_data.path=python:leaves_at_once.rows").complaint
    assert "its module ended with sys.exit(0)" in complaint and "leaves_at_once.py:2" in complaint


@pytest.mark.parametrize(
    ("workflow", "reason"),
    [
        ("Exits", "workflow Exits ended with sys.exit(0) at"),
        ("Interrupts", "ended with KeyboardInterrupt at"),
        ("Recurses", "workflow Recurses ended with RecursionError at"),
        ("Stops", "workflow Stops ended with StopIteration at"),
        ("ExitsInATask", "quit_early ended with sys.exit(0) at"),
        ("ExitsInTheConstructor", "workflow class ExitsInTheConstructor ended with sys.exit(0) at"),
        ("ExitsAtTheEnd", "ExitsAtTheEnd.aclose ended with sys.exit(0) at"),
    ],
)
def test_a_workflow_that_leaves_is_an_error(archon, rl_overrides, capsys, workflow, reason):
    complaint = archon("rl", *rl_overrides, f"workflow={__name__}.{workflow}").complaint
    assert reason in complaint and HERE in complaint
    gc.collect()
    assert not capsys.readouterr().err, "asyncio prints an error that no code has read"


def test_the_episodes_of_an_asynchronous_run_that_leave_print_one_line(archon, rl_overrides, capsys):
    overrides = [*rl_overrides, "rollout.max_staleness=1", f"workflow={__name__}.ExitsInATask"]
    assert "quit_early ended with sys.exit(0) at" in archon("rl", *overrides).complaint
    gc.collect()
    assert not capsys.readouterr().err


def test_an_evaluation_whose_reward_raises_what_ctrl_c_raises_is_an_error(archon, checkpoint, dataset, tmp_path):
    arguments = [f"data.path={dataset}", "data.prompt_key=prompt", f"reward={__name__}.interrupting_reward"]
    arguments += ["max_new_tokens=4", "n=1", "--out", tmp_path / "eval"]
    assert "ended with KeyboardInterrupt at" in archon("eval", checkpoint, *arguments).complaint
