"""Keys of a Trinity-RFT configuration: mapped keys, keys with restricted values, and keys without effect."""

from __future__ import annotations

from typing import Any

from archon.rl.algorithms.off_policy import RING_HIGH, RING_LOW

INPUT = "buffer.explorer_input."
TRAIN, EVAL = INPUT + "taskset.", INPUT + "eval_taskset."
BUFFER, EXPERT = "buffer.trainer_input.experience_buffer.", "buffer.trainer_input.expert."
MODEL = "explorer.rollout_model."
SPELLINGS = {
    "task_set": "taskset",
    "default_workflow": "default_workflow_type",
    "default_reward_fn": "default_reward_fn_type",
    "sft_warmup_dataset": "expert",
}
NESTED_KEYS = tuple(taskset + name for taskset in (TRAIN, EVAL) for name in ("workflow_args", "reward_fn_args"))
NESTED_KEYS += (
    "trainer.trainer_config",
    "explorer.env_vars",
    "algorithm.rollout_correction",
    "data_processor.task_pipeline",
)

# Trinity-RFT's key to archon's keys.
SETTINGS: dict[str, tuple[str, ...]] = {
    "continue_from_checkpoint": ("resume",),
    "algorithm.algorithm_type": ("algorithm.preset",),
    "algorithm.repeat_times": ("gconfig.n_samples",),
    "algorithm.optimizer.lr": ("actor.optimizer.lr",),
    "algorithm.optimizer.weight_decay": ("actor.optimizer.weight_decay",),
    "algorithm.optimizer.lr_scheduler_type": ("actor.scheduler.kind",),
    "algorithm.optimizer.warmup_style": ("actor.scheduler.kind",),
    "algorithm.optimizer.lr_warmup_steps": ("actor.scheduler.warmup_steps",),
    "algorithm.optimizer.min_lr_ratio": ("actor.scheduler.min_lr_ratio",),
    "algorithm.optimizer.clip_grad": ("actor.optimizer.max_grad_norm",),
    "algorithm.advantage_fn": ("algorithm.advantage.kind",),
    "algorithm.advantage_fn_args.epsilon": ("algorithm.advantage.eps",),
    "algorithm.advantage_fn_args.gamma": ("algorithm.advantage.gamma",),
    "algorithm.advantage_fn_args.lam": ("algorithm.advantage.lam",),
    "algorithm.advantage_fn_args.tau": ("algorithm.advantage.tau",),
    "algorithm.advantage_fn_args.std_threshold": ("algorithm.zero_variance_groups",),
    "algorithm.advantage_fn_args.baseline_shift": ("algorithm.advantage.shift",),
    "algorithm.advantage_fn_args.omega": ("algorithm.advantage.step_weight",),
    "algorithm.advantage_fn_args.fnorm": ("algorithm.advantage.normalize",),
    "algorithm.loss_agg_mode": ("algorithm.aggregation",),
    "algorithm.policy_loss_fn_args.loss_agg_mode": ("algorithm.aggregation",),
    "algorithm.policy_loss_fn_args.use_token_level_loss_in_sft": ("algorithm.aggregation",),
    "algorithm.policy_loss_fn_args.sft_loss_agg_mode": ("algorithm.aggregation",),
    "algorithm.policy_loss_fn_args.clip_ratio_c": ("algorithm.policy_loss.dual_clip",),
    "algorithm.policy_loss_fn_args.epsilon": ("algorithm.policy_loss.epsilon",),
    "algorithm.policy_loss_fn_args.m2_threshold": ("algorithm.policy_loss.max_second_moment",),
    "algorithm.policy_loss_fn": ("algorithm.policy_loss.kind",),
    "algorithm.policy_loss_fn_args.mu": ("algorithm.policy_loss.mu",),
    "algorithm.policy_loss_fn_args.mu_peak": ("algorithm.policy_loss.mu_peak",),
    "algorithm.policy_loss_fn_args.mu_valley": ("algorithm.policy_loss.mu_valley",),
    "algorithm.policy_loss_fn_args.mu_warmup_steps": ("algorithm.policy_loss.mu_warmup_steps",),
    "algorithm.policy_loss_fn_args.mu_decay_steps": ("algorithm.policy_loss.mu_decay_steps",),
    "algorithm.policy_loss_fn_args.enable_phi_function": ("algorithm.policy_loss.phi",),
    "algorithm.policy_loss_fn_args.clip_range": (
        "algorithm.policy_loss.clip_low",
        "algorithm.policy_loss.clip_high",
    ),
    "algorithm.policy_loss_fn_args.clip_range_low": ("algorithm.policy_loss.clip_low",),
    "algorithm.policy_loss_fn_args.clip_range_high": ("algorithm.policy_loss.clip_high",),
    "algorithm.policy_loss_fn_args.epsilon_low": ("algorithm.policy_loss.clip_low",),
    "algorithm.policy_loss_fn_args.epsilon_high": ("algorithm.policy_loss.clip_high",),
    "algorithm.policy_loss_fn_args.clip_mode": ("algorithm.policy_loss.sides",),
    "algorithm.advantage_fn_args.std_normalize": ("algorithm.advantage.kind",),
    "algorithm.kl_loss_fn": ("algorithm.kl.kind",),
    "algorithm.kl_loss_fn_args.kl_coef": ("algorithm.kl.coef",),
    "algorithm.entropy_loss_fn_args.entropy_coef": ("algorithm.entropy_coef",),
    "model.model_path": ("actor.path",),
    "model.max_prompt_tokens": ("train_data.max_length",),
    "model.max_response_tokens": ("gconfig.max_new_tokens",),
    "model.max_model_len": ("generator.max_seq_len",),
    "model.temperature": ("gconfig.temperature",),
    "model.top_p": ("gconfig.top_p",),
    "model.top_k": ("gconfig.top_k",),
    "model.enable_thinking": ("workflow_args.enable_thinking",),
    "buffer.batch_size": ("rollout.prompts_per_step",),
    "buffer.total_steps": ("total_steps",),
    TRAIN + "path": ("train_data.path",),
    TRAIN + "subset_name": ("train_data.subset",),
    TRAIN + "split": ("train_data.split",),
    TRAIN + "format.prompt_key": ("train_data.prompt_key", "workflow_args.format_args.prompt_key"),
    TRAIN + "format.response_key": ("train_data.response_key", "workflow_args.format_args.response_key"),
    TRAIN + "format.system_prompt": ("workflow_args.format_args.system_prompt",),
    TRAIN + "repeat_times": ("gconfig.n_samples",),
    TRAIN + "rollout_args.n": ("gconfig.n_samples",),
    TRAIN + "rollout_args.temperature": ("gconfig.temperature",),
    TRAIN + "rollout_args.top_p": ("gconfig.top_p",),
    TRAIN + "rollout_args.top_k": ("gconfig.top_k",),
    TRAIN + "rollout_args.max_tokens": ("gconfig.max_new_tokens",),
    TRAIN + "workflow_args": ("workflow_args.workflow_args",),
    TRAIN + "reward_fn_args": ("workflow_args.reward_fn_args",),
    EVAL + "path": ("eval_data.path",),
    EVAL + "subset_name": ("eval_data.subset",),
    EVAL + "split": ("eval_data.split",),
    EVAL + "repeat_times": ("evaluation.n_samples",),
    EVAL + "rollout_args.n": ("evaluation.n_samples",),
    EVAL + "rollout_args.temperature": ("evaluation.temperature",),
    "explorer.eval_interval": ("evaluation.every",),
    MODEL + "dtype": ("actor.dtype",),
    MODEL + "seed": ("seed",),
    MODEL + "enable_openai_api": ("workflow_args.enable_openai_api",),
    MODEL + "enable_history": ("workflow_args.enable_history",),
    MODEL + "enable_thinking": ("workflow_args.enable_thinking",),
    MODEL + "max_response_tokens": ("gconfig.max_new_tokens",),
    MODEL + "max_model_len": ("generator.max_seq_len",),
    "explorer.env_vars": ("workflow_args.env_vars",),
    "explorer.auxiliary_models": ("workflow_args.auxiliary_models",),
    EXPERT + "path": ("demonstrations.data.path",),
    EXPERT + "split": ("demonstrations.data.split",),
    EXPERT + "subset_name": ("demonstrations.data.subset",),
    EXPERT + "format.system_prompt": ("demonstrations.data.system_prompt",),
    "trainer.total_steps": ("total_steps",),
    "trainer.save_interval": ("checkpoint.every",),
    "trainer.max_checkpoints_to_keep": ("checkpoint.keep",),
    "trainer.grad_clip": ("actor.optimizer.max_grad_norm",),
    "trainer.max_token_len_per_gpu": ("actor.max_tokens_per_mb",),
    "trainer.ppo_max_token_len_per_gpu": ("actor.max_tokens_per_mb",),
}
TASKSET_ENDS = ("default_workflow_type", "default_reward_fn_type")
# Keys that code in config.py reads.
SPECIAL_KEYS = {"project", "name", "group", "checkpoint_root_dir", "model.critic_model_path", "buffer.total_epochs"}
SPECIAL_KEYS |= {"buffer.train_batch_size", INPUT + "default_eval_workflow_type"}
SPECIAL_KEYS |= {prefix + end for prefix in (INPUT, TRAIN, EVAL) for end in TASKSET_ENDS}
SPECIAL_KEYS |= {EVAL + name for name in ("format.prompt_key", "format.response_key", "format.system_prompt")}
SPECIAL_KEYS |= {EVAL + name for name in ("workflow_args", "reward_fn_args")}
SPECIAL_KEYS |= {"model.lora_configs", TRAIN + "format.image_key", EVAL + "format.image_key"}
SPECIAL_KEYS |= {"algorithm.optimizer.betas", "algorithm.add_strategy", "mode", EVAL + "rollout_args.max_tokens"}
SPECIAL_KEYS |= {"algorithm.optimizer.lr_warmup_steps_ratio"}
SPECIAL_KEYS |= {"explorer.bench_on_latest_checkpoint", "trainer.trainer_config_path", "trainer.trainer_config"}
SPECIAL_KEYS |= {
    "algorithm.sample_strategy_args.expert_data_ratio",
    "synchronizer.sync_style",
    "synchronizer.sync_interval",
}
SPECIAL_KEYS |= {"synchronizer.sync_offset", BUFFER + "path", BUFFER + "max_read_timeout", BUFFER + "storage_type"}
SPECIAL_KEYS |= {EXPERT + "format." + key for key in ("prompt_type", "prompt_key", "response_key", "messages_key")}

