"""RL layer: workflows, rewards, datasets, rollout, trainer. All public names import from `archon.rl`.

Names load on first use: a reward's worker process starts without torch.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "archon.generation.types": (
            "GenerationHyperparameters",
            "InferenceEngine",
            "ModelRequest",
            "ModelResponse",
        ),
        "trajectories": ("concat_padded_tensors",),
        "compat.areal.datasets": ("get_custom_dataset",),
        "compat.areal.short_forms": ("InteractionWithTokenLogpReward",),
        "episode_context": ("workflow_context",),
        "workflows": (
            "MultiTurnWorkflow",
            "RLVRWorkflow",
            "RolloutWorkflow",
            "VisionRLVRWorkflow",
            "register_workflow",
        ),
        "rewards": ("VALID_REWARD_FN", "AsyncRewardWrapper", "get_reward_fn", "register_reward"),
        "archon.data": (
            "VALID_DATASETS",
            "get_arithmetic_rl_dataset",
            "get_arithmetic_sft_dataset",
            "get_clevr_count_70k_rl_dataset",
            "get_clevr_count_70k_sft_dataset",
            "get_geometry3k_rl_dataset",
            "get_geometry3k_sft_dataset",
            "get_gsm8k_rl_dataset",
            "get_gsm8k_sft_dataset",
            "get_hh_rlhf_dpo_dataset",
            "get_hh_rlhf_rw_dataset",
            "get_shapes_rl_dataset",
            "get_shapes_sft_dataset",
            "get_torl_data_rl_dataset",
            "get_torl_data_sft_dataset",
            "register_dataset",
        ),
        "archon.generation": ("InProcessEngine",),
        "compat.trinity.experience": ("EID", "Experience"),
        "compat.trinity.workflow": (
            *("REWARD_FUNCTIONS", "WORKFLOWS", "RewardFn", "Workflow"),
            *("FormatConfig", "GenerationConfig", "Task"),
        ),
        "compat.trinity.model": ("ModelWrapper",),
        "compat.trinity.auxiliary": ("AuxiliaryModel",),
        "compat.trinity.builtin": ("MathBoxedWorkflow", "MathWorkflow", "SimpleWorkflow"),
        "compat.trinity.environments": (
            *("AlfworldWorkflow", "GymEnvWorkflow", "TextEnv", "TextEnvWorkflow", "WebShopWorkflow"),
        ),
        "compat.trinity.react": ("AgentScopeReActWorkflow", "ReActWorkflow"),
        "compat.trinity.ruler": ("MathRULERWorkflow",),
        "compat.trinity.step_wise": (
            *("AsyncRewardPropagationWorkflow", "AsyncStepWiseRewardWorkflow"),
            *("RewardPropagationWorkflow", "StepWiseRewardWorkflow"),
        ),
        "compat.trinity.adapter": ("TrinityWorkflow",),
        "workflows.agent": ("AgentWorkflow",),
        "workflows.online": ("OnlineWorkflow",),
        "config": ("RLConfig",),
        "trainer": ("RLTrainer",),
        "modes": ("make_trainer",),
        "archon.training": ("PreferenceConfig", "PreferenceTrainer", "SFTConfig", "SFTTrainer"),
    },
    expected="archon.rl",
)
