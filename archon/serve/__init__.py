"""HTTP over a generator: OpenAI's and Anthropic's protocols, and sessions that record every token exactly."""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "server": ("AgentServer",),
        "service": ("Limits",),
        "sessions": ("Interaction", "Session", "Trajectory"),
    },
)
