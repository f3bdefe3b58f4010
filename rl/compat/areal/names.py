"""What AReaL's users import, and what becomes of it here: one table for the package's exports, the errors of names that
are not here, the page rl/compat/README.md and its test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Name(NamedTuple):
    """A public name of AReaL.

    Attributes:
        path: the name with AReaL's module.
        home: the module of archon that has it under this name, if it works.
        instead: what to write in its place, where it has another spelling.
        note: how it differs, or why it is not here.
    """

    path: str
    home: str = ""
    instead: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """The name alone."""
        return self.path.rpartition(".")[2]

    @property
    def status(self) -> str:
        """`available`, `other spelling` or `not here`."""
        return "works" if self.home else "other spelling" if self.instead else "not here"


_HERE = "archon.rl.compat.areal"
_ARCHON = "areal.experimental.models.archon"


def available(module: str, names: str, home: str, note: str = "") -> Iterator[Name]:
    """Yield names of one module that archon has in `home`."""
    for name in names.split():
        yield Name(f"{module}.{name}", home=home, note=note)


def renamed(module: str, names: str, instead: str, note: str = "") -> Iterator[Name]:
    """Yield names of one module for which something else is written."""
    for name in names.split():
        yield Name(f"{module}.{name}", instead=instead, note=note)


def missing(module: str, names: str, note: str) -> Iterator[Name]:
    """Yield names of one module that archon does not have, and why."""
    for name in names.split():
        yield Name(f"{module}.{name}", note=note)


_IMAGES = "with images for a model that sees (`processor`: a `ImageReader`); else the text alone, with a warning"
_CONFIG_NOTE = "with archon's keys, which rl/README.md lists next to AReaL's"
_ONE_RUN = "a run is one program under torchrun: there are no controllers, schedulers or servers to start"
_RANKS = "the engine does this for every layout; nothing is called by hand"
_LORA = "an adapter has no versions of its own; the engine counts those of the weights"

NAMES: tuple[Name, ...] = (
    # -- areal, areal.trainer
    *available("areal", "PPOTrainer", f"{_HERE}.trainers", "takes an `RLConfig`; rows may be given as AReaL's are"),
    *available("areal", "SFTTrainer", f"{_HERE}.trainers", "takes an `SFTConfig`; rows of `input_ids` and `loss_mask`"),
    *available("areal", "workflow_context", "archon.rl.episode_context"),
    *renamed("areal", "RWTrainer DPOTrainer", "archon.rl.PreferenceTrainer(config).train()", "`loss: reward` or `dpo`"),
    *missing("areal", "RolloutController TrainController WorkflowExecutor StalenessManager current_platform", _ONE_RUN),
    # -- areal.api
    *available(
        "areal.api.cli_args", "GenerationHyperparameters", "archon.generation.types", "512 new tokens by default"
    ),
    *available("areal.api.engine_api", "InferenceEngine", "archon.generation.types"),
    *available("areal.api.io_struct", "ModelRequest ModelResponse", "archon.generation.types"),
    *available(
        "areal.api.reward_api", "AsyncRewardWrapper", "archon.rl.rewards", "a failed call drops its sample, not 0"
    ),
    *available("areal.api.workflow_api", "RolloutWorkflow WorkflowLike", "archon.rl.workflows"),
    *renamed("areal.api.workflow_api", "AgentWorkflow", "any class with `async def run(self, data, **extra_kwargs)`"),
    *renamed("areal.api.reward_api", "RewardResult normalize_reward_result", "a dictionary of a reward's parts"),
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
    *missing("areal.api.io_struct", "LocalInfServerInfo ParamSpec HttpRequest", _ONE_RUN),
    *missing("areal.api.alloc_mode", "AllocationType FSDPParallelStrategy MegatronParallelStrategy", "one engine"),
    *missing("areal.api.cli_args", "SGLangConfig vLLMConfig SchedulerConfig", _ONE_RUN),
    *missing("areal.api.engine_api", "LossReduction LossTerm", "a loss is an object, see archon.engine.loss"),
    *missing("areal.api.io_struct", "get_versioned_lora_name", _LORA),
    *missing("areal.api.io_struct", "detect_image_mime", "Pillow reads what an image is"),
    # -- areal.workflow
    *available(
        "areal.workflow.rlvr", "RLVRWorkflow", "archon.rl.workflows", "returns the group; thinking as the template's"
    ),
    *available("areal.workflow.multi_turn", "MultiTurnWorkflow", "archon.rl.workflows", "stays in token space"),
    *available(
        "areal.workflow.vision_rlvr",
        "VisionRLVRWorkflow",
        "archon.rl.workflows",
        "`processor`: the checkpoint's folder",
    ),
    *missing("areal.workflow.self_adaptation", "SelfAdaptationWorkflow", "write it as a workflow"),
    *missing("areal.workflow.openenv", "OpenEnvWorkflow", "archon.rl.TextEnvWorkflow is its nearest"),
    *renamed(
        "areal.workflow.openai.math_agent",
        "MathAgent MultiTurnMathAgent MathToolAgent",
        "an agent of your own",
        "rl/README.md trains one",
    ),
    # -- areal.dataset
    *available("areal.dataset", "VALID_DATASETS", "archon.data", "grows with `register_dataset`; do not append to it"),
    *available("areal.dataset", "get_custom_dataset", f"{_HERE}.datasets"),
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
        r"only a `\boxed{…}` is an answer",
    ),
    *available("areal.reward", "gsm8k_reward_fn geometry3k_reward_fn clevr_count_70k_reward_fn", f"{_HERE}.rewards"),
    *missing("areal.reward", "if_gap_reward_fn", "write it as a reward of your own"),
    # -- areal.utils, areal.infra, areal.engine
    *available("areal.utils.data", "concat_padded_tensors", "archon.rl.trajectories"),
    *renamed("areal.utils.data", "pad_sequences_to_tensors", "archon.training.sft.padded_batch(rows)"),
    *available("areal.utils", "stats_tracker", f"{_HERE}.statistics", "`get`, `scalar` and `record_timing`"),
    *renamed("areal.utils", "logging", "import logging"),
    *renamed("areal.utils.hf_utils", "load_hf_tokenizer", "archon.checkpoint.hf_io.load_tokenizer"),
    *renamed("areal.utils.dynamic_import", "import_from_string", "archon.schema.lazy.import_dotted"),
    *renamed("areal.utils.stats_logger", "StatsLogger", "`metrics: {sinks: [tensorboard, wandb, trackio]}`"),
    *renamed("areal.utils.saver", "Saver", "`checkpoint: {every: …}`"),
    *renamed("areal.utils.recover", "RecoverHandler", "`resume: true`"),
    *renamed("areal.utils.perf_tracer", "trace_session", "`archon bench --profile`, `archon report`"),
    *available("areal.engine.core.distributed", "patch_dist_group_timeout", "archon.parallel"),
    *available(
        "the debugging guide", "check_tensor_consistency", "archon.parallel", "says who differs, and returns it"
    ),
    *missing("areal.engine.core.distributed", "init_custom_process_group", _RANKS),
    *renamed("areal.experimental.engine.archon_engine", "ArchonEngine", "archon.engine.engine.ArchonEngine"),
    *renamed("areal.engine.sglang_remote", "RemoteSGLangEngine", "archon.rl.InProcessEngine"),
    *renamed("areal.engine.vllm_remote", "RemotevLLMEngine", "archon.rl.InProcessEngine"),
    *missing("areal.engine", "FSDPEngine MegatronEngine", "one engine, by layout"),
    *missing("areal.infra", "LocalScheduler RayScheduler SlurmScheduler", _ONE_RUN),
    *available(
        "areal.experimental.openai.types",
        "InteractionWithTokenLogpReward",
        "archon.rl.workflows.short_forms",
        "without `parent`: agents' calls are linked by their tokens",
    ),
    *renamed("areal.experimental.openai", "ArealOpenAI", "openai.AsyncOpenAI with base_url, api_key of an agent's run"),
    # -- the model guide
    *available(
        _ARCHON,
        "ModelSpec get_model_spec get_supported_model_types is_supported_model register_model_spec",
        "archon.models",
    ),
    *available(_ARCHON, "BaseArchonModel BaseModelArgs BaseStateDictAdapter", "archon.models"),
    *available(_ARCHON, "ArchonParallelDims", "archon.parallel", "`world_mesh`, `get_mesh` and `get_group` are there"),
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
        "to compare with; models rotate by `args.rope(layer)`",
    ),
    *renamed(
        f"{_ARCHON}.qwen2.model.rope",
        "apply_rotary_emb rotate_half repeat_kv reshape_for_broadcast",
        "`rope(layer)` of the arguments",
        "the shared attention rotates and repeats",
    ),
    *renamed(
        f"{_ARCHON}.activation_checkpoint",
        "ActivationCheckpointConfig",
        "archon.schema.config.ActivationCheckpointConfig",
    ),
    *renamed(
        f"{_ARCHON}.expert_parallel",
        "ExpertParallel TensorParallel ExpertTensorParallel apply_expert_parallel",
        "`e4` in the layout",
        "experts need no plan",
    ),
    *renamed(f"{_ARCHON}.moe_weight_converter", "MoEWeightConverter", "archon.models.hf.names.EXPERTS_HF_MAP"),
)


def export_map() -> dict[str, list[str]]:
    """Return the names that work by the module that has them, for `lazy_exports`."""
    exports: dict[str, list[str]] = {}
    for row in NAMES:
        if row.home:
            exports.setdefault(row.home, []).append(row.name)
    return exports


def migration_hint(name: str) -> str | None:
    """Return the one line that says what to write for a name that does not work, or why it is not here; None for other
    names.
    """
    for row in NAMES:
        if row.name == name and not row.home:
            said = f"write {row.instead}" if row.instead else f"archon has none: {row.note}"
            note = f" ({row.note})" if row.instead and row.note else ""
            return f"{row.path}: {said}{note}; rl/compat/README.md lists all names"
    return None
