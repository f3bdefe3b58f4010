"""Table of AReaL's public names for exports, error messages, rl/compat/README.md and its test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Name(NamedTuple):
    """Public name of AReaL.

    Attributes:
        path: AReaL's module and name.
        home: module of archon with the same name, if available.
        instead: replacement, if archon spells it differently.
        note: difference, or the reason of its absence.
    """

    path: str
    home: str = ""
    instead: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """Name without its module."""
        return self.path.rpartition(".")[2]

    @property
    def status(self) -> str:
        """`works`, `other spelling` or `not here`."""
        return "works" if self.home else "other spelling" if self.instead else "not here"


_HERE = "archon.rl.compat.areal"
_ARCHON = "areal.experimental.models.archon"


def available(module: str, names: str, home: str, note: str = "") -> Iterator[Name]:
    """Yield names of a module that archon has in `home`."""
    for name in names.split():
        yield Name(f"{module}.{name}", home=home, note=note)


def renamed(module: str, names: str, instead: str, note: str = "") -> Iterator[Name]:
    """Yield names of a module that archon spells differently."""
    for name in names.split():
        yield Name(f"{module}.{name}", instead=instead, note=note)


def missing(module: str, names: str, note: str) -> Iterator[Name]:
    """Yield names of a module that archon lacks, with the reason."""
    for name in names.split():
        yield Name(f"{module}.{name}", note=note)


_IMAGES = "with images for a vision-language model (`processor`: an `ImageReader`); otherwise text only, with a warning"
_CONFIG_NOTE = "with archon's keys; docs/moving/areal.md lists them next to AReaL's"
_ONE_RUN = "a run is one program under torchrun; `rollout.launch` starts servers"
_SERVERS = "or `rollout.servers`; scripts use archon.rl.InProcessEngine"
_RANKS = "the engine does this for every layout"
_LORA = "a LoRA has no separate version; the engine counts weight versions"

NAMES: tuple[Name, ...] = (
    # -- areal, areal.trainer
    *available("areal", "PPOTrainer", f"{_HERE}.trainers", "takes an `RLConfig`, and rows as in AReaL"),
    *available("areal", "SFTTrainer", f"{_HERE}.trainers", "takes an `SFTConfig`; rows of `input_ids` and `loss_mask`"),
    *available("areal", "workflow_context", "archon.rl.episode_context"),
    *renamed("areal", "RWTrainer DPOTrainer", "archon.rl.PreferenceTrainer(config).train()", "`loss: reward` or `dpo`"),
    *missing("areal", "RolloutController TrainController WorkflowExecutor current_platform", _ONE_RUN),
    *renamed("areal", "StalenessManager", "`rollout.max_staleness`"),
    # -- areal.api
    *available(
        "areal.api.cli_args", "GenerationHyperparameters", "archon.generation.types", "512 new tokens by default"
    ),
    *available("areal.api.engine_api", "InferenceEngine", "archon.generation.types"),
    *available("areal.api.io_struct", "ModelRequest ModelResponse", "archon.generation.types"),
    *available(
        "areal.api.reward_api",
        "AsyncRewardWrapper",
        "archon.rl.rewards",
        "a failed call drops its sample instead of scoring 0",
    ),
    *available("areal.api.workflow_api", "RolloutWorkflow WorkflowLike", "archon.rl.workflows"),
    *renamed("areal.api.workflow_api", "AgentWorkflow", "any class with `async def run(self, data, **extra_kwargs)`"),
    *renamed("areal.api.reward_api", "RewardResult normalize_reward_result", "a dictionary of reward parts"),
    *renamed("areal.api.cli_args", "GRPOConfig PPOConfig", "archon.rl.RLConfig", _CONFIG_NOTE),
    *renamed("areal.api.cli_args", "SFTConfig", "archon.rl.SFTConfig", _CONFIG_NOTE),
    *renamed("areal.api.cli_args", "RWConfig DPOConfig", "archon.rl.PreferenceConfig", _CONFIG_NOTE),
    *renamed("areal.api.cli_args", "PPOActorConfig TrainEngineConfig", "archon.schema.config.EngineConfig"),
    *renamed("areal.api.cli_args", "ArchonEngineConfig MicroBatchSpec", "fields of archon.schema.config.EngineConfig"),
    *renamed("areal.api.cli_args", "OptimizerConfig", "archon.schema.config.OptimizerConfig"),
    *renamed("areal.api.cli_args", "InferenceEngineConfig", "archon.rl.config.RolloutConfig"),
    *renamed("areal.api.cli_args", "TrainDatasetConfig ValidDatasetConfig", "archon.data.config.DatasetConfig"),
    *renamed(
        "areal.api.cli_args", "load_expr_config", "`archon rl --config FILE key=value`, or RLConfig.parse(values)"
    ),
    *renamed("areal.api.alloc_mode", "AllocationMode ModelAllocation ParallelStrategy", "archon.parallel.parse_layout"),
    *renamed("areal.api.engine_api", "TrainEngine", "archon.engine.engine.ArchonEngine"),
    *renamed("areal.api.io_struct", "SaveLoadMeta", "ArchonEngine.save(path)", "a Hugging Face checkpoint"),
    *renamed("areal.api.io_struct", "FinetuneSpec", "ArchonEngine.initialize(total_steps)"),
    *renamed("areal.api.io_struct", "StepInfo", "`step` of a trainer"),
    *renamed("areal.api.io_struct", "WeightUpdateMeta", "InferenceEngine.update_weights(model, version=n)"),
    *renamed("areal.api.io_struct", "RolloutStat", "the counts `rollout/…` of metrics.jsonl"),
    *missing("areal.api.scheduler_api", "Scheduler Worker Job", _ONE_RUN),
    *renamed("areal.api.io_struct", "LocalInfServerInfo", "`rollout.servers`"),
    *missing("areal.api.io_struct", "ParamSpec HttpRequest", _ONE_RUN),
    *missing("areal.api.alloc_mode", "AllocationType FSDPParallelStrategy MegatronParallelStrategy", "one engine"),
    *renamed("areal.api.cli_args", "SGLangConfig", "`rollout.launch: {engine: sglang, args: […]}`"),
    *renamed("areal.api.cli_args", "vLLMConfig", "`rollout.launch: {engine: vllm, args: […]}`"),
    *renamed("areal.api.cli_args", "SchedulerConfig", "`rollout.launch.launcher`", "local, ray or slurm"),
    *missing("areal.api.engine_api", "LossReduction LossTerm", "a loss is an object, see archon.engine.loss"),
    *missing("areal.api.io_struct", "get_versioned_lora_name", _LORA),
    *missing("areal.api.io_struct", "detect_image_mime", "Pillow detects image formats"),
    # -- areal.workflow
    *available(
        "areal.workflow.rlvr", "RLVRWorkflow", "archon.rl.workflows", "returns the group; the template sets thinking"
    ),
    *available("areal.workflow.multi_turn", "MultiTurnWorkflow", "archon.rl.workflows", "stays in token space"),
    *available(
        "areal.workflow.vision_rlvr",
        "VisionRLVRWorkflow",
        "archon.rl.workflows",
        "`processor`: the checkpoint's folder",
    ),
    *missing("areal.workflow.self_adaptation", "SelfAdaptationWorkflow", "write it as a workflow"),
    *renamed(
        "areal.workflow.openenv", "OpenEnvWorkflow", "`workflow: openenv:URL`", "docs/tasks/environments.md has a run"
    ),
    *renamed(
        "areal.workflow.openai.math_agent",
        "MathAgent MultiTurnMathAgent MathToolAgent",
        "a custom agent",
        "docs/tasks/agents.md trains one",
    ),
    # -- areal.dataset
    *available("areal.dataset", "VALID_DATASETS", "archon.data", "grows with `register_dataset`; do not append to it"),
    *available("areal.dataset", "get_custom_dataset", f"{_HERE}.datasets"),
    *renamed("areal.dataset", "_get_custom_dataset", f"{_HERE}.datasets.get_custom_dataset"),
    *available("areal.dataset.gsm8k", "get_gsm8k_rl_dataset get_gsm8k_sft_dataset", "archon.data"),
    *available(
        "areal.dataset.geometry3k", "get_geometry3k_rl_dataset get_geometry3k_sft_dataset", "archon.data", _IMAGES
    ),
    *available(
        "areal.dataset.clevr_count_70k",
        "get_clevr_count_70k_rl_dataset get_clevr_count_70k_sft_dataset",
        "archon.data",
        _IMAGES,
    ),
    *available("areal.dataset.hhrlhf", "get_hhrlhf_rw_dataset get_hhrlhf_dpo_dataset", f"{_HERE}.datasets"),
    *available("areal.dataset.torl_data", "get_torl_data_rl_dataset", "archon.data"),
    *renamed("areal.dataset.dapo_math_17k", "get_dapo_math_17k_rl_dataset", "get_custom_dataset with `prompt_key`"),
    *missing(
        "areal.dataset.virl39k",
        "get_virl39k_rl_dataset",
        "read it by its columns: `prompt_key`, `response_key`, `images`",
    ),
    # -- areal.reward
    *available("areal.reward", "VALID_REWARD_FN get_reward_fn", "archon.rl.rewards", "grows with `register_reward`"),
    *available("areal.reward", "get_custom_reward_fn", f"{_HERE}.rewards"),
    *available(
        "areal.reward",
        "MathVerifyWorker get_math_verify_worker",
        f"{_HERE}.rewards",
        r"only `\boxed{…}` counts as an answer",
    ),
    *available("areal.reward", "gsm8k_reward_fn geometry3k_reward_fn clevr_count_70k_reward_fn", f"{_HERE}.rewards"),
    *available("areal.reward", "math_verify_reward_fn", f"{_HERE}.rewards", r"only `\boxed{…}` counts as an answer"),
    *missing("areal.reward", "if_gap_reward_fn", "write a reward function"),
    # -- areal.utils, areal.infra, areal.engine
    *available("areal.utils.data", "concat_padded_tensors", "archon.rl.trajectories"),
    *renamed("areal.utils.data", "pad_sequences_to_tensors", "archon.training.sft.padded_batch(rows)"),
    *available("areal.utils", "stats_tracker", f"{_HERE}.statistics", "`get`, `scalar` and `record_timing`"),
    *renamed("areal.utils", "logging", "import logging"),
    *renamed("areal.utils.logging", "getLogger", "logging.getLogger(name)"),
    *renamed(
        "areal.utils.hf_utils",
        "apply_chat_template",
        "tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
    ),
    *missing("areal.utils.image", "image2base64", "VisionRLVRWorkflow reads images in every form"),
    *missing("areal.utils.environ", "is_single_controller", _ONE_RUN),
    *renamed("areal.utils.hf_utils", "load_hf_tokenizer", "archon.checkpoint.hf_io.load_tokenizer"),
    *renamed("areal.utils.dynamic_import", "import_from_string", "archon.schema.lazy.import_dotted"),
    *renamed("areal.utils.stats_logger", "StatsLogger", "`metrics: {sinks: [tensorboard, wandb, trackio]}`"),
    *renamed("areal.utils.saver", "Saver", "`checkpoint: {every: …}`"),
    *renamed("areal.utils.recover", "RecoverHandler", "`resume: true`"),
    *renamed(
        "areal.utils.perf_tracer",
        "trace_session atrace_session_phase session_context",
        "`archon bench --profile`, `archon report`",
    ),
    *available("areal.engine.core.distributed", "patch_dist_group_timeout", "archon.parallel"),
    *available(
        "the debugging guide", "check_tensor_consistency", "archon.parallel", "reports and returns the differing ranks"
    ),
    *missing("areal.engine.core.distributed", "init_custom_process_group", _RANKS),
    *renamed("areal.experimental.engine.archon_engine", "ArchonEngine", "archon.engine.engine.ArchonEngine"),
    *renamed("areal.engine.sglang_remote", "RemoteSGLangEngine", "`rollout.launch: {engine: sglang}`", _SERVERS),
    *renamed("areal.engine.vllm_remote", "RemotevLLMEngine", "`rollout.launch: {engine: vllm}`", _SERVERS),
    *missing("areal.engine", "FSDPEngine MegatronEngine", "one engine serves every layout"),
    *renamed("areal.infra", "LocalScheduler", "`rollout.launch: {launcher: local}`"),
    *renamed("areal.infra", "RayScheduler", "`rollout.launch: {launcher: ray}`"),
    *renamed("areal.infra", "SlurmScheduler", "`rollout.launch: {launcher: slurm}`"),
    *available(
        "areal.experimental.openai.types",
        "InteractionWithTokenLogpReward",
        "archon.rl.workflows.short_forms",
        "without `parent`; tokens link the calls of an agent",
    ),
    *renamed(
        "areal.experimental.openai", "ArealOpenAI", "openai.AsyncOpenAI with the base_url and api_key of an agent run"
    ),
    # -- the model guide
    *available(
        _ARCHON,
        "ModelSpec get_model_spec get_supported_model_types is_supported_model register_model_spec",
        "archon.models",
    ),
    *available(_ARCHON, "BaseArchonModel BaseModelArgs BaseStateDictAdapter", "archon.models"),
    *available(_ARCHON, "ArchonParallelDims", "archon.parallel", "has `world_mesh`, `get_mesh` and `get_group`"),
    *available(
        f"{_ARCHON}.qwen2", "Qwen2Model Qwen2ModelArgs Qwen2StateDictAdapter parallelize_qwen2", "archon.models.qwen2"
    ),
    *available(
        f"{_ARCHON}.qwen3", "Qwen3Model Qwen3ModelArgs Qwen3StateDictAdapter parallelize_qwen3", "archon.models.qwen3"
    ),
    *available(
        f"{_ARCHON}.pipeline_parallel", "pipeline_llm", f"{_HERE}.model_guide", "the default of `pipelining_fn`"
    ),
    *available(
        f"{_ARCHON}.qwen2.model.rope",
        "precompute_rope_cache",
        f"{_HERE}.model_guide",
        "for comparisons; models use `args.rope(layer)`",
    ),
    *renamed(
        f"{_ARCHON}.qwen2.model.rope",
        "apply_rotary_emb rotate_half repeat_kv reshape_for_broadcast",
        "`args.rope(layer)`",
        "the shared attention layer does this",
    ),
    *available(f"{_ARCHON}.model_spec", "ParallelizeFn", "archon.models.spec"),
    *renamed(
        f"{_ARCHON}.qwen2.infra.parallelize",
        "apply_non_moe_tp",
        "archon.parallel.tensor.apply_tensor_parallel(model, parallel_dims.get_mesh('tp'), DENSE_TP_PLAN)",
        "the plan is in archon.models.spec",
    ),
    *renamed(
        f"{_ARCHON}.qwen3.infra.parallelize",
        "apply_moe_ep_tp",
        "archon.parallel.expert.apply_expert_parallel(model, ep_mesh, etp_mesh)",
        "after apply_tensor_parallel with MOE_TP_PLAN",
    ),
    *renamed(f"{_ARCHON}.qwen3.infra.parallelize", "apply_fsdp", "archon.parallel.fsdp.apply_fsdp"),
    *renamed(f"{_ARCHON}.compile", "apply_compile Compilable", "archon.parallel.compile.apply_compile"),
    *missing(
        f"{_ARCHON}.utils",
        "validate_tp_constraints validate_cp_constraints validate_ep_constraints",
        "the engine checks a layout before it builds the model",
    ),
    *missing(
        f"{_ARCHON}.pipeline_parallel",
        "generate_llm_fqn_per_model_part pipeline_module_split",
        "`pipelining_fn` removes the modules of other stages; `layers_per_stage` sets the layers",
    ),
    *renamed(
        "areal.models.parallel_styles",
        "ReplicateParallel",
        "`replicate` in a plan like archon.models.spec.DENSE_TP_PLAN",
    ),
    *renamed(
        f"{_ARCHON}.activation_checkpoint",
        "ActivationCheckpointConfig",
        "archon.schema.config.ActivationCheckpointConfig",
    ),
    *renamed(
        f"{_ARCHON}.activation_checkpoint",
        "apply_ac",
        "archon.parallel.activation_checkpoint.apply_activation_checkpointing(blocks, ac_config, model.attention_ops)",
    ),
    *renamed(
        f"{_ARCHON}.attention",
        "SDPAWrapper VarlenAttentionWrapper TreeAttentionWrapper TreeAttentionMeta varlen",
        "`args.mixer(layer).build(layer, dim)`",
        "the shared attention layer of every backend",
    ),
    *renamed(
        f"{_ARCHON}.ulysses",
        "gather_seq_scatter_heads gather_heads_scatter_seq",
        "`c2` in the layout",
        "the engine splits the tokens, and the shared attention layer exchanges heads",
    ),
    *renamed(
        f"{_ARCHON}.moe",
        "MoE MoEArgs GroupedExperts grouped_experts",
        "archon.models.args.moe.MoEModelArgs",
        "as base class of the arguments",
    ),
    *renamed(
        f"{_ARCHON}.expert_parallel",
        "ExpertParallel TensorParallel ExpertTensorParallel ReordererSequenceParallel apply_expert_parallel",
        "`e4` in the layout",
        "experts need no plan",
    ),
    *renamed(
        f"{_ARCHON}.moe_weight_converter",
        "MoEWeightConverter MoEConversionState",
        "archon.models.hf.names.EXPERTS_HF_MAP",
    ),
)


def export_map() -> dict[str, list[str]]:
    """Return the available names by module, for `lazy_exports`."""
    exports: dict[str, list[str]] = {}
    for row in NAMES:
        if row.home:
            exports.setdefault(row.home, []).append(row.name)
    return exports


def migration_hint(name: str) -> str | None:
    """Return a one-line replacement or reason for an unavailable name, else None."""
    for row in NAMES:
        if row.name == name and not row.home:
            hint = f"write {row.instead}" if row.instead else f"archon has none: {row.note}"
            note = f" ({row.note})" if row.instead and row.note else ""
            return f"{row.path}: {hint}{note}; rl/compat/README.md lists all names"
    return None
