"""Agents: programs that speak to the model over HTTP, served by the generator of this process and trained exactly."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "server": ("AgentServer", "Limits"),
        "sessions": ("Interaction", "Session", "Trajectory"),
        "process": ("ProcessAgent",),
        "workflow": ("AgentWorkflow", "resolve_agent"),
    },
)
