"""The small RL layer: workflows, rewards, datasets, rollout, trainer. Every public name imports from `archon.rl`.

Names load on first use, so that a reward's worker process starts without torch.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "types": (
            "GenerationHyperparameters",
            "InferenceEngine",
            "ModelRequest",
            "ModelResponse",
            "concat_padded_tensors",
        ),
        "context": ("workflow_context",),
        "workflows": ("InteractionWithTokenLogpReward", "MultiTurnWorkflow", "RLVRWorkflow", "RolloutWorkflow"),
        "rewards": ("VALID_REWARD_FN", "AsyncRewardWrapper", "get_reward_fn"),
        "datasets": (
            "VALID_DATASETS",
            "get_arithmetic_rl_dataset",
            "get_arithmetic_sft_dataset",
            "get_custom_dataset",
            "get_gsm8k_rl_dataset",
            "get_gsm8k_sft_dataset",
            "get_hh_rlhf_dpo_dataset",
            "get_hh_rlhf_rw_dataset",
            "get_torl_data_rl_dataset",
            "get_torl_data_sft_dataset",
        ),
        "generation": ("InProcessEngine",),
        "trinity": (
            "EID",
            "REWARD_FUNCTIONS",
            "WORKFLOWS",
            "Experience",
            "FormatConfig",
            "GenerationConfig",
            "MathWorkflow",
            "ModelWrapper",
            "ReActWorkflow",
            "RewardFn",
            "SimpleWorkflow",
            "Task",
            "TextEnv",
            "TextEnvWorkflow",
            "TrinityWorkflow",
            "Workflow",
        ),
        "agents": ("AgentWorkflow",),
        "config": ("PreferenceConfig", "RLConfig", "SFTConfig"),
        "trainer": ("RLTrainer",),
        "sft": ("SFTTrainer",),
        "preference": ("PreferenceTrainer",),
    },
    expected="archon.rl",
)
