"""Mistakes in the forms of other frameworks' workflows, and in runs of several processes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a Trinity task says a temperature where answers are greedy",
        "rl/compat/trinity/adapter.py",
        "temperature=0.0 if rollout.greedy else rollout.temperature,",
        "temperature=rollout.temperature,",
        ("tests/rl/compat/trinity",),
    ),
    Mutant(
        "a Trinity model scores given tokens at temperature 1",
        "rl/compat/trinity/model.py",
        "temperature = self._gconfig.temperature\n",
        "temperature = 1.0\n",
        ("tests/rl/compat/trinity/test_auxiliary.py",),
    ),
    Mutant(
        "a Trinity workflow that asks for temperature 0 samples",
        "rl/compat/trinity/model.py",
        'changes["greedy"] = True',
        'changes["greedy"] = False',
        ("tests/rl/compat/trinity/test_model.py",),
    ),
    Mutant(
        "tokens of experiences have the version of their return, not of their sampling",
        "rl/compat/trinity/adapter.py",
        "known.versions[place] if known and sampled else model.model_version",
        "model.model_version",
        ("tests/rl/compat/trinity/test_experiences.py",),
    ),
    Mutant(
        "tokens that the workflow masks are trained",
        "rl/compat/trinity/adapter.py",
        "record.loss_mask += mask",
        "record.loss_mask += [1] * size",
        ("tests/rl/compat/trinity/test_experiences.py",),
    ),
    Mutant(
        "each experience of several Trinity runs is a trajectory of its own",
        "rl/compat/trinity/adapter.py",
        "trajectory_tensors(records, rewards, runs if len(set(runs)) > 1 else None)",
        "trajectory_tensors(records, rewards)",
        ("tests/rl/compat/trinity",),
    ),
    Mutant(
        "a Trinity workflow that returned several experiences is run again",
        "rl/compat/trinity/adapter.py",
        "is_single = len(first) == 1 and",
        "is_single = len(first) >= 1 and",
        ("tests/rl/compat/trinity",),
    ),
    Mutant(
        "the calls of a Trinity run draw from one random stream",
        "rl/compat/trinity/model.py",
        "self._calls += 1",
        "self._calls += 0",
        ("tests/rl/compat/trinity/test_model.py",),
    ),
    Mutant(
        "a client's answers are taken from the history twice",
        "rl/compat/trinity/model.py",
        "self._session.interactions.clear()",
        "self._session.interactions.copy()",
        ("tests/rl/compat/trinity/test_openai_client.py",),
    ),
    Mutant(
        "each step of a Trinity run is rewarded as the one before",
        "rl/compat/trinity/step_wise.py",
        """            reward = self.reward(step_experiences, step_num=number)
""",
        """            reward = self.reward(step_experiences, step_num=max(0, number - 1))
""",
        ("tests/rl/compat/trinity/test_step_wise.py",),
    ),
    Mutant(
        "Trinity's sync_offset does not count as staleness",
        "rl/compat/trinity/config.py",
        'every + (settings.get("synchronizer.sync_offset") or 0)',
        "every",
        ("tests/rl/compat/trinity/test_config.py",),
    ),
    Mutant(
        "Trinity's train_batch_size is the number of minibatches",
        "rl/compat/trinity/config.py",
        '_put(config, "algorithm.minibatches", whole // size)',
        '_put(config, "algorithm.minibatches", size)',
        ("tests/rl/compat/trinity",),
    ),
    Mutant(
        "runs of an AReaL workflow are one trajectory",
        "rl/workflows/grouping.py",
        'parts.append({**sample, "trajectory_ids": before + ids})',
        'parts.append({**sample, "trajectory_ids": ids})',
        ("tests/rl/test_areal_guide.py",),
    ),
    Mutant(
        "equal answers of a short form have the logprobs and versions of the first",
        "rl/workflows/short_forms.py",
        "same.pop(0) if len(same) > 1 else same[0]",
        "same[0]",
        ("tests/rl/test_areal_guide.py",),
    ),
    Mutant(
        "runs without temperatures get those of the others",
        "rl/trajectories.py",
        '{"temperatures": torch.zeros(group["logprobs"].shape), **group}',
        '{"temperatures": torch.ones(group["logprobs"].shape), **group}',
        ("tests/rl/test_areal_guide.py", "tests/rl/test_agent_sampling.py"),
    ),
    Mutant(
        "a group that is never full waits for ever",
        "rl/workflows/online.py",
        "asyncio.get_running_loop().call_later(self._group_timeout, self._release_group, name)",
        "asyncio.get_running_loop().call_later(1e6, self._release_group, name)",
        ("tests/serve/test_online.py",),
    ),
    Mutant(
        "what an explorer adds after a trainer's first pass is mixed into the second",
        "rl/modes.py",
        "numbers += [first + number % length for number in range(start, stop)]",
        "numbers += [number % size for number in range(start, stop)]",
        ("tests/rl/test_modes.py",),
    ),
    Mutant(
        "REC's ring trains failures below its outer bound again",
        "rl/algorithms/off_policy.py",
        "torch.where(terms.advantages >= 0, ratio <= 1 - RING_LOW, ratio >= 1 + RING_HIGH)",
        "(ratio <= 1 - RING_LOW)",
        ("tests/rl/test_policy_losses.py",),
    ),
)
