"""RL layer: workflows, rewards, datasets, rollout, trainer. All public names import from `archon.rl`.

Names load on first use: a reward's worker process starts without torch.
"""

import archon.rl.environments  # noqa: F401 - registers the environments
from archon.rl.compat import EXPORTS  # registers the workflows of other frameworks
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
        "workflows.short_forms": ("InteractionWithTokenLogpReward",),
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
        "workflows.agent": ("AgentWorkflow",),
        "workflows.online": ("OnlineWorkflow",),
        "config": ("RLConfig",),
        "trainer": ("RLTrainer",),
        "modes": ("make_trainer",),
        "archon.training": ("PreferenceConfig", "PreferenceTrainer", "SFTConfig", "SFTTrainer"),
        **{f"compat.{module}": names for module, names in EXPORTS.items()},
    },
    expected="archon.rl",
)
