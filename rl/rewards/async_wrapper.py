"""`AsyncRewardWrapper` runs a reward in worker processes: a hang or crash costs one sample."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import pickle
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from archon.rl.rewards import worker
from archon.rl.rewards.lookup import get_reward_fn
from archon.rl.rewards.pool import MAX_CALL_BYTES, WorkerPool
from archon.rl.rewards.result import (
    Reward,
    RewardFailure,
    RewardInvalid,
    RewardRaised,
    RewardTimeout,
    as_reward,
    is_in_process,
)
from archon.rl.rewards.trl import TRLReward
from archon.schema.errors import RewardError

if TYPE_CHECKING:
    from archon.remote.config import WorkersConfig
    from archon.rl.rewards.ray_pool import RayPool

ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")
_SECONDS = 15.0
_CANCEL_SECONDS = 1.0  # time for an `async def` reward to end once it is canceled


class AsyncRewardWrapper:
    """Reward function with a time-out, run in worker processes.

    Awaiting the wrapper returns a `Reward` (a float with `.parts`) or raises a `RewardFailure`, which costs one sample:
    `RewardTimeout` (the clock starts with the execution), `RewardCrashed`, `RewardRaised` or `RewardInvalid`. Only the
    process of the failed call is replaced. Several loops and threads may await the wrapper. Interpreter exit never
    waits for a reward; `close()` and the end of a `with` block kill the processes at once.

    An `async def` reward runs in the caller's loop and is canceled at its time limit; blocking code delays this. A
    function marked `in_process` runs in the caller's loop without a time-out. Wrapping a wrapper returns the same
    wrapper: a workflow may wrap any `reward_fn`.

    Args:
        reward_fn: a function `fn(prompt, completions, prompt_ids, completion_ids, **data)` or a name for
            `get_reward_fn`.
        timeout_seconds: time limit of one call.
        max_workers: maximum number of processes, started on demand; None: the number of CPUs, at most 8.
        max_retries: extra attempts for a failed call, each with the full time limit.
        workers: location of the processes; None: this machine.

    Raises:
        RewardError: the function cannot be pickled, or is already wrapped with other limits.
    """

    def __new__(cls, reward_fn: Callable[..., Any] | str | None = None, *_: Any, **__: Any) -> Self:
        """Return `reward_fn` itself if it is a wrapper."""
        return reward_fn if isinstance(reward_fn, cls) else super().__new__(cls)

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        timeout_seconds: float = _SECONDS,
        max_workers: int | None = None,
        max_retries: int = 0,
        workers: WorkersConfig | None = None,
    ) -> None:
        if isinstance(reward_fn, type(self)):  # `reward_fn is self`, from __new__
            self._require_same_limits(timeout_seconds, max_workers, max_retries)
            return
        if worker.in_worker:
            raise RewardError(
                "a worker process imported your script and created a reward wrapper; put the script's actions under "
                "`if __name__ == '__main__':`, or move the reward to another module"
            )
        if not timeout_seconds > 0:
            raise RewardError(f"timeout_seconds must be positive, got {timeout_seconds!r}")
        if max_workers is not None and max_workers < 1:
            raise RewardError(f"max_workers must be at least 1, got {max_workers!r}")
        if max_retries < 0:
            raise RewardError(f"max_retries must be at least 0, got {max_retries!r}")
        function = get_reward_fn(reward_fn) if isinstance(reward_fn, str) else reward_fn
        self.name, is_async = _inspect_function(function)
        self.timeout_seconds = float(timeout_seconds)
        self.max_retries = max_retries
        self._max_workers = max_workers or min(8, os.cpu_count() or 1)
        self._signature = _get_signature(function)
        parameters = self._signature.parameters if self._signature else {}
        self._parameters = list(parameters)
        self._ids = [
            name for name in ARGUMENTS[2:] if name in parameters and parameters[name].default is inspect.Parameter.empty
        ]
        self._function = function
        self._pool: WorkerPool | RayPool | None = None
        self.in_process = not is_async and is_in_process(function)
        if is_async or self.in_process:
            return
        frame = setup_frame(function, self.name)
        if workers is not None and workers.kind == "ray":
            from archon.rl.rewards.ray_pool import RayPool  # with the configuration, which a worker does not read

            self._pool = RayPool(frame, self.name, self.timeout_seconds, self._max_workers, workers)
        else:
            self._pool = WorkerPool(frame, self.name, self.timeout_seconds, self._max_workers)
        weakref.finalize(self, self._pool.close)  # also at interpreter exit

    async def __call__(self, /, *arguments: Any, **data: Any) -> Reward:
        """Return the reward of one sample, for the arguments of the reward function.

        `data` is the sample's row; columns that repeat positional arguments are dropped. Required `prompt_ids` and
        `completion_ids` default to None.

        Raises:
            RewardFailure: the sample has no reward; `kind` says why.
            RewardError: the function cannot be loaded, the wrapper is closed, or an argument cannot be pickled.
        """
        for name in ARGUMENTS[: len(arguments)]:
            if name not in self._parameters[len(arguments) :]:  # else the function takes it as a keyword argument
                data.pop(name, None)
        if len(arguments) <= 2:
            data = dict.fromkeys(self._ids) | data
        for _ in range(self.max_retries):
            try:
                return await self._run(arguments, data)
            except RewardFailure:
                continue
        return await self._run(arguments, data)

    async def _run(self, arguments: tuple[Any, ...], data: dict[str, Any]) -> Reward:
        """Run one attempt: in the pool, or in the caller's loop without one."""
        if self._pool is not None:
            try:
                frame = pickle.dumps((arguments, data), protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                message = f"an argument of reward {self.name} cannot be sent to another process: {error}"
                raise RewardError(message) from error
            if len(frame) > MAX_CALL_BYTES:
                raise RewardError(
                    f"the arguments of reward {self.name} take {len(frame):,} bytes; expected at most "
                    f"{MAX_CALL_BYTES:,}: pass a file's name instead of its content"
                )
            outcome = await self._pool.run(frame)
            if isinstance(outcome, RewardError):
                raise outcome
            return outcome
        result = self._call(arguments, data) if self.in_process else await self._run_in_loop(arguments, data)
        if isinstance(result, BaseException):
            raise result
        return result

    def _call(self, arguments: tuple[Any, ...], data: dict[str, Any]) -> Reward | BaseException:
        try:
            # Copies: the reward must not change trained tokens.
            value = self._function(*(list(x) if isinstance(x, list) else x for x in arguments), **data)
            return as_reward(value, self.name)
        except BaseException as error:  # noqa: BLE001 - SystemExit costs its sample only
            return self._failure(error)

    async def _run_in_loop(self, arguments: tuple[Any, ...], data: dict[str, Any]) -> Reward | BaseException:
        """Run an `async def` reward as a task. The time limit cancels it; a task that ignores that is abandoned."""

        async def call() -> Reward | BaseException:
            try:
                return as_reward(await self._function(*arguments, **data), self.name)
            except BaseException as error:  # noqa: BLE001 - a task that raises SystemExit ends the loop
                return self._failure(error)

        task = asyncio.ensure_future(call())
        try:
            if (await asyncio.wait({task}, timeout=self.timeout_seconds))[0]:
                return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
        except asyncio.CancelledError:  # of the caller
            task.cancel()
            raise
        message = f"reward function {self.name} ran longer than {self.timeout_seconds:g} s and was canceled"
        return RewardTimeout(message if task.done() else f"{message}, which it ignores: it still runs")

    def _failure(self, error: BaseException) -> BaseException:
        """Return the failure of a sample whose reward raised `error`."""
        if isinstance(error, RewardInvalid | KeyboardInterrupt):
            return error
        failure = RewardRaised(f"reward function {self.name} raised {worker.describe(error)}", traceback.format_exc())
        failure.__cause__ = error
        return failure

    def _require_same_limits(self, timeout_seconds: float, max_workers: int | None, max_retries: int) -> None:
        if (
            timeout_seconds not in (_SECONDS, self.timeout_seconds)
            or max_workers not in (None, self._max_workers)
            or max_retries not in (0, self.max_retries)
        ):
            raise RewardError(
                f"the reward {self.name} is already wrapped with timeout_seconds {self.timeout_seconds:g}; set its "
                "limits in that call (in a run: rollout.reward_timeout and rollout.workers.rewards)"
            )

    def require_documented_form(self) -> None:
        """Raise `RewardError` unless the function takes the four documented arguments by position."""
        if {"solution_str", "ground_truth"} <= set(self._parameters):
            raise RewardError(
                f"reward function {self.name} takes veRL's arguments ({', '.join(self._parameters)}); wrap it as shown "
                "in docs/tasks/rewards.md"
            )
        try:
            if self._signature is not None:  # else the first call fails
                self._signature.bind_partial(*ARGUMENTS)
        except TypeError as error:
            form = ", ".join(ARGUMENTS)
            raise RewardError(f"reward function {self.name} must take ({form}, **data): {error}") from error

    def require_columns(self, row: Mapping[str, Any]) -> None:
        """Raise `RewardError` if the function has a required argument that the row lacks."""
        parameters = list(self._signature.parameters.values()) if self._signature else []
        for parameter in parameters[len(ARGUMENTS) :]:
            variable = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if parameter.default is inspect.Parameter.empty and not variable and parameter.name not in row:
                raise RewardError(
                    f"the reward {self.name} needs {parameter.name!r}, but the rows have {', '.join(map(repr, row))}; "
                    "add the column (`response_key` names the column of `answer`), or choose another reward"
                )

    def close(self) -> None:
        """Kill the worker processes; unanswered calls raise `RewardError`."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _inspect_function(function: Callable[..., Any]) -> tuple[str, bool]:
    inner = function.function if isinstance(function, TRLReward) else function
    inner = inner.func if isinstance(inner, functools.partial) else inner
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    return f"{named.__module__}.{named.__qualname__}", is_async


def _get_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    if not callable(function):
        raise RewardError(f"a reward must be a function or a name, got {function!r}")
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def setup_frame(function: Callable[..., Any], name: str) -> bytes:
    """Return the pickled function for a worker, with the path of the user's script if it defines the function."""
    try:
        pickled = pickle.dumps(function, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise RewardError(
            f"reward function {name} cannot be sent to a worker process: {error}; "
            "define it at the top level of a module (no lambda, no nested function)"
        ) from error
    main: dict[str, Any] = {}
    if b"__main__" in pickled:
        from multiprocessing import spawn

        prepared = spawn.get_preparation_data(name)
        main = {key: value for key, value in prepared.items() if key.startswith("init_main") or key == "sys_argv"}
        if not any(key.startswith("init_main") for key in main):
            raise RewardError(
                f"reward function {name} is defined in an interactive session and cannot be imported by a worker; "
                "move it to a file"
            )
    return pickle.dumps({"main": main, "function": pickled, "name": name})
