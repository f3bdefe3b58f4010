"""The rollout of a batch through the real generator: order, losses that are counted, groups without spread."""

from __future__ import annotations

import asyncio
import copy
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from archon.data import encode_prompt
from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest
from archon.rl import RLVRWorkflow, RolloutWorkflow
from archon.rl.algorithms.advantages import Groups
from archon.rl.algorithms.config import GroupRule
from archon.rl.episode import Episode
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.logprob_check import check_recomputable
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout, WorkflowError, WorkflowRefusedError, recorded_means
from archon.schema.errors import ConfigError, RolloutError
from tests.rl import rewards_for_tests as rewards

GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=4)


def prompts(n: int, start: int = 0) -> list[Prompt]:
    rows = [
        {"prompt": f"{i}+1=", "messages": [{"role": "user", "content": f"{i}+1="}], "answer": "0"} for i in range(99)
    ]
    return [Prompt(start + i, rows[start + i]) for i in range(n)]


class Stream:
    """Prompts 0, 1, 2, …, and what was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def take(self, n: int) -> list[Prompt]:
        self.asked.append(n)
        return prompts(n, sum(self.asked[:-1]))


class Wrapped(RolloutWorkflow):
    """RLVR, with something done to some of its results."""

    def __init__(self, inner: RLVRWorkflow) -> None:
        self.inner = inner

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        result = await self.inner.arun_episode(engine, data)
        assert result is not None
        return self.change(result, data, workflow_context.get().task_id)

    def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
        return result


@pytest.fixture
def rlvr(tokenizer: Any) -> RLVRWorkflow:
    return RLVRWorkflow(rewards.count_digits, GCONFIG, tokenizer)


def collect(
    engine: InProcessEngine, workflow: RolloutWorkflow, n: int = 6, zero_variance: Any = "keep", **options: Any
) -> tuple[Any, list[str], Stream]:
    log: list[str] = []
    stream = Stream()
    rollout = Rollout(engine, workflow, rule=GroupRule(zero_variance), log=log.append)
    batch = asyncio.run(rollout.collect(stream.take, n, step=0, **options))
    return batch, log, stream


def test_batch_keeps_the_order_of_submission_whatever_finishes_first(
    engine: InProcessEngine, rlvr: RLVRWorkflow
) -> None:
    class LastFirst(Wrapped):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            result = await super().arun_episode(engine, data)
            await asyncio.sleep(0.05 - 0.01 * workflow_context.get().task_id)
            return result

    batch, log, _ = collect(engine, LastFirst(rlvr), n=5)
    plain, _, _ = collect(engine, rlvr, n=5)
    assert [prompt.index for prompt in batch.prompts] == [0, 1, 2, 3, 4]
    assert batch.trajectories["group_ids"].tolist() == [g for g in range(5) for _ in range(4)]
    for name in ("input_ids", "logprobs", "rewards"):
        assert batch.trajectories[name].equal(plain.trajectories[name])
    assert log == []


def test_random_stream_belongs_to_the_request_not_to_the_batch(engine: InProcessEngine, rlvr: RLVRWorkflow) -> None:
    """What prompt 3 samples does not depend on which other prompts are in the batch, only on the step."""
    rollout = Rollout(engine, rlvr)
    alone = asyncio.run(rollout.run(prompts(1, 3), step=7))[0]
    together = asyncio.run(rollout.run(prompts(6), step=7))[3]
    later = asyncio.run(rollout.run(prompts(1, 3), step=8))[0]
    assert alone.trajectories is not None
    assert together.trajectories is not None
    assert later.trajectories is not None
    assert alone.trajectories["input_ids"].equal(together.trajectories["input_ids"])
    assert later.trajectories["input_ids"].tolist() != alone.trajectories["input_ids"].tolist()


def test_evaluation_draws_from_streams_of_its_own(engine: InProcessEngine, rlvr: RLVRWorkflow) -> None:
    rollout = Rollout(engine, rlvr)
    trained, evaluated, again = (
        asyncio.run(rollout.run(prompts(1, 3), is_eval=is_eval))[0].trajectories for is_eval in (False, True, True)
    )
    assert trained is not None and evaluated is not None and again is not None
    assert evaluated["input_ids"].equal(again["input_ids"])
    assert evaluated["input_ids"].tolist() != trained["input_ids"].tolist()


def test_workflow_that_raises_sometimes_costs_those_prompts_and_is_counted(
    engine: InProcessEngine, rlvr: RLVRWorkflow
) -> None:
    class RaisesOnOdd(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            if index % 2:
                raise KeyError(f"prompt {index}")
            return result

    batch, log, _ = collect(engine, RaisesOnOdd(rlvr), n=6)
    assert [prompt.index for prompt in batch.prompts] == [0, 2, 4]
    assert batch.counts["failed/KeyError"] == 3
    assert log == ["step 0: 3 episodes failed (KeyError): 'prompt 1'"]


@pytest.mark.parametrize("error", [StopIteration, GeneratorExit, BaseException])
def test_an_exception_of_any_kind_costs_its_prompt(
    engine: InProcessEngine, rlvr: RLVRWorkflow, error: type[BaseException]
) -> None:
    class Raises(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            if index == 1:
                raise error("by the user")
            return result

    batch, log, _ = collect(engine, Raises(rlvr), n=3)
    assert [prompt.index for prompt in batch.prompts] == [0, 2]
    # Python itself turns a StopIteration that leaves a coroutine into a RuntimeError.
    kind = "RuntimeError" if error is StopIteration else error.__name__
    assert batch.counts[f"failed/{kind}"] == 1 and len(log) == 1


def test_ctrl_c_in_a_workflow_ends_the_rollout(engine: InProcessEngine, rlvr: RLVRWorkflow) -> None:
    class Interrupted(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(engine, Interrupted(rlvr), n=3)


UNUSABLE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "meta": ("a tensor of the meta device", lambda tensor: tensor.to("meta")),
    "sparse": ("a sparse tensor", lambda tensor: tensor.to_sparse()),
    "complex": ("of torch.complex64", lambda tensor: tensor.to(torch.complex64)),
    "8 bits": ("of torch.float8_e4m3fn", lambda tensor: tensor.float().to(torch.float8_e4m3fn)),
    "nested": ("a nested tensor", lambda tensor: torch.nested.as_nested_tensor([*tensor], layout=torch.jagged)),
}


OF_TOKENS, OF_ROWS = ("input_ids", "loss_mask", "logprobs", "versions"), ("rewards", "trajectory_ids")


@pytest.mark.parametrize(
    ("key", "kind"),
    # Numbers alone cannot be nested.
    [(key, kind) for key in OF_TOKENS + OF_ROWS for kind in UNUSABLE if key in OF_TOKENS or kind != "nested"],
)
def test_a_tensor_without_ordinary_numbers_is_refused_by_name(
    engine: InProcessEngine, rlvr: RLVRWorkflow, key: str, kind: str
) -> None:
    said, make = UNUSABLE[kind]

    class Unusable(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            result = {"trajectory_ids": torch.arange(len(result["rewards"])), **result}
            return {**result, key: make(result[key])}

    with pytest.raises(WorkflowRefusedError, match=f"Unusable: '{key}' is {re.escape(said)}.*, expected a dense"):
        collect(engine, Unusable(rlvr), n=2)


@pytest.mark.parametrize("kind", [kind for kind in UNUSABLE if kind != "nested"])
@pytest.mark.parametrize("key", ["input_ids", "output_ids", "reward"])
def test_so_it_is_in_the_short_form(engine: InProcessEngine, tokenizer: Any, key: str, kind: str) -> None:
    said, make = UNUSABLE[kind]

    class Short(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            ids = encode_prompt(tokenizer, data)
            answer = await engine.agenerate(ModelRequest(ids, GCONFIG.new(n_samples=1)))
            short = {"input_ids": ids, "output_ids": answer.output_tokens, "reward": [1.0]}
            return short | {key: make(torch.tensor(short[key]))}

    with pytest.raises(WorkflowRefusedError, match=f"Short: '{key}' is {re.escape(said)}.*, expected a dense"):
        collect(engine, Short(), n=2)


def test_a_workflow_that_awaits_what_is_cancelled_fails(engine: InProcessEngine, rlvr: RLVRWorkflow) -> None:
    class Canceling(Wrapped):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            if workflow_context.get().task_id == 2:
                asked = asyncio.ensure_future(asyncio.sleep(60))
                asked.cancel()
                await asked
            return await super().arun_episode(engine, data)

    batch, _, _ = collect(engine, Canceling(rlvr), n=4)
    assert [prompt.index for prompt in batch.prompts] == [0, 1, 3]
    assert batch.counts["failed/CancelledError"] == 1


def test_workflow_that_always_fails_stops_the_run_within_seconds_with_the_first_traceback(
    engine: InProcessEngine, rlvr: RLVRWorkflow
) -> None:
    class Broken(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            return self.a_misspelt_name(result)  # type: ignore[attr-defined]

    started = time.monotonic()
    with pytest.raises(WorkflowError, match=r"Broken failed on 16 prompts and succeeded on none") as caught:
        collect(engine, Broken(rlvr), n=64)
    assert time.monotonic() - started < 10
    shown = "".join(traceback.format_exception(caught.value))
    assert "return self.a_misspelt_name(result)" in shown
    with pytest.raises(WorkflowError, match="failed on 3 prompts"):
        collect(engine, Broken(rlvr), n=3)


def test_reward_that_always_fails_stops_the_run_with_its_traceback(engine: InProcessEngine, tokenizer: Any) -> None:
    with pytest.raises(WorkflowError) as caught:
        collect(engine, RLVRWorkflow(rewards.always_raises, GCONFIG, tokenizer), n=4)
    assert 'raise ZeroDivisionError("this reward is broken")' in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r | {"rewards": r["rewards"][:2]}, r"'rewards' has shape \(2,\), expected \(4,\)"),
        (lambda r: r | {"logprobs": r["logprobs"][:, 1:]}, r"'logprobs' has shape \(4, \d+\), expected \(4, \d+\)"),
        (lambda r: {k: v for k, v in r.items() if k != "versions"}, r"lacks key 'versions'"),
        (lambda r: r | {"loss_mask": r["loss_mask"] * 2}, r"'loss_mask' of shape .* holds values other than 0 and 1"),
        (lambda r: [r], r"got a list, expected a dictionary of tensors"),
    ],
)
def test_wrong_result_names_key_and_shape(
    engine: InProcessEngine, rlvr: RLVRWorkflow, change: Any, message: str
) -> None:
    class Wrong(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            return change(result)

    with pytest.raises(WorkflowError, match=message):
        collect(engine, Wrong(rlvr), n=2)


def test_samples_with_missing_numbers_are_dropped_and_counted_never_zeroed(
    engine: InProcessEngine, rlvr: RLVRWorkflow
) -> None:
    class NotFinite(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            if index == 0:
                result["logprobs"][1, -1] = torch.nan
                result["rewards"][2] = torch.inf
                result["loss_mask"][3] = 0
            return result

    batch, log, _ = collect(engine, NotFinite(rlvr), n=2)
    assert batch.trajectories["group_ids"].tolist() == [0, 1, 1, 1, 1]
    dropped = {name: n for name, n in batch.counts.items() if name.startswith("dropped/")}
    assert dropped == {"dropped/logprob_not_finite": 1, "dropped/reward_not_finite": 1, "dropped/no_loss_token": 1}
    assert len(log) == 3
    assert batch.trajectories["logprobs"].isfinite().all()


def test_trajectories_of_several_rows_have_ids_that_no_other_group_has(
    engine: InProcessEngine, rlvr: RLVRWorkflow
) -> None:
    """Group g has trajectories of two rows each, the last of one; their ids restart in every group."""

    class InParts(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            rows = 4 - index % 3
            kept = {name: value[:rows] for name, value in result.items()}
            return kept | {"trajectory_ids": torch.arange(rows) // 2, "rewards": torch.arange(float(rows)) + index}

    batch, _, _ = collect(engine, InParts(rlvr), n=5)
    groups, ids = batch.trajectories["group_ids"], batch.trajectories["trajectory_ids"]
    assert groups.tolist() == [0] * 4 + [1] * 3 + [2] * 2 + [3] * 4 + [4] * 3
    own = torch.cat([torch.arange(n) // 2 for n in (4, 3, 2, 4, 3)])
    wanted = {(g, o): set() for g, o in zip(groups.tolist(), own.tolist(), strict=True)}
    for g, o, found in zip(groups.tolist(), own.tolist(), ids.tolist(), strict=True):
        wanted[g, o].add(found)
    assert all(len(found) == 1 for found in wanted.values()), "the rows of a trajectory share an id"
    assert len(set.union(*wanted.values())) == len(wanted) == 9, "no two trajectories share one"

    rewards = batch.trajectories["rewards"]
    together = Groups(rewards, groups, ids)
    for group in range(5):
        of = groups == group
        alone = Groups(rewards[of], groups[of], own[of])
        assert torch.equal(together.subtract_baseline(together.mean)[of], alone.subtract_baseline(alone.mean))


def test_rejected_episodes_are_counted_and_a_batch_of_nothing_else_is_an_error(
    engine: InProcessEngine, rlvr: RLVRWorkflow
) -> None:
    class Rejects(Wrapped):
        limit = 1

        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            return None if index < self.limit else result

    batch, _, _ = collect(engine, Rejects(rlvr), n=3)
    assert (batch.counts["rejected"], len(batch.prompts)) == (1, 2)
    Rejects.limit = 99
    with pytest.raises(RolloutError, match=r"rejected all 3 prompts"):
        collect(engine, Rejects(rlvr), n=3)


class FlatOnOdd(Wrapped):
    """Every other group has equal rewards."""

    def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
        n = len(result["rewards"])
        return result | {"rewards": torch.ones(n) if index % 2 else torch.arange(float(n))}


def test_zero_variance_groups_are_kept_or_dropped_and_counted(engine: InProcessEngine, rlvr: RLVRWorkflow) -> None:
    kept, _, _ = collect(engine, FlatOnOdd(rlvr), n=6)
    assert (len(kept.prompts), kept.counts["zero_variance_groups"]) == (6, 3)
    dropped, _, stream = collect(engine, FlatOnOdd(rlvr), n=6, zero_variance="drop")
    assert [prompt.index for prompt in dropped.prompts] == [0, 2, 4]
    assert (dropped.counts["zero_variance_groups"], dropped.counts["resampled"], stream.asked) == (3, 0, [6])
    n = len(kept.trajectories["rewards"]) // 6  # three groups of ones, three of 0 to n - 1
    assert kept.reward == dropped.reward == pytest.approx((1 + (n - 1) / 2) / 2)


def test_resampling_replaces_zero_variance_groups_within_its_bound(engine: InProcessEngine, rlvr: RLVRWorkflow) -> None:
    # 6 prompts (0–5) give 3 groups; 3 more (6–8) give 6 and 8; 1 more (9) gives none: two rounds more, 5 of 6 groups.
    batch, _, stream = collect(engine, FlatOnOdd(rlvr), n=6, zero_variance="resample", max_resamples=2)
    assert stream.asked == [6, 3, 1]
    assert [prompt.index for prompt in batch.prompts] == [0, 2, 4, 6, 8]
    assert batch.counts == {"prompts": 6, "resampled": 4, "episodes": 10, "zero_variance_groups": 5}


def test_batch_in_which_no_group_has_spread_is_empty_not_an_error(engine: InProcessEngine, tokenizer: Any) -> None:
    workflow = RLVRWorkflow(rewards.constant, GCONFIG, tokenizer)
    batch, _, stream = collect(engine, workflow, n=3, zero_variance="resample", max_resamples=2)
    assert not batch
    assert stream.asked == [3, 3, 3]
    assert batch.counts["zero_variance_groups"] == 9


def test_recorded_numbers_are_averaged_over_the_batch(engine: InProcessEngine, tokenizer: Any) -> None:
    batch, _, _ = collect(engine, RLVRWorkflow(rewards.in_parts, GCONFIG, tokenizer), n=3)
    assert batch.numbers["reward/format"] == 0.25
    assert batch.numbers["reward/length"] == pytest.approx(batch.trajectories["loss_mask"].sum(1).float().mean().item())


def test_recorded_values_count_alike_whoever_recorded_them() -> None:
    """The mean of 1, 1, 1 and 5 is 2; the mean of the two episodes' means would be 3."""
    episodes = [Episode(prompt, EpisodeContext(prompt.index)) for prompt in prompts(2)]
    for episode, values in zip(episodes, ([1.0, 1.0, 1.0], [5.0]), strict=True):
        episode.context.numbers["turns"] += values
    assert recorded_means(episodes) == {"turns": 2.0}


