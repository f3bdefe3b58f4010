"""Translation of Trinity-RFT configurations: every key is mapped, has no effect in archon, or is an error."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from archon.rl.algorithms.presets import PRESETS
from archon.rl.compat.trinity.adapter import TrinityWorkflow
from archon.rl.compat.trinity.config_keys import (
    BUFFER,
    EVAL,
    EXPERT,
    INPUT,
    NESTED_KEYS,
    NO_EFFECT,
    ONLY,
    OTHER_WORKFLOWS,
    SECTIONS,
    SETTINGS,
    SPECIAL_KEYS,
    SPELLINGS,
    TRAIN,
)
from archon.rl.compat.trinity.plugins import import_plugins
from archon.rl.compat.trinity.workflow import REWARD_FUNCTIONS, WORKFLOWS
from archon.rl.rewards import get_reward_fn
from archon.schema.config import expand_path, merge_sections, nearest
from archon.schema.errors import ConfigError
from archon.schema.yaml_files import read_yaml

logger = logging.getLogger(__name__)

_REWARDS = {"math_reward": "math_verify", "math_boxed_reward": "math_verify", "accuracy_reward": "math_verify"}
_REWARDS |= {"countdown_reward": "countdown"}
_IMAGE_WORKFLOWS = ("simple_mm_workflow", "async_simple_mm_workflow")
_IMAGE_COLUMNS = ("images", "image")
_REC_SIDES = {"one-side": "one", "two-side": "two", "ring": "ring"}
_PRESETS = {"mix_chord": "chord", "multi_step_grpo": "step_wise_grpo", "reinforce_plus_plus": "reinforce_pp"}
_PRESETS |= {"reinforceplusplus": "reinforce_pp"}
_COMMANDS = {"sft": "archon sft", "dpo": "archon preference"}
_AGGREGATIONS = {"seq-mean-token-sum-norm": "dr_grpo", True: "token_mean", False: "seq_mean_token_mean"}


def _aggregation(name: Any) -> Any:
    return _AGGREGATIONS.get(name, name.replace("-", "_") if isinstance(name, str) else name)


def _top_k(k: Any) -> Any:
    return None if k in (-1, 0) else k


_VALUES: dict[str, Callable[[Any], Any]] = {
    TRAIN + "rollout_args.top_k": _top_k,
    "model.top_k": _top_k,
    "algorithm.algorithm_type": lambda name: _PRESETS.get(name, name),
    "algorithm.advantage_fn": lambda name: {"ppo": "gae"}.get(name) or _PRESETS.get(name, name),
    "algorithm.advantage_fn_args.std_normalize": lambda normalize: "grpo" if normalize else "dr_grpo",
    "algorithm.policy_loss_fn_args.clip_mode": lambda mode: _REC_SIDES.get(mode, mode),
    EVAL + "rollout_args.temperature": lambda temperature: temperature or None,  # greedy answers are evaluated too
    "algorithm.advantage_fn_args.fnorm": lambda norm: norm == "std",
    "algorithm.advantage_fn_args.std_threshold": lambda threshold: "drop" if threshold else None,
    "algorithm.kl_loss_fn": lambda name: {"low_var_kl": "k3", "none": None}.get(name, name),
    "algorithm.loss_agg_mode": _aggregation,
    "algorithm.optimizer.lr_warmup_steps": lambda steps: max(steps, 0),
    "algorithm.policy_loss_fn": lambda name: {"mix_chord": "chord"}.get(name, name),
    "algorithm.policy_loss_fn_args.loss_agg_mode": _aggregation,
    "algorithm.policy_loss_fn_args.use_token_level_loss_in_sft": _aggregation,
    "algorithm.policy_loss_fn_args.sft_loss_agg_mode": _aggregation,
    "explorer.auxiliary_models": lambda models: [auxiliary_model(model) for model in models],
}

# Keys of a veRL configuration that older Trinity-RFT files refer to; its other keys repeat Trinity-RFT's.
_VERL = {
    "actor_rollout_ref.actor.optim.lr": "actor.optimizer.lr",
    "actor_rollout_ref.actor.optim.warmup_style": "actor.scheduler.kind",
    "actor_rollout_ref.actor.grad_clip": "actor.optimizer.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.ppo_epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor.max_tokens_per_mb",
}
_ENGINE_OF_AUXILIARY = (
    *("engine_type", "engine_num", "tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "use_v1"),
    *("gpu_memory_utilization", "enable_openai_api", "enable_history", "max_prompt_tokens", "enable_chunked_prefill"),
    *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),
)


def translate(data: dict[str, Any], source: str = "config") -> dict[str, Any]:
    """Translate a Trinity-RFT file (it has `buffer` or `explorer`) into values of an `RLConfig`.

    Other data is returned unchanged. The section `archon` of the file holds archon's keys; they override the others.

    Raises:
        ConfigError: unknown key or unsupported value.
    """
    if not {"buffer", "explorer"} & data.keys():
        return data
    _require_rollouts(data, source)
    import_plugins()
    settings = dict(_flatten({key: value for key, value in data.items() if key != "archon"}, "", source))
    known = [*SETTINGS, *SPECIAL_KEYS, *ONLY, *NO_EFFECT]
    config: dict[str, Any] = {}
    _read_verl(config, settings, source)
    unused, mode = [], _mode(settings, source)
    for key, value in settings.items():
        if key in ONLY:
            allowed, reason = ONLY[key]
            if value is not None and value not in allowed:
                expected = " or ".join(map(repr, allowed)) or "null"
                raise ConfigError(f"{source}: {key} is {value!r}, expected {expected}: {reason}")
        elif key in SPECIAL_KEYS and (mode != "both" or not key.startswith(BUFFER)):
            pass
        elif key in NO_EFFECT or key.startswith(SECTIONS):
            unused.append(key)
        elif key not in SETTINGS and key not in SPECIAL_KEYS:
            raise ConfigError(f"{source}: unknown key {key!r}{nearest(key, known)}")
        value = _archon_value(key, value, source)
        for target in SETTINGS.get(key, ()) if value is not None else ():
            _put(config, target, value)
    if unused:
        logger.warning("%s: no effect in archon: %s", source, ", ".join(unused))
    for key in ("model.model_path", TRAIN + "path"):
        if settings.get(key) is None:
            raise ConfigError(f"{source}: {key} is missing")
    _finish(config, settings, source)
    overrides = data.get("archon") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{source}: archon is {overrides!r}, expected a mapping of archon's keys")
    config = merge_sections(config, overrides)
    if "total_steps" not in config:
        config["total_steps"] = _steps(config, settings.get("buffer.total_epochs") or 1)
    ratio, steps = (settings.get(f"algorithm.optimizer.lr_warmup_steps{end}") for end in ("_ratio", ""))
    if ratio and (steps is None or steps < 0):
        _put_warmup(config, ratio, source)
        config = merge_sections(config, overrides)  # archon's keys override this one too
    return config


def _archon_value(key: str, value: Any, source: str) -> Any:
    try:
        return _VALUES.get(key, lambda value: value)(value)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source}: {key} is {value!r:.80}, a value of another type: {error}") from None


def _put_warmup(config: dict[str, Any], ratio: Any, source: str) -> None:
    """Set the steps of the warm-up, a share of all steps."""
    total = config["total_steps"]
    if not isinstance(ratio, int | float) or not isinstance(total, int):
        raise ConfigError(
            f"{source}: algorithm.optimizer.lr_warmup_steps_ratio is {ratio!r:.80} of {total!r:.80} steps; expected "
            "numbers"
        )
    _put(config, "actor.scheduler.warmup_steps", int(ratio * total))


def _require_rollouts(data: dict[str, Any], source: str) -> None:
    """Raise ConfigError for the layout of Trinity-RFT's first releases, and for algorithms without rollouts."""
    if isinstance(data.get("data"), dict):
        raise ConfigError(
            f"{source}: the section data belongs to the first releases of Trinity-RFT; write its keys as newer "
            f"examples do, such as {TRAIN}path"
        )
    algorithm = data.get("algorithm")
    kind = algorithm.get("algorithm_type") if isinstance(algorithm, dict) else None
    if isinstance(kind, str) and kind in _COMMANDS:
        raise ConfigError(
            f"{source}: algorithm.algorithm_type is {kind!r}, which has no rollouts: run `{_COMMANDS[kind]}` with an "
            "archon configuration"
        )


