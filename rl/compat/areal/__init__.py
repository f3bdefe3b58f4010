"""The names that users of AReaL import, from one package: `from areal.anything import X` becomes
`from archon.rl.compat.areal import X`. `rl/compat/README.md` lists them, and those that are not here.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "archon.generation.types": ("GenerationHyperparameters", "InferenceEngine", "ModelRequest", "ModelResponse"),
        "archon.rl.workflows": ("MultiTurnWorkflow", "RLVRWorkflow", "RolloutWorkflow", "WorkflowLike"),
        "archon.rl.trajectories": ("concat_padded_tensors",),
        "archon.rl.episode_context": ("workflow_context",),
        "archon.rl.rewards": ("VALID_REWARD_FN", "AsyncRewardWrapper", "get_reward_fn"),
        "archon.data": (
            "VALID_DATASETS",
            "get_clevr_count_70k_rl_dataset",
            "get_clevr_count_70k_sft_dataset",
            "get_geometry3k_rl_dataset",
            "get_geometry3k_sft_dataset",
            "get_gsm8k_rl_dataset",
            "get_gsm8k_sft_dataset",
            "get_torl_data_rl_dataset",
        ),
        "archon.models": (
            "BaseArchonModel",
            "BaseModelArgs",
            "BaseStateDictAdapter",
            "ModelSpec",
            "get_model_spec",
            "get_supported_model_types",
            "is_supported_model",
            "register_model_spec",
        ),
        "archon.parallel": ("ArchonParallelDims", "check_tensor_consistency", "patch_dist_group_timeout"),
        "datasets": ("get_custom_dataset", "get_hhrlhf_dpo_dataset", "get_hhrlhf_rw_dataset"),
        "rewards": (
            "MathVerifyWorker",
            "clevr_count_70k_reward_fn",
            "geometry3k_reward_fn",
            "get_custom_reward_fn",
            "get_math_verify_worker",
            "gsm8k_reward_fn",
        ),
        "short_forms": ("InteractionWithTokenLogpReward",),
        "statistics": ("stats_tracker",),
        "trainers": ("PPOTrainer", "SFTTrainer"),
    },
)