@pytest.mark.parametrize(
    "refused",
    [
        {"greedy": True},
        {"top_p": 0.9},
        {"top_k": 4},
        {"min_p": 0.1},
        {"min_new_tokens": 2},
        {"temperature": 0.7},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {5: 1.0}},
    ],
)
def test_values_the_trainer_cannot_replay_are_refused_for_training_and_allowed_for_evaluation(
    engine: InProcessEngine, tokenizer: Any, refused: dict[str, Any]
) -> None:
    """Also those a custom workflow puts into its own requests, which no configuration shows."""
    workflow = RLVRWorkflow(rewards.constant, GCONFIG.new(**refused), tokenizer)
    rollout = Rollout(engine, workflow, check=lambda gconfig: check_recomputable(gconfig, 1.0))
    with pytest.raises(ConfigError, match=f"gconfig.{next(iter(refused))}.*cannot recompute"):
        asyncio.run(rollout.run(prompts(2)))
    episodes = asyncio.run(rollout.run(prompts(2), is_eval=True))
    assert all(episode.trajectories for episode in episodes)


def test_constraints_are_refused_for_training_and_allowed_for_evaluation(
    engine: InProcessEngine, tokenizer: Any
) -> None:
    class AnyToken:
        def allowed(self, vocab_size: int) -> np.ndarray:
            return np.ones(vocab_size, dtype=bool)

        def accept(self, token: int) -> None: ...

    class Constrained(RLVRWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            ids = self.tokenizer("1").input_ids
            await engine.agenerate(ModelRequest(ids, GCONFIG.new(n_samples=1), constraint=AnyToken()))
            return await super().arun_episode(engine, data)

    rollout = Rollout(
        engine,
        Constrained(rewards.constant, GCONFIG, tokenizer),
        check=lambda gconfig: check_recomputable(gconfig, 1.0),
    )
    with pytest.raises(ConfigError, match="cannot recompute the logprobs of constrained sampling"):
        asyncio.run(rollout.run(prompts(2)))
    assert all(episode.trajectories for episode in asyncio.run(rollout.run(prompts(2), is_eval=True)))


def test_sampling_defaults_are_explicit() -> None:
    defaults = GenerationHyperparameters()
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.greedy) == (1.0, 1.0, None, False)
    check_recomputable(defaults, 1.0)


