"""Workflows: how one prompt becomes scored trajectories."""

from __future__ import annotations

from archon.rl.workflows.base import RolloutWorkflow, resolve_workflow
from archon.rl.workflows.multi_turn import MultiTurnWorkflow
from archon.rl.workflows.rlvr import RLVRWorkflow
from archon.rl.workflows.trajectory import InteractionWithTokenLogpReward

__all__ = ["InteractionWithTokenLogpReward", "MultiTurnWorkflow", "RLVRWorkflow", "RolloutWorkflow", "resolve_workflow"]
