"""Resolution of a workflow from an instance, a class, a registered name or a dotted path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from archon.data.environments import parse_environment
from archon.rl.workflows.agent import AgentWorkflow
from archon.rl.workflows.base import RolloutWorkflow
from archon.schema.config import nearest
from archon.schema.errors import ConfigError
from archon.schema.lazy import import_dotted
from archon.schema.registry import NamedObjects

WorkflowLike: TypeAlias = Any
"""A workflow or an agent (an object with `async def run`): an instance, a class, a registered name, a dotted string."""

_NAMED: NamedObjects[Any] = NamedObjects("workflow", "archon.workflows", {})
register_workflow = _NAMED.register
"""Registers the decorated workflow or agent under a name: `@register_workflow("retries")`."""

# By dotted path, as the core does not import other frameworks' forms. It returns the class or object that a workflow's
# name stands for, and the arguments to construct it with.
COMPAT_ADAPTER = "archon.rl.compat.trinity.adapter.adapt_workflow"
NATIVE_PATH = "archon.rl.compat.areal.paths.native_path"
# By dotted path, as it stands above the workflows.
ENVIRONMENT_WORKFLOW = "archon.rl.environments.episodes.EnvironmentWorkflow"


def resolve_workflow(
    workflow: WorkflowLike, workflow_args: Mapping[str, Any] | None = None, **arguments: Any
) -> RolloutWorkflow:
    """Return the instance that `workflow` names: itself, its class, or a registered name or dotted string of either.

    The name of an environment, such as `textarena:2048-v0`, becomes an `EnvironmentWorkflow`. An agent, which has
    `async def run(self, data, **extra_kwargs)` instead, becomes an `AgentWorkflow`. A class is constructed with those
    of `arguments` that it names, and with all of `workflow_args`. Raises `ConfigError` naming what was given.
    """
    workflow_args = workflow_args or {}
    if isinstance(workflow, str) and parse_environment(workflow):
        workflow_args = {**workflow_args, "environment": workflow}
    found, workflow_args = import_dotted(COMPAT_ADAPTER, "workflow adapter")(_resolve_name(workflow), workflow_args)
    if not hasattr(found, "arun_episode") and inspect.iscoroutinefunction(getattr(found, "run", None)):
        given = {name: arguments[name] for name in ("gconfig", "tokenizer")}
        processor, workers = arguments.get("processor"), arguments.get("workers")
        return AgentWorkflow(_construct(found, workflow_args, {}), **given, processor=processor, workers=workers)
    if not callable(getattr(found, "arun_episode", None)):
        raise ConfigError(
            f"workflow: got {workflow!r}, expected a RolloutWorkflow or an agent (`async def run`): an instance, a "
            "class, or a dotted string"
        )
    resolved: RolloutWorkflow = _construct(found, workflow_args, arguments)
    return resolved


def reads_raw_rows(workflow: WorkflowLike) -> bool:
    """Return whether the workflow reads its source's own rows."""
    found, _ = import_dotted(COMPAT_ADAPTER, "workflow adapter")(_resolve_name(workflow), {})
    return bool(getattr(found, "reads_raw_rows", False))


def _resolve_name(workflow: WorkflowLike) -> Any:
    """Return what a registered name, an environment's or one of AReaL's paths stands for; anything else unchanged."""
    if not isinstance(workflow, str):
        return workflow
    if parse_environment(workflow):
        return import_dotted(ENVIRONMENT_WORKFLOW, "workflow")
    if "." in workflow:
        return import_dotted(NATIVE_PATH, "workflow path")(workflow)
    found = _NAMED.find(workflow)
    return workflow if found is None else found  # which may be Trinity's


def _construct(found: Any, workflow_args: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Return an instance unchanged; constructs a class with `workflow_args` and those of `arguments` that it names."""
    if not isinstance(found, type):
        if workflow_args:
            raise ConfigError(f"workflow_args {', '.join(workflow_args)}: the workflow is an instance already")
        return found
    accepted = inspect.signature(found).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    given = {name: value for name, value in arguments.items() if takes_all or name in accepted}
    for name in workflow_args:
        if name not in accepted and not takes_all:
            raise ConfigError(
                f"workflow class {found.__qualname__} has no argument {name!r}{nearest(name, list(accepted))}"
            )
    if "gconfig" in workflow_args and not isinstance(workflow_args["gconfig"], type(arguments.get("gconfig"))):
        raise ConfigError(f"workflow_args.gconfig: got {workflow_args['gconfig']!r}; set the run's `gconfig` instead")
    given |= workflow_args
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {name for name, p in accepted.items() if p.default is p.empty and p.kind not in variable}
    if missing := sorted(needed - given.keys()):
        raise ConfigError(
            f"workflow class {found.__qualname__} needs {', '.join(missing)}, and the trainer offers "
            f"{', '.join(arguments) or 'an agent nothing'}; give it as an instance, or name them in workflow_args"
        )
    return found(**given)
