"""Workflows turn a prompt into scored trajectories."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "agent": ("AgentWorkflow", "ProcessAgent", "resolve_agent"),
        "base": ("RolloutWorkflow",),
        "multi_turn": ("MultiTurnWorkflow",),
        "online": ("OnlineWorkflow",),
        "resolve": ("WorkflowLike", "reads_raw_rows", "register_workflow", "resolve_workflow"),
        "rlvr": ("RLVRWorkflow",),
        "vision_rlvr": ("VisionRLVRWorkflow",),
    },
)