def test_context_tells_evaluation_from_training(engine: InProcessEngine, rlvr: RLVRWorkflow) -> None:
    class Tells(Wrapped):
        def change(self, result: dict[str, Any], data: dict[str, Any], index: int) -> Any:
            workflow_context.record(**{workflow_context.stat_scope(): float(workflow_context.get().is_eval)})
            return result

    for is_eval, scope in ((False, "rollout"), (True, "eval")):
        episode = asyncio.run(Rollout(engine, Tells(rlvr)).run(prompts(1), is_eval=is_eval))[0]
        assert episode.context.numbers == {scope: [float(is_eval)]}


def test_the_engine_of_an_episode_is_an_inference_engine_and_can_be_copied(engine: InProcessEngine) -> None:
    """Members are attributes of the class: `isinstance` with a protocol looks them up without calling `__getattr__`."""
    own = EpisodeEngine(engine, EpisodeContext())
    assert isinstance(own, InferenceEngine) and copy.copy(own).version == engine.version
    members = {name for name in vars(InferenceEngine) if not name.startswith("_")}
    assert members <= set(dir(EpisodeEngine))


def test_filter_of_training_leaves_evaluation_alone(engine: InProcessEngine, rlvr: RLVRWorkflow) -> None:
    """Nor is it called: it may count the groups that it sees."""
    seen: list[int] = []

    def refuse(group: dict[str, Any]) -> bool:
        seen.append(len(group["rewards"]))
        return False

    rollout = Rollout(engine, rlvr, accept=refuse)
    assert not any(episode.filtered for episode in asyncio.run(rollout.run(prompts(2), is_eval=True))) and not seen
    assert all(episode.filtered for episode in asyncio.run(rollout.run(prompts(2)))) and seen == [4, 4]
