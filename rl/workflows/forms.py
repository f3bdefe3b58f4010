"""Where other frameworks' ways to write a workflow are registered, by dotted path: the core imports none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from archon.rl.workflows.base import RolloutWorkflow
from archon.schema.lazy import import_dotted

WORKFLOW_FORMS = ["archon.rl.compat.trinity.adapter.adapted_workflow"]
"""Functions that know workflows of another kind, imported when a workflow is resolved. Each is given (workflow, further
arguments) and returns both as archon's own, or None for what it does not know."""

GROUP_ADAPTER = "archon.rl.compat.areal.adapter.GroupedWorkflow"
"""Given (workflow, n_samples, log), returns a workflow of which each run returns one group of trajectory tensors, or
None; imported when a rollout is made."""


def find_workflow(workflow: Any, further: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Returns what `workflow` names, and the arguments it is made with, as the first form that knows it has them."""
    for form in WORKFLOW_FORMS:
        if (known := import_dotted(form, "workflow form")(workflow, further)) is not None:
            found: tuple[Any, Mapping[str, Any]] = known
            return found
    return import_dotted(workflow, "workflow") if isinstance(workflow, str) else workflow, further


def whole_groups(workflow: RolloutWorkflow, n_samples: int, log: Callable[[str], None]) -> RolloutWorkflow:
    """Returns `workflow` as one of which each run returns a whole group; `GROUP_ADAPTER` says what it is given."""
    adapted: RolloutWorkflow = import_dotted(GROUP_ADAPTER, "workflow adapter")(workflow, n_samples, log)
    return adapted
