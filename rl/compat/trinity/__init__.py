"""Trinity-RFT's way to write a rollout: a `Workflow` is given a `Task` and a `ModelWrapper`, and returns experiences.

Names and configuration keys follow its public guides, so that a workflow moves over by changing its imports.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "types": ("EID", "Experience", "FormatConfig", "GenerationConfig", "Task"),
        "model": ("ModelWrapper",),
        "workflow": ("REWARD_FUNCTIONS", "WORKFLOWS", "RewardFn", "Workflow"),
        "builtin": ("MathWorkflow", "SimpleWorkflow", "TextEnv", "TextEnvWorkflow"),
        "react": ("ReActWorkflow",),
        "adapter": ("TrinityWorkflow",),
    },
)
