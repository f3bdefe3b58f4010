"""Every name that a user of AReaL or Trinity-RFT imports is one of `archon.rl`."""

from __future__ import annotations

import importlib

import pytest

NAMES = """
    GenerationHyperparameters ModelRequest ModelResponse InferenceEngine concat_padded_tensors
    RolloutWorkflow RLVRWorkflow VisionRLVRWorkflow MultiTurnWorkflow InteractionWithTokenLogpReward workflow_context
    WORKFLOWS Workflow Task ModelWrapper Experience MathWorkflow TextEnvWorkflow ReActWorkflow
    get_reward_fn VALID_REWARD_FN AsyncRewardWrapper VALID_DATASETS get_custom_dataset
    get_gsm8k_sft_dataset get_gsm8k_rl_dataset get_torl_data_sft_dataset get_torl_data_rl_dataset
    get_hh_rlhf_rw_dataset get_hh_rlhf_dpo_dataset get_arithmetic_sft_dataset get_arithmetic_rl_dataset
    get_shapes_sft_dataset get_shapes_rl_dataset
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_the_name_imports(name: str) -> None:
    package = importlib.import_module("archon.rl")
    assert getattr(package, name) is not None and name in package.__all__
