"""Adapter that runs a Trinity-style workflow as an archon rollout workflow."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from archon.generation.record import TokenRecord
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.rl.compat.trinity import builtin, environments, react, ruler  # noqa: F401 (register their workflows)
from archon.rl.compat.trinity.auxiliary import AuxiliaryConfig, AuxiliaryModel, AuxiliaryModels, with_thinking
from archon.rl.compat.trinity.experience import Experience
from archon.rl.compat.trinity.model import ModelWrapper
from archon.rl.compat.trinity.workflow import (
    REWARD_FUNCTIONS,
    WORKFLOWS,
    FormatConfig,
    GenerationConfig,
    RewardFn,
    Task,
    Workflow,
    declared_flag,
    is_awaited,
)
from archon.rl.episode_context import workflow_context
from archon.rl.trajectories import trajectory_tensors
from archon.rl.workflow_row import copy_containers
from archon.rl.workflows.agent import SharedServer
from archon.rl.workflows.base import RolloutWorkflow, SamplingWorkflow, split_outcomes, wrap_reward
from archon.schema.config import nearest
from archon.schema.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from archon.data.config import DatasetConfig
    from archon.rl.compat.trinity.model import Endpoint

T = TypeVar("T")
Sample = tuple[TokenRecord, float]


class Served(NamedTuple):
    """Generator and endpoints of one episode."""

    engine: InferenceEngine
    endpoint: Endpoint | None
    auxiliary_urls: list[str]


class TrinityWorkflow(SamplingWorkflow):
    """Rollout workflow that groups the experiences of one or several runs of a Trinity-style workflow.

    Rows need the column `raw_task`, which `train_data.raw` adds.

    Args:
        workflow: class, registered name or dotted path.
        gconfig: sampling parameters; the task's `rollout_args` repeat them.
        tokenizer: renders messages; its end-of-text and padding ids stop an answer.
        reward_fn: archon reward of the run; the task's `reward_fn`. None: the workflow scores its answers.
        reward: `RewardFn` class, registered name or dotted path; replaces `reward_fn`.
        format_args: fields of `FormatConfig`.
        workflow_args: arguments of the workflow.
        reward_fn_args: arguments of the `RewardFn`.
        enable_openai_api: start an OpenAI endpoint on this machine for `ModelWrapper.get_openai_client()`.
        enable_history: keep the answers of `ModelWrapper.chat` for `extract_experience_from_history`.
        enable_thinking: fixed value of the chat template's switch; None leaves it to the template.
        env_vars: environment variables to set in this process.
        auxiliary_models: fields of `AuxiliaryConfig` of each model.
        train_data: training data of the run; its columns are the defaults of `format_args`.
    """

    reads_raw_rows = True

    def __init__(
        self,
        workflow: type[Workflow] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        reward_fn: Any = None,
        reward: type[RewardFn] | str | None = None,
        format_args: Mapping[str, Any] | None = None,
        workflow_args: Mapping[str, Any] | None = None,
        reward_fn_args: Mapping[str, Any] | None = None,
        enable_openai_api: bool = False,
        enable_history: bool = False,
        enable_thinking: bool | None = None,
        env_vars: Mapping[str, str] | None = None,
        auxiliary_models: Sequence[Mapping[str, Any]] = (),
        train_data: DatasetConfig | None = None,
    ) -> None:
        kind: Any = WORKFLOWS[workflow] if isinstance(workflow, str) else workflow
        if not (isinstance(kind, type) and issubclass(kind, Workflow)):
            raise ConfigError(f"workflow: got {workflow!r}, expected a subclass of archon.rl.Workflow, or its name")
        if kind.run is Workflow.run and kind.run_async is Workflow.run_async:
            raise ConfigError(f"workflow class {kind.__qualname__} defines neither run nor run_async")
        for name in format_args or {}:
            if name not in (known := [field.name for field in fields(FormatConfig)]):
                raise ConfigError(f"format_args: unknown {name!r}{nearest(name, known)}")
        tokenizer = with_thinking(tokenizer, enable_thinking)
        os.environ.update({name: str(value) for name, value in (env_vars or {}).items()})
        super().__init__(gconfig, tokenizer)
        self.kind = kind
        self._awaits = is_awaited(kind)
        self._reward = REWARD_FUNCTIONS[reward] if isinstance(reward, str) else reward
        if reward is None and reward_fn is not None:
            self._reward = wrap_reward(reward_fn)
        self._format_args = FormatConfig(**(format_columns(train_data) | dict(format_args or {})))
        self._workflow_args, self._reward_fn_args = dict(workflow_args or {}), dict(reward_fn_args or {})
        self._serving = SharedServer(tokenizer) if enable_openai_api else None
        self._enable_history = enable_history
        self._auxiliary = AuxiliaryModels([AuxiliaryConfig.parse(dict(model)) for model in auxiliary_models])
        self._idle: list[tuple[Workflow, ModelWrapper, list[AuxiliaryModel]]] = []
        self._repeats = False

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        """Return a copy with other sampling parameters and no idle workflows."""
        changed = super().with_gconfig(gconfig)
        assert isinstance(changed, TrinityWorkflow)
        changed._idle = []  # a workflow may keep the sampling parameters it was constructed with
        return changed

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return one group as trajectory tensors [G, S], or None if every run rejected the task with an empty list.

        With several runs, an unusable answer or a failed reward costs the samples of its run and is counted.

        Raises:
            RolloutError: invalid experience; the message names key and shape. Errors of the workflow pass through.
        """
        if "raw_task" not in data:
            raise ConfigError(
                "a Trinity-style workflow reads the unchanged rows of its source: set raw=true in train_data and "
                f"eval_data (this row has {', '.join(map(repr, data))})"
            )
        async with AsyncExitStack() as stack:
            urls = await stack.enter_async_context(self._auxiliary.lease())
            endpoint = None if self._serving is None else await stack.enter_async_context(self._serving.lease())
            return await self._group(Served(engine, endpoint, urls), data)

    async def _group(self, served: Served, data: dict[str, Any]) -> dict[str, Tensor] | None:
        n = self.gconfig.n_samples
        outcomes: list[list[Sample] | BaseException] = []
        each, repeated = 1, range(n)
        if n == 1 or self.kind.can_repeat is not False or hasattr(self.kind, "repeatable"):
            first = await self._run(served, data, 0, n)
            outcomes.append(first)
            is_single = len(first) == 1 and not self._repeats and not workflow_context.get().drops
            each, repeated = n, range(1, n if is_single else 1)
        outcomes += await asyncio.gather(
            *(self._run(served, data, run, each) for run in repeated), return_exceptions=True
        )
        results, failures = split_outcomes(outcomes)
        samples = [sample for _, returned in results for sample in returned]
        if not samples and failures:
            raise failures[0]
        if not samples:
            return None
        records, rewards = [record for record, _ in samples], [reward for _, reward in samples]
        # Each of several runs is one trajectory in parts. A single run returns a group of trajectories.
        runs = [run for run, returned in results for _ in returned]
        return trajectory_tensors(records, rewards, runs if len(set(runs)) > 1 else None)

    async def _run(self, served: Served, data: dict[str, Any], run: int, n: int) -> list[Sample]:
        """Return the samples of one run; a later run reuses its workflow if that can be reset."""
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
        used: Workflow | None = None
        if self._idle:
            used, model, auxiliary = self._idle.pop()
        else:
            model = ModelWrapper(self.tokenizer, enable_history=self._enable_history)
            auxiliary = self._auxiliary.models()
        model.open(served.engine, rollout, run, served.endpoint)
        for wrapper, url in zip(auxiliary, served.auxiliary_urls, strict=True):
            wrapper.connect(url, run)

        def prepare() -> Workflow:
            workflow = used
            if workflow is None:
                workflow = self.kind(task=task, model=model, auxiliary_models=list(auxiliary))
            else:
                workflow.task = task
                workflow.reset(task)
            if declared_flag(workflow, "can_repeat", "repeatable"):
                workflow.set_repeat_times(n, run)
            return workflow

        def prepare_and_run() -> tuple[Workflow, list[Experience]]:
            workflow = prepare()
            return workflow, workflow.run()

        try:
            if self._awaits:
                workflow = prepare()
                result = await workflow.run_async()
            else:
                workflow, result = await run_in_thread(prepare_and_run)
            samples = self._validate_experiences(result, model)
        finally:
            model.close()
            for wrapper in auxiliary:
                wrapper.close()
        self._repeats = bool(declared_flag(workflow, "can_repeat", "repeatable"))
        if declared_flag(workflow, "can_reset", "resettable"):
            self._idle.append((workflow, model, auxiliary))
        return samples

    def _validate_experiences(self, result: Any, model: ModelWrapper) -> list[Sample]:
        name = f"{self.kind.__name__}.{'run_async' if self._awaits else 'run'}"
        if not isinstance(result, list | tuple):
            raise RolloutError(
                f"{name} returned a {type(result).__name__}, expected a list of Experience ([] rejects the task)"
            )
        samples = [to_sample(item, model, f"{name}: experience {index}") for index, item in enumerate(result)]
        for index, experience in enumerate(result):
            try:
                workflow_context.record(**experience.metrics)
            except (TypeError, ValueError) as error:
                raise RolloutError(f"{name}: experience {index}: 'metrics' must be numbers by name ({error})") from None
        return samples