def _flatten(node: Mapping[str, Any], prefix: str, source: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        name = prefix + SPELLINGS.get(key, key)
        if name == INPUT + "eval_tasksets":
            value = [] if value is None else value
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ConfigError(f"{source}: {name} is {value!r:.80}, expected a list of tasksets")
            if len(value) > 1:
                raise ConfigError(f"{source}: {name} lists {len(value)} sets, but archon evaluates on one; keep one")
            for taskset in value:
                yield from _flatten(taskset, EVAL, source)
        elif name == "buffer.trainer_input.auxiliary_buffers":
            if len(value or {}) > 1:
                raise ConfigError(f"{source}: {name} has {', '.join(value)}; archon mixes in one; keep one")
            for buffer in (value or {}).values():
                yield from _flatten(buffer, EXPERT, source)
        elif isinstance(value, dict) and name not in NESTED_KEYS:
            yield from _flatten(value, name + ".", source)
        else:
            yield name, value


def _finish(config: dict[str, Any], settings: Mapping[str, Any], source: str) -> None:
    """Set values that depend on several keys."""
    names = [str(settings[key]) for key in ("project", "group", "name") if settings.get(key)]
    config["run_dir"] = str(Path(settings.get("checkpoint_root_dir") or "checkpoints", *names))
    config.setdefault("resume", True)  # the guide's default
    config["ref"] = {}  # the initial actor
    if settings.get("algorithm.kl_loss_fn") == "none":
        _put(config, "algorithm.kl.coef", 0.0)
    if settings.get("algorithm.add_strategy") == "step_wise_grpo":
        _put(config, "algorithm.preset", "step_wise_grpo")
    if settings.get("algorithm.entropy_loss_fn") == "none":
        _put(config, "algorithm.entropy_coef", 0.0)
    for name, value in zip(("beta1", "beta2"), settings.get("algorithm.optimizer.betas") or (), strict=False):
        _put(config, f"actor.optimizer.{name}", value)
    preset = config.setdefault("algorithm", {}).setdefault("preset", "grpo")
    if preset in PRESETS and PRESETS[preset]["advantage"]["kind"] == "gae":
        _put(config, "critic.path", settings.get("model.critic_model_path") or config["actor"]["path"])
    if preset == "opmd":  # OPMD's advantage and loss, with the other parts of GRPO
        config["algorithm"]["preset"] = preset = "grpo"
        config["algorithm"].setdefault("advantage", {}).setdefault("kind", "opmd")
        config["algorithm"]["policy_loss"] = {"kind": "reinforce"}
    if preset == "rec" and config["algorithm"].get("policy_loss", {}).get("sides", "none") == "none":
        config["algorithm"]["policy_loss"] = {"kind": "reinforce"}  # no token is masked, Trinity-RFT's default
    _lora(config, settings.get("model.lora_configs") or [], source)
    _put(config, "train_data.raw", True)
    tokens = settings.get(EVAL + "rollout_args.max_tokens")
    answer_tokens = config.get("gconfig", {}).get("max_new_tokens")
    if tokens not in (None, answer_tokens):
        raise ConfigError(
            f"{source}: {EVAL}rollout_args.max_tokens is {tokens}, and {answer_tokens or 'unset'} in training; archon "
            "evaluates with the training limit; set both to one value"
        )
    if "eval_data" in config:
        shared = ("prompt_key", "response_key", "raw", "max_length")
        config["eval_data"] |= {key: config["train_data"][key] for key in shared if key in config["train_data"]}
    _workflow(config, settings, source)
    _processes(config, settings, source)
    if preset in PRESETS and PRESETS[preset]["policy_loss"]["kind"] in ("mix", "chord"):
        _mix(config, settings, source)
        return
    if settings.get(EXPERT + "path") is not None:
        raise ConfigError(f"{source}: {EXPERT}path is set, but {preset} does not train on demonstrations")
    size = settings.get("buffer.train_batch_size")
    whole = config.get("rollout", {}).get("prompts_per_step", 32) * config.get("gconfig", {}).get("n_samples", 8)
    if size and whole % size:
        raise ConfigError(
            f"{source}: buffer.train_batch_size {size} does not divide the {whole} answers of a step (batch_size * "
            "repeat_times); minibatches must have equal size"
        )
    if size and whole != size:
        _put(config, "algorithm.minibatches", whole // size)


def _lora(config: dict[str, Any], loras: Any, source: str) -> None:
    """Train a LoRA if the file configures one."""
    if not isinstance(loras, list) or len(loras) > 1 or not all(isinstance(lora, dict) for lora in loras):
        raise ConfigError(f"{source}: model.lora_configs is {loras!r:.80}, expected a list of one LoRA or none")
    names = {"lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets", "path": "path"}
    ignored = {"name", "lora_dtype", "base_model_name"}
    for lora in loras:
        config["actor"]["lora"] = {"rank": 32, "alpha": 32}  # Trinity-RFT's defaults
        for key, value in lora.items():
            if key in names and value is not None:
                config["actor"]["lora"][names[key]] = value
            elif value and key not in ignored | names.keys():
                known = ", ".join(sorted({*names, *ignored}))
                raise ConfigError(f"{source}: model.lora_configs has {key!r}; archon reads {known}")


def _mode(settings: Mapping[str, Any], source: str) -> str:
    mode = settings.get("mode") or "both"
    modes = ("both", "colocate", "explore", "train", "bench")
    if mode not in modes:
        raise ConfigError(f"{source}: mode is {mode!r}, expected {' or '.join(map(repr, modes))}")
    return "both" if mode == "colocate" else str(mode)


def _processes(config: dict[str, Any], settings: Mapping[str, Any], source: str) -> None:
    """Couple exploration and training: in one process, or by an experience buffer and checkpoints."""
    mode, every = _mode(settings, source), settings.get("synchronizer.sync_interval") or 1
    style = settings.get("synchronizer.sync_style") or "fixed"
    if style not in ("fixed", "dynamic_by_explorer", "dynamic_by_trainer", "explorer_driven", "trainer_driven"):
        raise ConfigError(f"{source}: synchronizer.sync_style is {style!r}, expected 'fixed' or 'dynamic_by_explorer'")
    if mode == "both":
        if style != "fixed":
            _put(config, "rollout.max_staleness", every + (settings.get("synchronizer.sync_offset") or 0))
        return
    job = Path(config["run_dir"])
    path = str(settings.get(BUFFER + "path") or job / "experiences.db").removeprefix("sqlite:///")
    if "://" in path or path.endswith((".json", ".jsonl")):
        raise ConfigError(f"{source}: {BUFFER}path is {path!r}, expected sqlite:///FILE: the buffer is an SQLite file")
    config["mode"], config["experiences"] = mode, {"path": path, "weights_from": str(job)}
    _put(config, "rollout.n_gold_checks", 0)
    if mode == "train" and settings.get("synchronizer.sync_interval"):
        # The explorer gets weights by checkpoints.
        _put(config, "checkpoint.every", min(every, config.get("checkpoint", {}).get("every") or every))
    if mode != "train":
        config["run_dir"] = str(job / {"explore": "explorer", "bench": "bench"}[mode])
        config["experiences"]["sync_every"] = every
    if settings.get("explorer.bench_on_latest_checkpoint"):
        config["experiences"]["latest_only"] = True
    if (seconds := settings.get(BUFFER + "max_read_timeout")) is not None:
        config["experiences"]["wait_seconds"] = float(seconds)


def _mix(config: dict[str, Any], settings: Mapping[str, Any], source: str) -> None:
    """Set the fraction of demonstrations in a batch like Trinity-RFT's sample strategy `mix`."""
    if settings.get(EXPERT + "path") is None:
        raise ConfigError(
            f"{source}: the demonstrations are missing; name them in buffer.trainer_input.auxiliary_buffers"
        )
    prompts, n = config.get("rollout", {}).get("prompts_per_step", 32), config.get("gconfig", {}).get("n_samples", 8)
    whole = settings.get("buffer.train_batch_size") or prompts * n
    ratio = settings.get("algorithm.sample_strategy_args.expert_data_ratio", 0.5)
    experts = math.ceil(ratio * whole)
    if not 0 < ratio < 1 or (whole - experts) % n or whole == experts:
        raise ConfigError(
            f"{source}: expert_data_ratio {ratio} of a batch of {whole} leaves {whole - experts} answers for tasks of "
            f"{n} each (repeat_times), expected whole tasks"
        )
    _put(config, "rollout.prompts_per_step", (whole - experts) // n)
    _put(config, "demonstrations.per_step", experts)
    form = EXPERT + "format."
    if settings.get(form + "prompt_type") == "messages" or settings.get(form + "messages_key") is not None:
        _put(config, "demonstrations.data.prompt_key", settings.get(form + "messages_key") or "messages")
        _put(config, "demonstrations.data.response_key", None)
        return
    for key in ("prompt_key", "response_key"):
        if settings.get(form + key) is not None:
            _put(config, f"demonstrations.data.{key}", settings[form + key])


def _read_verl(config: dict[str, Any], settings: Mapping[str, Any], source: str) -> None:
    """Read the veRL configuration, inline or in a file."""
    inline, path = settings.get("trainer.trainer_config"), expand_path(settings.get("trainer.trainer_config_path"))
    values: Any = inline or {}
    if path:
        if not Path(path).exists():
            logger.warning("%s: trainer.trainer_config_path %s does not exist; skipping it", source, path)
        else:
            values = yaml.safe_load(read_yaml(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: trainer.trainer_config is {values!r:.80}, expected a mapping")
    flat = dict(_flatten(values, "", source))
    read = {key: value for key, value in flat.items() if key in _VERL and value is not None}
    for key, value in read.items():
        # YAML 1.1 reads 1e-5 as text.
        _put(config, _VERL[key], float(value) if key.endswith(".lr") else value)
    if flat:
        logger.warning(
            "%s: of the veRL configuration, archon reads only %s", source, ", ".join(read) or "none of the keys here"
        )


def auxiliary_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `AuxiliaryConfig` for an entry of `explorer.auxiliary_models`."""
    return {name: value for name, value in model.items() if name not in _ENGINE_OF_AUXILIARY and value is not None}


def _workflow(config: dict[str, Any], settings: Mapping[str, Any], source: str) -> None:
    """Set the workflow and its reward; evaluation shares both."""

    def named(end: str, taskset: str, then: str = "") -> Any:
        return settings.get(taskset + end) or settings.get(then) or settings.get(INPUT + end)

    name = named("default_workflow_type", TRAIN)
    if name is None:
        raise ConfigError(f"{source}: {TRAIN}default_workflow_type is missing; name a workflow, such as math_workflow")
    reward = named("default_reward_fn_type", TRAIN)
    for end in ("format.prompt_key", "format.response_key", "format.system_prompt", "workflow_args", "reward_fn_args"):
        if settings.get(EVAL + end) not in (None, settings.get(TRAIN + end)):
            raise ConfigError(f"{source}: {EVAL}{end} differs from training; archon evaluates with its settings")
    eval_workflow = named("default_workflow_type", EVAL, INPUT + "default_eval_workflow_type")
    eval_reward = named("default_reward_fn_type", EVAL)
    if "eval_data" in config and (eval_workflow not in (None, name) or eval_reward not in (None, reward)):
        raise ConfigError(f"{source}: the evaluation workflow or reward differs; archon evaluates with the training's")
    image_keys = {settings.get(taskset + "format.image_key") or None for taskset in (TRAIN, EVAL)} - {None}
    if image_keys and (name not in _IMAGE_WORKFLOWS or not image_keys <= {*_IMAGE_COLUMNS}):
        raise ConfigError(
            f"{source}: {TRAIN}format.image_key is {', '.join(sorted(map(str, image_keys)))!r} of {name}; images are "
            f"in the column {' or '.join(_IMAGE_COLUMNS)}, and {_IMAGE_WORKFLOWS[0]} reads them"
        )
    if name in _IMAGE_WORKFLOWS:  # the images of a row need archon's own workflow
        config |= {"workflow": "archon.rl.VisionRLVRWorkflow", "reward": _REWARDS.get(reward, reward or "math_verify")}
        system_prompt = settings.get(TRAIN + "format.system_prompt")
        config["train_data"] |= {"raw": False, "system_prompt": system_prompt}
        if "eval_data" in config:
            config["eval_data"] |= {"raw": False, "system_prompt": system_prompt}
        if rejected := sorted(config.pop("workflow_args", {}).keys() - {"format_args", "env_vars"}):
            raise ConfigError(f"{source}: {name} takes no {', '.join(rejected)}; leave it out")
        return
    if name not in WORKFLOWS and name in OTHER_WORKFLOWS:
        raise ConfigError(f"{source}: {TRAIN}default_workflow_type is {name!r}: {OTHER_WORKFLOWS[name]}")
    workflow = WORKFLOWS[name]
    config["workflow"] = f"{TrinityWorkflow.__module__}.{TrinityWorkflow.__name__}"
    _put(config, "workflow_args.workflow", name)
    reward = reward or getattr(workflow, "default_reward", None)
    is_class = reward in REWARD_FUNCTIONS or (reward and isinstance(get_reward_fn(_REWARDS.get(reward, reward)), type))
    if is_class:
        _put(config, "workflow_args.reward", reward)
    if not is_class and reward is not None:
        config["reward"] = _REWARDS.get(reward, reward)
        if config["reward"] == "countdown":  # the gold data is a task, not an answer
            _put(config, "rollout.n_gold_checks", 0)


def _steps(config: dict[str, Any], epochs: int) -> int:
    """Return the number of full batches in `epochs` passes over the rows, at least one."""
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
