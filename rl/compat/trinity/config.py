"""Translates a Trinity-RFT configuration. Every key is mapped, known to have no effect in archon, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from archon.rl.algorithms.presets import PRESETS
from archon.rl.compat.trinity.adapter import TrinityWorkflow
from archon.rl.compat.trinity.workflow import REWARD_FUNCTIONS, WORKFLOWS
from archon.rl.rewards import get_reward_fn
from archon.schema.config import merge_sections, nearest
from archon.schema.errors import ConfigError, RewardError

logger = logging.getLogger(__name__)

_INPUT = "buffer.explorer_input."
_TRAIN, _EVAL = _INPUT + "taskset.", _INPUT + "eval_taskset."
_MODEL = "explorer.rollout_model."
_SPELLINGS = {
    "task_set": "taskset",
    "default_workflow": "default_workflow_type",
    "default_reward_fn": "default_reward_fn_type",
}
_WHOLE = tuple(taskset + name for taskset in (_TRAIN, _EVAL) for name in ("workflow_args", "reward_fn_args"))

# Trinity-RFT's key: archon's keys.
SETTINGS: dict[str, tuple[str, ...]] = {
    "continue_from_checkpoint": ("resume",),
    "algorithm.algorithm_type": ("algorithm.preset",),
    "algorithm.repeat_times": ("gconfig.n_samples",),
    "algorithm.optimizer.lr": ("actor.optimizer.lr",),
    "algorithm.optimizer.weight_decay": ("actor.optimizer.weight_decay",),
    "algorithm.optimizer.lr_scheduler_type": ("actor.scheduler.kind",),
    "algorithm.optimizer.warmup_style": ("actor.scheduler.kind",),
    "algorithm.optimizer.lr_warmup_steps": ("actor.scheduler.warmup_steps",),
    "algorithm.policy_loss_fn_args.clip_range": (
        "algorithm.policy_loss.clip_low",
        "algorithm.policy_loss.clip_high",
    ),
    "algorithm.policy_loss_fn_args.clip_range_low": ("algorithm.policy_loss.clip_low",),
    "algorithm.policy_loss_fn_args.clip_range_high": ("algorithm.policy_loss.clip_high",),
    "algorithm.kl_loss_fn": ("algorithm.kl.kind",),
    "algorithm.kl_loss_fn_args.kl_coef": ("algorithm.kl.coef",),
    "algorithm.entropy_loss_fn_args.entropy_coef": ("algorithm.entropy_coef",),
    "model.model_path": ("actor.path",),
    "model.max_prompt_tokens": ("train_data.max_length",),
    "model.max_response_tokens": ("gconfig.max_new_tokens",),
    "model.max_model_len": ("generator.max_seq_len",),
    "buffer.batch_size": ("rollout.prompts_per_step",),
    "buffer.total_steps": ("total_steps",),
    _TRAIN + "path": ("train_data.path",),
    _TRAIN + "subset_name": ("train_data.subset",),
    _TRAIN + "split": ("train_data.split",),
    _TRAIN + "format.prompt_key": ("train_data.prompt_key", "workflow_args.format_args.prompt_key"),
    _TRAIN + "format.response_key": ("train_data.response_key", "workflow_args.format_args.response_key"),
    _TRAIN + "format.system_prompt": ("workflow_args.format_args.system_prompt",),
    _TRAIN + "repeat_times": ("gconfig.n_samples",),
    _TRAIN + "rollout_args.n": ("gconfig.n_samples",),
    _TRAIN + "rollout_args.temperature": ("gconfig.temperature",),
    _TRAIN + "rollout_args.top_p": ("gconfig.top_p",),
    _TRAIN + "rollout_args.top_k": ("gconfig.top_k",),
    _TRAIN + "rollout_args.max_tokens": ("gconfig.max_new_tokens",),
    _TRAIN + "workflow_args": ("workflow_args.workflow_args",),
    _TRAIN + "reward_fn_args": ("workflow_args.reward_fn_args",),
    _EVAL + "path": ("eval_data.path",),
    _EVAL + "subset_name": ("eval_data.subset",),
    _EVAL + "split": ("eval_data.split",),
    _EVAL + "repeat_times": ("evaluation.n_samples",),
    _EVAL + "rollout_args.n": ("evaluation.n_samples",),
    _EVAL + "rollout_args.temperature": ("evaluation.temperature",),
    "explorer.eval_interval": ("evaluation.every",),
    _MODEL + "dtype": ("actor.dtype",),
    _MODEL + "seed": ("seed",),
    _MODEL + "enable_openai_api": ("workflow_args.enable_openai_api",),
    "trainer.total_steps": ("total_steps",),
    "trainer.save_interval": ("checkpoint.every",),
    "trainer.max_checkpoints_to_keep": ("checkpoint.keep",),
    "trainer.grad_clip": ("actor.optimizer.max_grad_norm",),
    "trainer.max_token_len_per_gpu": ("actor.max_tokens_per_mb",),
}
_TASKSET_ENDS = ("default_workflow_type", "default_reward_fn_type")
# Keys that the functions below read.
_OTHERS = {"project", "name", "group", "checkpoint_root_dir", "model.critic_model_path", "buffer.total_epochs"}
_OTHERS |= {"buffer.train_batch_size", _INPUT + "default_eval_workflow_type"}
_OTHERS |= {prefix + end for prefix in (_INPUT, _TRAIN, _EVAL) for end in _TASKSET_ENDS}
_OTHERS |= {_EVAL + name for name in ("format.prompt_key", "format.response_key", "format.system_prompt")}
_OTHERS |= {_EVAL + name for name in ("workflow_args", "reward_fn_args")}

# The values that archon supports, and the reason why it refuses others.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "mode": (("both", "colocate"), "archon generates and trains in one run"),
    "algorithm.kl_penalty_fn": (("none",), "write `archon: {algorithm: {kl: {place: reward}}}`"),
    "algorithm.sample_strategy": (("default",), "every batch is trained once it is complete"),
    "model.min_response_tokens": ((1,), "the trainer cannot replay a lower limit"),
    "model.repetition_penalty": ((1,), "the trainer cannot replay a penalty"),
    "explorer.auxiliary_models": (([],), "archon runs the trained model only"),
    "trainer.ulysses_sequence_parallel_size": ((1,), "write `archon: {actor: {layout: d1c2}}`"),
    "synchronizer.sync_style": (("fixed",), "archon is synchronous"),
    **{prefix + "storage_type": (("file",), "tasks are read from files") for prefix in (_TRAIN, _EVAL)},
    **{prefix + "format.prompt_type": (("plaintext", "messages"), "see the guide") for prefix in (_TRAIN, _EVAL)},
    _EVAL + "rollout_args.top_p": ((1,), "evaluation samples the whole distribution"),
    _EVAL + "rollout_args.top_k": ((-1, 0), "evaluation samples the whole distribution"),
}

# Keys of Ray, of inference servers, or of files that archon does not write.
NO_EFFECT = (
    *("ray_namespace", "ignore_validator_suggestions", "cluster.", "monitor.", "synchronizer.", "log.", "service."),
    *("algorithm.optimizer.fused", "algorithm.optimizer.foreach", "model.enable_prompt_truncation"),
    *("buffer.trainer_input.experience_buffer.", "buffer.max_retry_times", "buffer.max_retry_interval"),
    *(prefix + name for prefix in (_TRAIN, _EVAL) for name in ("name", "rollout_args.logprobs")),
    *("explorer.name", "explorer.runner_per_model", "explorer.runner_num", "explorer.concurrent_mode"),
    *("explorer.max_repeat_times_per_runner", "explorer.max_timeout", "explorer.max_retry_times"),
    *("explorer.max_inflight_batches", "explorer.eval_on_startup"),
    *(_MODEL + name for name in ("engine_type", "engine_num", "tensor_parallel_size", "enable_prefix_caching")),
    *(_MODEL + name for name in ("enforce_eager", "gpu_memory_utilization", "enable_history", "nnodes")),
    *("trainer.name", "trainer.trainer_type", "trainer.trainer_strategy", "trainer.use_dynamic_bsz"),
    *("trainer.save_strategy", "trainer.save_hf_checkpoint"),
)
_SECTIONS = tuple(key for key in NO_EFFECT if key.endswith("."))

_REWARDS = {"math_reward": "math_verify", "math_boxed_reward": "math_verify", "accuracy_reward": "math_verify"}
_VALUES: dict[str, Callable[[Any], Any]] = {
    _TRAIN + "rollout_args.top_k": lambda k: None if k in (-1, 0) else k,
    "algorithm.kl_loss_fn": lambda name: {"low_var_kl": "k3", "none": None}.get(name, name),
}


def scored_by_workflow(prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """Stands for the reward of a run whose workflow scores its own answers; it is never called."""
    raise RewardError("this run names no reward of archon's, as its workflow scores its own answers")


def translate(data: dict[str, Any], source: str = "config") -> dict[str, Any]:
    """Returns the values of an `RLConfig` from those of a Trinity-RFT file, which has `buffer` or `explorer`.

    Other data is returned unchanged. The file's section `archon` has archon's own keys, which override the rest. Raises
    `ConfigError` for a key that is neither mapped nor known to have no effect.
    """
    if not {"buffer", "explorer"} & data.keys():
        return data
    given = dict(_flatten({key: value for key, value in data.items() if key != "archon"}, "", source))
    known = [*SETTINGS, *_OTHERS, *ONLY, *NO_EFFECT]
    config: dict[str, Any] = {}
    unused = []
    for key, value in given.items():
        if key in ONLY:
            allowed, reason = ONLY[key]
            if value is not None and value not in allowed:
                raise ConfigError(f"{source}: {key} is {value!r}, expected {' or '.join(map(repr, allowed))}: {reason}")
        elif key in NO_EFFECT or key.startswith(_SECTIONS):
            unused.append(key)
        elif key not in SETTINGS and key not in _OTHERS:
            raise ConfigError(f"{source}: unknown key {key!r}{nearest(key, known)}")
        value = _VALUES.get(key, lambda value: value)(value)
        for target in SETTINGS.get(key, ()) if value is not None else ():
            _put(config, target, value)
    if unused:
        logger.warning("%s: no effect in archon: %s", source, ", ".join(unused))
    for key in ("model.model_path", _TRAIN + "path"):
        if given.get(key) is None:
            raise ConfigError(f"{source}: {key} is missing")
    _finish(config, given, source)
    own = data.get("archon") or {}
    if not isinstance(own, dict):
        raise ConfigError(f"{source}: archon is {own!r}, expected a mapping of archon's own keys")
    config = merge_sections(config, own)
    if "total_steps" not in config:
        config["total_steps"] = _steps(config, given.get("buffer.total_epochs") or 1)
    return config


def _flatten(node: Mapping[str, Any], prefix: str, source: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        name = prefix + _SPELLINGS.get(key, key)
        if name == _INPUT + "eval_tasksets":
            value = [] if value is None else value
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ConfigError(f"{source}: {name} is {value!r:.80}, expected a list of tasksets")
            if len(value) > 1:
                raise ConfigError(f"{source}: {name} lists {len(value)} sets, and archon evaluates on one; keep one")
            for taskset in value:
                yield from _flatten(taskset, _EVAL, source)
        elif isinstance(value, dict) and name not in _WHOLE:
            yield from _flatten(value, name + ".", source)
        else:
            yield name, value


def _finish(config: dict[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Sets the values that are more than a translated key."""
    names = [str(given[key]) for key in ("project", "group", "name") if given.get(key)]
    config["run_dir"] = str(Path(given.get("checkpoint_root_dir") or "checkpoints", *names))
    config.setdefault("resume", True)  # the guide's default
    config["ref"] = {}  # the actor as it begins
    if given.get("algorithm.kl_loss_fn") == "none":
        _put(config, "algorithm.kl.coef", 0.0)
    preset = config.get("algorithm", {}).get("preset", "grpo")
    if preset in PRESETS and PRESETS[preset]["advantage"]["kind"] == "gae":
        _put(config, "critic.path", given.get("model.critic_model_path") or config["actor"]["path"])
    _put(config, "train_data.raw", True)
    if "eval_data" in config:
        shared = ("prompt_key", "response_key", "raw", "max_length")
        config["eval_data"] |= {key: config["train_data"][key] for key in shared if key in config["train_data"]}
    _workflow(config, given, source)
    size = given.get("buffer.train_batch_size")
    whole = config.get("rollout", {}).get("prompts_per_step", 32) * config.get("gconfig", {}).get("n_samples", 8)
    if size and whole % size:
        raise ConfigError(
            f"{source}: buffer.train_batch_size {size} does not divide the {whole} answers of a step (batch_size * "
            "repeat_times), which are trained in equal minibatches"
        )
    if size and whole != size:
        _put(config, "algorithm.minibatches", whole // size)


def _workflow(config: dict[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Sets the workflow and its reward, which evaluation shares."""

    def named(end: str, taskset: str, then: str = "") -> Any:
        return given.get(taskset + end) or given.get(then) or given.get(_INPUT + end)

    name = named("default_workflow_type", _TRAIN)
    if name is None:
        raise ConfigError(f"{source}: {_TRAIN}default_workflow_type is missing; name a workflow, such as math_workflow")
    reward = named("default_reward_fn_type", _TRAIN)
    for end in ("format.prompt_key", "format.response_key", "format.system_prompt", "workflow_args", "reward_fn_args"):
        if given.get(_EVAL + end) not in (None, given.get(_TRAIN + end)):
            raise ConfigError(f"{source}: {_EVAL}{end} differs from the training set's; archon evaluates as it trains")
    eval_workflow = named("default_workflow_type", _EVAL, _INPUT + "default_eval_workflow_type")
    eval_reward = named("default_reward_fn_type", _EVAL)
    if "eval_data" in config and (eval_workflow not in (None, name) or eval_reward not in (None, reward)):
        raise ConfigError(f"{source}: the evaluation's workflow or reward differs; archon evaluates as it trains")
    workflow = WORKFLOWS[name]
    config["workflow"] = f"{TrinityWorkflow.__module__}.{TrinityWorkflow.__name__}"
    _put(config, "workflow_args.workflow", name)
    reward = reward or getattr(workflow, "default_reward", None)
    own = reward in REWARD_FUNCTIONS or (reward and isinstance(get_reward_fn(_REWARDS.get(reward, reward)), type))
    if own:
        _put(config, "workflow_args.reward", reward)
    if own or reward is None:
        config["reward"] = f"{__name__}.{scored_by_workflow.__name__}"
        _put(config, "rollout.gold_checked", 0)
    else:
        config["reward"] = _REWARDS.get(reward, reward)


def _steps(config: dict[str, Any], epochs: int) -> int:
    """Returns the number of full batches in `epochs` passes over the rows, at least one."""
    from archon.data.config import DatasetConfig
    from archon.data.registry import load_rows

    data = DatasetConfig.parse(config["train_data"] | {"max_length": None})
    batch = config.get("rollout", {}).get("prompts_per_step", 32)
    return max(1, epochs * len(load_rows(data, "rl", None)) // batch)


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value