def format_columns(data: DatasetConfig | None) -> dict[str, Any]:
    """Return the fields of `FormatConfig` that a dataset's configuration sets."""
    if data is None:
        return {}
    set_fields = data.model_dump(include={"prompt_key", "response_key", "system_prompt"}, exclude_unset=True)
    return {name: value for name, value in set_fields.items() if value is not None}


def to_sample(experience: Any, model: ModelWrapper, where: str) -> Sample:
    """Return the token record and reward of an experience.

    Versions and missing logprobs come from the model's record of the same tokens. The rollout later drops rewards that
    are not finite.

    Args:
        experience: result of the workflow.
        model: the run's model with its records.
        where: beginning of error messages.

    Raises:
        RolloutError: invalid experience.
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
    try:
        reward = float(experience.reward)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise RolloutError(f"{where}: 'reward' is {experience.reward!r}, expected a number") from None
    known = model.find_record(tokens)
    generated = known.loss_mask[start:] if known else [0] * size
    if experience.logprobs is not None:
        logprobs = _vector(experience.logprobs, "logprobs", where, size, integers=False)
    elif missing := sum(m > g for m, g in zip(mask, generated, strict=True)):
        raise RolloutError(
            f"{where}: 'logprobs' is missing for {missing} of its {sum(mask)} trained tokens, which the model did not "
            "generate after exactly these tokens in this run; return the tokens and logprobs of a response unchanged, "
            "or mask those tokens with action_mask"
        )
    else:
        assert known is not None
        logprobs = known.logprobs[start:]
    record = TokenRecord(tokens, [0] * start, [0.0] * start, [-1] * start, [-1] * start)
    record.loss_mask += mask
    record.logprobs += [lp if m else 0.0 for lp, m in zip(logprobs, mask, strict=True)]
    for place, (trained, sampled) in enumerate(zip(mask, generated, strict=True), start):
        record.versions.append(
            -1 if not trained else known.versions[place] if known and sampled else model.model_version
        )
        record.turn_ids.append(-1 if not trained else known.turn_ids[place] if known and sampled else 0)
    record.turns = known.turns if known else 1
    record.truncated = known.truncated if known else experience.truncate_status is not None
    return record, reward


def _vector(value: Any, key: str, where: str, size: int | None = None, *, integers: bool = True) -> list[Any]:
    """Return a one-dimensional tensor as a list; `size` is its required length."""
    expected = f"expected one dimension of {'integers' if integers else 'numbers'}"
    if size is not None:
        expected = f"expected ({size},), one for each token after prompt_length"
    if not isinstance(value, Tensor):
        raise RolloutError(f"{where}: {key!r} is a {type(value).__name__}, {expected}")
    if value.ndim != 1 or (size is not None and len(value) != size):
        raise RolloutError(f"{where}: {key!r} has shape {tuple(value.shape)}, {expected}")
    if integers and value.is_floating_point():
        raise RolloutError(f"{where}: {key!r} of shape {tuple(value.shape)} is {value.dtype}, expected integers")
    return value.tolist()


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread with the caller's context.

    Unlike `asyncio.to_thread`, it delays neither cancellation of the caller nor the end of the process.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a running future cannot be canceled, so its result can always be set
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(work))
        except StopIteration as stop:  # asyncio's futures do not accept it
            result.set_exception(RuntimeError(f"the workflow raised StopIteration: {stop}"))
        except BaseException as error:  # noqa: BLE001 (the awaiting caller raises it)
            result.set_exception(error)

    threading.Thread(target=run, name="trinity-run", daemon=True).start()
    return await asyncio.wrap_future(result)


def adapt_workflow(workflow: Any, further: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Resolve a workflow name and wrap Trinity-style classes in `TrinityWorkflow`."""
    if isinstance(workflow, str):
        workflow = WORKFLOWS[workflow]
    if isinstance(workflow, type) and issubclass(workflow, Workflow):
        return TrinityWorkflow, {"workflow": workflow, **further}
    return workflow, further
