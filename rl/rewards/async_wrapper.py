"""`AsyncRewardWrapper`: runs a reward without blocking the event loop; one that hangs or crashes costs its sample."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import pickle
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Self

from archon.rl.rewards import worker
from archon.rl.rewards.pool import Outcome, RewardCall, WorkerPool
from archon.rl.rewards.registry import get_reward_fn
from archon.rl.rewards.result import Reward, RewardRaised, RewardTimeout, as_reward
from archon.schema.errors import RewardError

ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")
_SECONDS = 15.0


class AsyncRewardWrapper:
    """Runs a reward function in processes of its own (an `async def` one in the caller's loop), with a time-out.

    Awaiting the wrapper gives a `Reward` (a float with `.parts`) or raises a `RewardFailure`, which costs this one
    sample: `RewardTimeout` (the clock starts when execution starts), `RewardCrashed`, `RewardRaised`, `RewardInvalid`.
    Only the process of the guilty call is replaced. May be awaited from several loops and threads. Interpreter exit
    never waits for a reward; `close()`, or the end of a `with` block, kills the processes at once.

    An `async def` reward is cancelled when its time is up; blocking code inside one cannot be.

    A wrapper around a wrapper is that wrapper, so that a workflow may wrap whatever `reward_fn` it is given; closing it
    closes the one.

    Args:
        reward_fn: A function `fn(prompt, completions, prompt_ids, completion_ids, **data)`, or its name as
            `get_reward_fn` takes it; one of other arguments where the wrapper is called with these.
        timeout_seconds: Longest execution of one call.
        max_workers: Most processes at a time; by default the number of CPUs, at most 8. They start when needed.

    Raises:
        RewardError: the function cannot be sent to another process, or is wrapped already with other limits.
    """

    def __new__(cls, reward_fn: Callable[..., Any] | str | None = None, *_: Any, **__: Any) -> Self:
        return reward_fn if isinstance(reward_fn, cls) else super().__new__(cls)

    def __init__(
        self, reward_fn: Callable[..., Any] | str, timeout_seconds: float = _SECONDS, max_workers: int | None = None
    ) -> None:
        if isinstance(reward_fn, type(self)):  # it is this one: see __new__
            self._require_own_limits(timeout_seconds, max_workers)
            return
        if worker.in_worker:
            raise RewardError(
                "a reward wrapper was made while a worker process imported your script, which defines the reward; "
                "put what the script does under `if __name__ == '__main__':`, or the reward into a module of its own"
            )
        if not timeout_seconds > 0:
            raise RewardError(f"timeout_seconds must be positive, got {timeout_seconds!r}")
        if max_workers is not None and max_workers < 1:
            raise RewardError(f"max_workers must be at least 1, got {max_workers!r}")
        function = get_reward_fn(reward_fn) if isinstance(reward_fn, str) else reward_fn
        self.name = _name_of(function)
        self.timeout_seconds = float(timeout_seconds)
        self._max_workers = max_workers or min(8, os.cpu_count() or 1)
        self._signature = _signature_of(function)
        parameters = self._signature.parameters if self._signature else {}
        self._parameters = list(parameters)
        self._ids = [
            name for name in ARGUMENTS[2:] if name in parameters and parameters[name].default is inspect.Parameter.empty
        ]
        self._function = function
        self._pool: WorkerPool | None = None
        if _is_async(function):
            return
        setup = _setup_frame(function, self.name)
        self._pool = WorkerPool(setup, self.name, self.timeout_seconds, self._max_workers)
        weakref.finalize(self, self._pool.close)  # also at interpreter exit

    async def __call__(self, /, *arguments: Any, **data: Any) -> Reward:
        """Returns the reward of one sample; called as the function itself is, by position, by keyword, or both.

        `data` is the sample's row. Where `prompt`, `completions`, `prompt_ids` and `completion_ids` (the first ones, in
        this order) are given by position, columns of their names are left out. The last two are None for a function
        that wants them and is given neither.

        Raises:
            RewardFailure: this sample has no reward, for the reason its `kind` names.
            RewardError: no sample will have one: the function cannot be loaded, the wrapper is closed, or an argument
                cannot be sent to another process.
        """
        for name in ARGUMENTS[: len(arguments)]:
            if name not in self._parameters[len(arguments) :]:  # else it is the function's own, given by keyword
                data.pop(name, None)
        if len(arguments) <= 2:
            data = dict.fromkeys(self._ids) | data
        if self._pool is None:
            return await self._run_here(arguments, data)
        return await self._run_in_pool(self._pool, arguments, data)

    def _require_own_limits(self, timeout_seconds: float, max_workers: int | None) -> None:
        if timeout_seconds not in (_SECONDS, self.timeout_seconds) or max_workers not in (None, self._max_workers):
            raise RewardError(
                f"the reward {self.name} is wrapped already, with timeout_seconds {self.timeout_seconds:g}; set its "
                "limits there (a run's: rollout.reward_timeout and reward_workers), and give none here"
            )

    def require_documented_form(self) -> None:
        """Raise `RewardError` unless the function takes the four documented arguments by position."""
        try:
            if self._signature is not None:  # else the first call will tell
                self._signature.bind_partial(*ARGUMENTS)
        except TypeError as error:
            form = ", ".join(ARGUMENTS)
            raise RewardError(f"reward function {self.name} must take ({form}, **data): {error}") from error

    async def _run_here(self, arguments: tuple[Any, ...], data: dict[str, Any]) -> Reward:
        limit = asyncio.timeout(self.timeout_seconds)
        try:
            async with limit:
                value = await self._function(*arguments, **data)
        except (KeyboardInterrupt, asyncio.CancelledError):  # of whoever waits for the reward
            raise
        except BaseException as error:
            if limit.expired():
                raise RewardTimeout(
                    f"reward function {self.name} ran longer than {self.timeout_seconds:g} s and was cancelled"
                ) from error
            raise RewardRaised(
                f"reward function {self.name} raised {type(error).__name__}: {error}", traceback.format_exc()
            ) from error
        return as_reward(value, self.name)

    async def _run_in_pool(self, pool: WorkerPool, arguments: tuple[Any, ...], data: dict[str, Any]) -> Reward:
        try:
            frame = pickle.dumps((arguments, data), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise RewardError(
                f"an argument of reward {self.name} cannot be sent to another process: {error}"
            ) from error
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        pool.submit(RewardCall(frame, future))
        outcome = await future
        if isinstance(outcome, RewardError):
            raise outcome
        return outcome

    def close(self) -> None:
        """Kill the worker processes at once; calls that are not answered yet raise `RewardError`."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _name_of(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


def _is_async(function: Callable[..., Any]) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    if not callable(function):
        raise RewardError(f"a reward must be a function or a name, got {function!r}")
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _setup_frame(function: Callable[..., Any], name: str) -> bytes:
    """Returns what a worker loads the function from; the user's script is part of it where the function is in it."""
    try:
        pickled = pickle.dumps(function, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise RewardError(
            f"reward function {name} cannot be sent to a worker process: {error}; "
            "define it at the top level of a module (no lambda, no function inside a function)"
        ) from error
    main: dict[str, Any] = {}
    if b"__main__" in pickled:
        from multiprocessing import spawn

        prepared = spawn.get_preparation_data(name)
        main = {key: value for key, value in prepared.items() if key.startswith("init_main") or key == "sys_argv"}
        if not any(key.startswith("init_main") for key in main):
            raise RewardError(
                f"reward function {name} was defined in an interactive session, which a worker process cannot import; "
                "put it into a file"
            )
    return pickle.dumps({"main": main, "function": pickled, "name": name})
