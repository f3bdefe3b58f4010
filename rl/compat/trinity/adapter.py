"""Runs a Trinity-style workflow as an archon one: makes its task, gives it a thread, checks and converts its result."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from archon.generation.record import TokenRecord, UnusableAnswerError
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.rl.compat.trinity import builtin, react  # noqa: F401 (register the built-in workflows)
from archon.rl.compat.trinity.model import ModelWrapper
from archon.rl.compat.trinity.types import Experience, FormatConfig, GenerationConfig, Task
from archon.rl.compat.trinity.workflow import REWARD_FUNCTIONS, WORKFLOWS, RewardFn, Workflow, says
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import RewardFailure
from archon.rl.trajectories import trajectory_tensors
from archon.rl.workflow_row import copy_containers
from archon.rl.workflows.agent import Serving
from archon.rl.workflows.base import RolloutWorkflow, count_failure, wrapped_reward
from archon.schema.config import nearest
from archon.schema.errors import ConfigError, RolloutError
from archon.schema.lazy import import_dotted

if TYPE_CHECKING:
    from archon.rl.compat.trinity.model import Endpoint

T = TypeVar("T")
Sample = tuple[TokenRecord, float]


class TrinityWorkflow(RolloutWorkflow):
    """One group: the experiences of `gconfig.n_samples` answers, or runs, of a Trinity-style workflow.

    Rows carry `raw_task` (`train_data.raw` puts it there), which becomes the task's.

    Args:
        workflow: the class, its registered name or its dotted path.
        reward_fn: the run's archon reward, which the task carries as its `reward_fn`.
        gconfig: sampling values; the task's `rollout_args` say the same.
        tokenizer: renders messages; its end-of-text and padding ids stop an answer.
        reward: a `RewardFn` class, its registered name or its dotted path, carried in place of `reward_fn`.
        format_args: fields of `FormatConfig`.
        workflow_args, reward_fn_args: for the workflow and the `RewardFn`, as they are.
        enable_openai_api: give the model an OpenAI endpoint on this machine, for its `get_openai_client()`.
    """

    returns_group = True

    def __init__(
        self,
        workflow: type[Workflow] | str,
        reward_fn: Any,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        reward: type[RewardFn] | str | None = None,
        format_args: Mapping[str, Any] | None = None,
        workflow_args: Mapping[str, Any] | None = None,
        reward_fn_args: Mapping[str, Any] | None = None,
        enable_openai_api: bool = False,
    ) -> None:
        kind: Any = WORKFLOWS.find(workflow) if isinstance(workflow, str) else workflow
        if not (isinstance(kind, type) and issubclass(kind, Workflow)):
            raise ConfigError(f"workflow: got {workflow!r}, expected a subclass of archon.rl.Workflow, or its name")
        overrides_async = kind.run_async is not Workflow.run_async
        if kind.run is Workflow.run and not overrides_async:
            raise ConfigError(f"workflow class {kind.__qualname__} defines neither run nor run_async")
        for name in format_args or {}:
            if name not in (known := [field.name for field in fields(FormatConfig)]):
                raise ConfigError(f"format_args: unknown {name!r}{nearest(name, known)}")
        self.kind = kind
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self._awaits = overrides_async and (kind.is_async or hasattr(kind, "asynchronous") or kind.run is Workflow.run)
        self._reward = REWARD_FUNCTIONS.find(reward) if isinstance(reward, str) else reward or wrapped_reward(reward_fn)
        self._format_args = FormatConfig(**(format_args or {}))
        self._workflow_args, self._reward_fn_args = dict(workflow_args or {}), dict(reward_fn_args or {})
        self._serving = Serving(tokenizer) if enable_openai_api else None
        self._idle: list[tuple[Workflow, ModelWrapper]] = []
        self._repeats = False

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        changed = super().with_gconfig(gconfig.new_with_stop_and_pad_token_ids(self.tokenizer))
        assert isinstance(changed, TrinityWorkflow)
        changed._idle = []  # a workflow may keep the sampling values it was made with
        return changed

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """One group as trajectory tensors [G, S]; None where every run rejected the task with an empty list.

        Of several runs, one that ends with an unusable answer or a failed reward costs its samples, and is counted.
        Raises `RolloutError` naming key and shape where a result is wrong, and whatever else the workflow raises.
        """
        if "raw_task" not in data:
            raise ConfigError(
                "a Trinity-style workflow reads rows as they stand in their source: set raw=true in train_data and "
                f"eval_data (this row has {', '.join(map(repr, data))})"
            )
        if self._serving is None:
            return await self._group(engine, data, None)
        async with self._serving.lease() as endpoint:
            return await self._group(engine, data, endpoint)

    async def _group(
        self, engine: InferenceEngine, data: dict[str, Any], endpoint: Endpoint | None
    ) -> dict[str, Tensor] | None:
        n, samples, lost = self.gconfig.n_samples, list[Sample](), list[BaseException]()
        run_of: list[int] = []  # each sample
        context = workflow_context.get()

        async def gathered(runs: range, each: int) -> None:
            outcomes = await asyncio.gather(
                *(self._run(engine, data, run, each, endpoint) for run in runs), return_exceptions=True
            )
            for run, outcome in zip(runs, outcomes, strict=True):
                if isinstance(outcome, RewardFailure | UnusableAnswerError) and len(runs) > 1:
                    lost.append(outcome)
                    count_failure(outcome)
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    samples.extend(outcome)
                    run_of.extend([run] * len(outcome))

        if self.kind.can_repeat is False and not hasattr(self.kind, "repeatable"):
            await gathered(range(n), 1)
        else:
            await gathered(range(1), n)
            if len(samples) == 1 and not self._repeats and not context.drops:
                await gathered(range(1, n), n)
        if not samples and lost:
            raise lost[0]
        if not samples:
            return None
        records, rewards = [record for record, _ in samples], [reward for _, reward in samples]
        # What one of several runs returned is one trajectory in parts; a single run returns a group of them.
        return trajectory_tensors(records, rewards, run_of if len(set(run_of)) > 1 else None)

    async def _run(
        self, engine: InferenceEngine, data: dict[str, Any], run: int, n: int, endpoint: Endpoint | None
    ) -> list[Sample]:
        """One run of one instance, which nobody else uses meanwhile. One whose run fails is not used again."""
        rollout = self.gconfig
        task = Task(
            workflow=self.kind,
            reward_fn=self._reward,
            raw_task=copy_containers(data["raw_task"]),
            format_args=replace(self._format_args),
            rollout_args=GenerationConfig(
                n=n,
                temperature=0.0 if rollout.greedy else rollout.temperature,
                top_p=rollout.top_p,
                top_k=-1 if rollout.top_k is None else rollout.top_k,
                max_tokens=rollout.max_new_tokens,
            ),
            workflow_args=copy_containers(self._workflow_args),
            reward_fn_args=copy_containers(self._reward_fn_args),
            is_eval=workflow_context.get().is_eval,
            task_id=workflow_context.get().task_id,
        )
        used, model = self._idle.pop() if self._idle else (None, ModelWrapper(self.tokenizer))
        model.open(engine, rollout, run, endpoint)

        def ready() -> Workflow:
            workflow = used
            if workflow is None:
                workflow = self.kind(task=task, model=model, auxiliary_models=[])
            else:
                workflow.task = task
                workflow.reset(task)
            if says(workflow, "can_repeat", "repeatable"):
                workflow.set_repeat_times(n, run)
            return workflow

        def whole() -> tuple[Workflow, list[Experience]]:
            workflow = ready()
            return workflow, workflow.run()

        try:
            if self._awaits:
                workflow = ready()
                result = await workflow.run_async()
            else:
                workflow, result = await in_thread(whole)
            samples = self._checked(result, model)
        finally:
            model.close()
        self._repeats = bool(says(workflow, "can_repeat", "repeatable"))
        if says(workflow, "can_reset", "resettable"):
            self._idle.append((workflow, model))
        return samples

    def _checked(self, result: Any, model: ModelWrapper) -> list[Sample]:
        name = f"{self.kind.__name__}.{'run_async' if self._awaits else 'run'}"
        if not isinstance(result, list | tuple):
            raise RolloutError(
                f"{name} returned a {type(result).__name__}, expected a list of Experience ([] rejects the task)"
            )
        samples = [sample_of(item, model, f"{name}: experience {index}") for index, item in enumerate(result)]
        for index, experience in enumerate(result):
            try:
                workflow_context.record(**experience.metrics)
            except (TypeError, ValueError) as error:
                raise RolloutError(f"{name}: experience {index}: 'metrics' must be numbers by name ({error})") from None
        return samples


def sample_of(experience: Any, model: ModelWrapper, where: str) -> Sample:
    """An experience in token space, and its reward; `where` opens the message of the `RolloutError` for a wrong one.

    What it says of logprobs counts; where it says nothing, and for versions, what the model recorded for exactly these
    tokens does. A reward that is not finite passes: the rollout drops the sample, and counts it.
    """
    if not isinstance(experience, Experience):
        raise RolloutError(f"{where} is a {type(experience).__name__}, expected an Experience")
    tokens = _vector(experience.tokens, "tokens", where)
    start: Any = experience.prompt_length
    is_count = isinstance(start, Integral) and not isinstance(start, bool)
    if not is_count or not 0 < start < len(tokens):
        raise RolloutError(
            f"{where}: 'prompt_length' is {start!r}, expected an integer from 1 to {len(tokens) - 1}, as 'tokens' has "
            f"shape ({len(tokens)},)"
        )
    start, size = int(start), len(tokens) - int(start)
    mask = [1] * size
    if experience.action_mask is not None:
        mask = [int(value) for value in _vector(experience.action_mask, "action_mask", where, size)]
        if not set(mask) <= {0, 1} or not any(mask):
            raise RolloutError(f"{where}: 'action_mask' of shape ({size},) must hold 0 and 1, and 1 somewhere")
    given: Any = experience.reward
    try:
        reward = float(given)
    except (TypeError, ValueError, RuntimeError):
        raise RolloutError(f"{where}: 'reward' is {given!r}, expected a number") from None
    known = model.recorded(tokens)
    generated = known.loss_mask[start:] if known else [0] * size
    if experience.logprobs is not None:
        logprobs = _vector(experience.logprobs, "logprobs", where, size, integers=False)
    elif missing := sum(m > g for m, g in zip(mask, generated, strict=True)):
        raise RolloutError(
            f"{where}: 'logprobs' is missing for {missing} of its {sum(mask)} trained tokens, which the model did not "
            "generate behind these very tokens in this run; pass the tokens and logprobs of a response on as they are, "
            "or leave those tokens out with action_mask"
        )
    else:
        assert known is not None
        logprobs = known.logprobs[start:]
    record = TokenRecord(tokens, [0] * start, [0.0] * start, [-1] * start, [-1] * start)
    record.loss_mask += mask
    record.logprobs += [lp if m else 0.0 for lp, m in zip(logprobs, mask, strict=True)]
    for place, (trained, own) in enumerate(zip(mask, generated, strict=True), start):
        record.versions.append(-1 if not trained else known.versions[place] if known and own else model.model_version)
        record.turn_ids.append(-1 if not trained else known.turn_ids[place] if known and own else 0)
    record.turns = known.turns if known else 1
    record.truncated = known.truncated if known else experience.truncate_status is not None
    return record, reward


def _vector(value: Any, key: str, where: str, size: int | None = None, *, integers: bool = True) -> list[Any]:
    """A one-dimensional tensor, of `size` numbers where that is known, as a list."""
    expected = f"expected one dimension of {'integers' if integers else 'numbers'}"
    if size is not None:
        expected = f"expected ({size},), one for each token behind prompt_length"
    if not isinstance(value, Tensor):
        raise RolloutError(f"{where}: {key!r} is a {type(value).__name__}, {expected}")
    if value.ndim != 1 or (size is not None and len(value) != size):
        raise RolloutError(f"{where}: {key!r} has shape {tuple(value.shape)}, {expected}")
    if integers and value.is_floating_point():
        raise RolloutError(f"{where}: {key!r} of shape {tuple(value.shape)} is {value.dtype}, expected integers")
    return value.tolist()


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises, from a thread of its own that knows the caller's context.

    Neither a caller that is cancelled nor the end of the process waits for it.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return  # cancelled
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def body() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = context.run(work), None
        except StopIteration as stop:  # which a future cannot carry
            outcome = None, RuntimeError(f"the workflow raised StopIteration: {stop}")
        except BaseException as raised:  # noqa: BLE001 (it is raised where the result is awaited)
            outcome = None, raised
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            pass  # the loop is closed, and nobody waits

    threading.Thread(target=body, name="trinity-run", daemon=True).start()
    return await done


def adapted_workflow(workflow: Any, further: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]] | None:
    """A Trinity-style workflow, or the name of a registered one, as an argument of the workflow that runs such ones;
    None for anything else."""
    if isinstance(workflow, str) and workflow in WORKFLOWS:
        workflow = WORKFLOWS[workflow]
    elif isinstance(workflow, str):
        workflow = import_dotted(workflow, "workflow")
    if isinstance(workflow, type) and issubclass(workflow, Workflow):
        return TrinityWorkflow, {"workflow": workflow, **further}
    return None