_OF_ONE_STUDY = (
    "archon has no such workflow; change the imports of its class to archon.rl, and name the class by its dotted path"
)
# Workflows of Trinity-RFT without a workflow of the same name here.
OTHER_WORKFLOWS = {
    **dict.fromkeys(
        ("frozen_lake_workflow", "sciworld_workflow", "sudoku_workflow"),
        "write gym_env_workflow, and name the environment in workflow_args.env",
    ),
    **dict.fromkeys(
        ("alfworld_workflow_v2", "step_wise_alfworld_workflow"),
        "write alfworld_workflow, and name the environment in workflow_args.env",
    ),
    **dict.fromkeys(("tool_call_workflow", "toolcall_workflow"), "write archon.rl.ReActWorkflow with your tools"),
    **dict.fromkeys(
        ("on_policy_distill_workflow", "on_policy_distill_math_workflow"),
        "write math_workflow, and `archon: {algorithm: {preset: distill}, teacher: {path: …}}`",
    ),
    **dict.fromkeys(
        (
            *("math_trainable_ruler_workflow", "rubric_judge_workflow", "math_rm_workflow", "async_math_rm_workflow"),
            *("email_search_workflow", "intercode_sql_workflow", "agentscope_v1_react_search_workflow"),
            *("medicine_ruler_workflow", "learn2ask_workflow", "bots_math_boxed_workflow", "bcp_simple_react_workflow"),
        ),
        _OF_ONE_STUDY,
    ),
}

