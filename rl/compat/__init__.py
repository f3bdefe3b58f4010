"""Workflows and names of other frameworks; importing this package registers them with `archon.rl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.rl.hooks import register_path_prefix, register_workflow_resolver

EXPORTS = {
    "areal.datasets": ("get_custom_dataset",),
    "trinity.experience": ("EID", "Experience"),
    "trinity.workflow": (
        *("REWARD_FUNCTIONS", "WORKFLOWS", "RewardFn", "Workflow"),
        *("FormatConfig", "GenerationConfig", "Task"),
    ),
    "trinity.model": ("ModelWrapper",),
    "trinity.auxiliary": ("AuxiliaryModel",),
    "trinity.builtin": ("MathBoxedWorkflow", "MathWorkflow", "SimpleWorkflow"),
    "trinity.environments": (*("AlfworldWorkflow", "GymEnvWorkflow", "TextEnv", "TextEnvWorkflow", "WebShopWorkflow"),),
    "trinity.react": ("AgentScopeReActWorkflow", "AgentScopeReactMathWorkflow", "ReActWorkflow"),
    "trinity.ruler": ("MathRULERWorkflow",),
    "trinity.step_wise": (
        *("AsyncRewardPropagationWorkflow", "AsyncStepWiseRewardWorkflow"),
        *("RewardPropagationWorkflow", "StepWiseRewardWorkflow"),
    ),
    "trinity.adapter": ("TrinityWorkflow",),
}
"""Public names that `archon.rl` exports too, by module."""


def _resolve_trinity(workflow: Any, arguments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    from archon.rl.compat.trinity.adapter import adapt_workflow  # lazy: worker processes do not need it

    return adapt_workflow(workflow, arguments)


def _areal_path(path: str) -> str:
    from archon.rl.compat.areal.paths import native_path

    return native_path(path)


register_workflow_resolver(_resolve_trinity)
register_path_prefix("areal.", _areal_path)