SELECTORS = ("sequential", "random", "shuffle")
FORMATS = {
    "video_key": "this workflow reads text only",
    "reply_prefix": "an answer begins after the chat template",
    "system_prompt_key": "write a workflow that reads the row's system prompt",
    "workflow_key": "all tasks share one workflow",
    "reward_fn_key": "all tasks share one reward",
}

_IN_ORDER = "experiences are trained in order and once, and synchronizer.sync_interval bounds their age"
_WHOLE = "evaluations in a run sample the whole distribution; `archon eval` has top_p"
# Supported values, and the advice for other values.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "algorithm.kl_penalty_fn": (("none",), "write `archon: {algorithm: {kl: {place: reward}}}`"),
    "algorithm.sample_strategy": (
        ("default", "warmup", "mix"),
        "archon trains on complete batches, and synchronizer.sync_interval bounds their age",
    ),
    "algorithm.entropy_loss_fn": (("default", "mix", "none"), "set algorithm.entropy_loss_fn_args.entropy_coef"),
    "algorithm.bypass_old_logprobs": (
        (True,),
        "write `archon: {algorithm: {correction: tis, policy_loss: decoupled}}`",
    ),
    "algorithm.rollout_correction": (({},), "write `archon: {algorithm: {correction: tis}}`"),
    "algorithm.enable_router_replay": ((False,), "the trainer computes its routing itself"),
    "algorithm.policy_loss_fn_args.weight": (("none",), "archon's REC has no importance weights; write a policy loss"),
    "algorithm.policy_loss_fn_args.regularizer": (("none",), "set algorithm.kl_loss_fn, or write a policy loss"),
    "algorithm.policy_loss_fn_args.epsilon_low_prime": ((RING_LOW,), "the outer bounds of REC-Ring are fixed"),
    "algorithm.policy_loss_fn_args.epsilon_high_prime": ((RING_HIGH,), "the outer bounds of REC-Ring are fixed"),
    "algorithm.optimizer.optimizer_type": (("adam", "adamw"), "archon has AdamW"),
    "algorithm.policy_loss_fn_args.tau": (
        (0,),
        "archon does not divide the loss by 1 + tau; AdamW undoes such a factor",
    ),
    "algorithm.policy_loss_fn_args.log_ratio_clip": ((20,), "the log ratio is not clipped"),
    "model.rope_scaling": ((), "set it in the checkpoint's config.json"),
    "model.rope_theta": ((), "set it in the checkpoint's config.json"),
    "model.custom_chat_template": (("",), "put the template into the tokenizer's folder"),
    "model.chat_template_path": (("",), "put the template into the tokenizer's folder"),
    "model.tinker.enable": ((False,), "archon trains in this process"),
    "model.external_model.enable": ((False,), "archon samples from the trained model"),
    "model.trust_remote_code": ((False,), "archon never runs code of a checkpoint"),
    MODEL + "ignore_eos": ((False,), "write `archon: {gconfig: {ignore_eos: true}}`"),
    MODEL + "chat_template": (("",), "put the template into the tokenizer's folder"),
    "explorer.over_rollout.ratio": ((0,), "a step waits for all of its tasks"),
    "explorer.dynamic_timeout.enable": ((False,), "tasks have no time limit"),
    "trainer.sft_warmup_steps": ((0,), "warm up with `archon sft`, or with `archon: {bootstrap: …}`"),
    "trainer.critic_warmup": ((0,), "policy and critic train from the first step"),
    "trainer.fix_actor_microbatch_loss_scale": ((False,), "losses do not depend on micro-batches"),
    "data_processor.experience_pipeline.operators": (
        ([],),
        (
            "process experiences in the workflow; for DAPO's, write `archon: {algorithm: {overlong: {mask_truncated: "
            "true}, zero_variance_groups: resample}}`"
        ),
    ),
    "data_processor.task_pipeline": ((), "process tasks before the run"),
    "stages": (([],), "run each stage from a separate file"),
    BUFFER + "replay_buffer.enable": ((False,), _IN_ORDER),
    BUFFER + "use_priority_queue": ((False,), _IN_ORDER),
    BUFFER + "reuse_cooldown_time": ((), "write `archon: {experiences: {passes: 2}}`"),
    EXPERT + "format.image_key": (("",), "demonstrations are text"),
    EXPERT + "storage_type": (("file",), "demonstrations are read from files"),
    "model.min_response_tokens": ((0, 1), "the trainer cannot replay a lower limit"),
    "model.repetition_penalty": ((1,), "the trainer cannot replay a penalty"),
    **{prefix + "storage_type": (("file",), "tasks are read from files") for prefix in (TRAIN, EVAL)},
    **{prefix + "data_selector.selector_type": (SELECTORS, "tasks are drawn at random") for prefix in (TRAIN, EVAL)},
    **{prefix + "task_selector.selector_type": (SELECTORS, "tasks are drawn at random") for prefix in (TRAIN, EVAL)},
    **{prefix + "format." + key: (("",), reason) for prefix in (TRAIN, EVAL) for key, reason in FORMATS.items()},
    **{prefix + "format.prompt_type": (("plaintext", "messages"), "see the guide") for prefix in (TRAIN, EVAL)},
    EVAL + "rollout_args.top_p": ((1,), _WHOLE),
    EVAL + "rollout_args.top_k": ((-1, 0), _WHOLE),
}

# Micro-batch sizes in the weights of Trinity-RFT's mixed losses; archon weights the whole batch.
NORMALIZERS = (
    *("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer", "repeat_times"),
    *("train_batch_size_usual", "train_batch_size_expert", "read_batch_size_usual", "read_batch_size_expert"),
    "gradient_accumulation",
)

# Keys of Ray, inference servers, and files that archon does not write.
NO_EFFECT = (
    *("ray_namespace", "ignore_validator_suggestions", "cluster.", "monitor.", "log.", "service.", "cod."),
    *("synchronizer." + name for name in ("sync_method", "sync_timeout", "explorer_sync_interval", "group_name")),
    *("synchronizer." + name for name in ("trainer_sync_interval", "wait_for_checkpoint")),
    *("checkpoint_job_dir", "model.logprobs", "model.fully_sharded_loras", "model.max_cpu_loras", "model.tinker."),
    *("model.external_model.", "model.enable_prompt_truncation", "buffer.explore_batch_size", "trainer.megatron."),
    *("algorithm.policy_loss_fn_args." + name for name in NORMALIZERS),
    *("algorithm.policy_loss_fn_args." + name for name in ("temp", "regularizer_coef")),  # of refused variants
    *("explorer.over_rollout.", "explorer.dynamic_timeout.", "data_processor."),
    *(prefix + name for prefix in (TRAIN, EVAL) for name in ("enable_progress_bar", "index", "data_selector.")),
    *(prefix + "format." + key for prefix in (TRAIN, EVAL) for key in ("messages_key", "tools_key", "chosen_key")),
    *(EXPERT + name for name in ("name", "algorithm_type", "schema_type", "enable_progress_bar", "total_epochs")),
    *(MODEL + name for name in ("use_v1", "enable_chunked_prefill", "data_parallel_size", "pipeline_parallel_size")),
    *(MODEL + name for name in ("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "base_port")),
    *(MODEL + name for name in ("max_prompt_tokens", "extra_engine_args.", "enable_expert_parallel", "api_key")),
    *(MODEL + name for name in ("enable_log_requests", "weight_sync_buffer_size", "name")),
    *("explorer.runner_prepare_concurrency", "explorer.runner_prepare_max_retries", "explorer.proxy_port"),
    *("explorer.listen_address", "explorer.runner_state_report_interval", "explorer.db_url"),
    *("trainer." + name for name in ("enable_preview", "use_remove_padding", "balance_batch", "param_offload")),
    *("trainer." + name for name in ("optimizer_offload", "grad_offload", "offload_policy")),
    "trainer.ulysses_sequence_parallel_size",
    *("algorithm.optimizer.fused", "algorithm.optimizer.foreach"),
    *(BUFFER, "buffer.max_retry_times", "buffer.max_retry_interval"),
    *(prefix + name for prefix in (TRAIN, EVAL) for name in ("name", "rollout_args.logprobs")),
    *("explorer.name", "explorer.runner_per_model", "explorer.runner_num", "explorer.concurrent_mode"),
    *("explorer.max_repeat_times_per_runner", "explorer.max_timeout", "explorer.max_retry_times"),
    *("explorer.max_inflight_batches", "explorer.eval_on_startup"),
    *(MODEL + name for name in ("engine_type", "engine_num", "tensor_parallel_size", "enable_prefix_caching")),
    *(MODEL + name for name in ("enforce_eager", "gpu_memory_utilization", "nnodes")),
    *("trainer.name", "trainer.trainer_type", "trainer.trainer_strategy", "trainer.use_dynamic_bsz"),
    *("trainer.save_strategy", "trainer.save_hf_checkpoint"),
)
SECTIONS = tuple(key for key in NO_EFFECT if key.endswith("."))
