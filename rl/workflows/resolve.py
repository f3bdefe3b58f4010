"""Resolution of a workflow from an instance, a class, a registered name or a dotted path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from archon.data.environments import parse_environment
from archon.rl.environments.episodes import EnvironmentWorkflow
from archon.rl.hooks import apply_resolvers, translate_path
from archon.rl.rewards import VALID_REWARD_FN
from archon.rl.workflows.agent import AgentWorkflow
from archon.rl.workflows.base import RolloutWorkflow
from archon.schema.config import nearest
from archon.schema.errors import ConfigError
from archon.schema.lazy import import_dotted
from archon.schema.registry import NamedObjects
from archon.schema.user_code import user_code

WorkflowLike: TypeAlias = Any
"""A workflow or an agent (an object with `async def run`): an instance, a class, a registered name, a dotted string."""

_NAMED: NamedObjects[Any] = NamedObjects("workflow", "archon.workflows", {})
register_workflow = _NAMED.register
"""Registers the decorated workflow or agent under a name: `@register_workflow("retries")`."""


def resolve_workflow(
    workflow: WorkflowLike, workflow_args: Mapping[str, Any] | None = None, **arguments: Any
) -> RolloutWorkflow:
    """Return the workflow instance of an instance, a class, a registered name or a dotted path.

    An environment name such as `textarena:2048-v0` becomes an `EnvironmentWorkflow`, and an agent (`async def run(self,
    data, **extra_kwargs)`) an `AgentWorkflow`. A class is constructed with `workflow_args` and the `arguments` that its
    `__init__` names.

    Raises:
        ConfigError: `workflow` is none of these, or the class cannot be constructed.
    """
    workflow_args = workflow_args or {}
    if isinstance(workflow, str) and parse_environment(workflow):
        workflow_args = {**workflow_args, "environment": workflow}
    target, workflow_args = _resolve_name(workflow, workflow_args)
    if not hasattr(target, "arun_episode") and inspect.iscoroutinefunction(getattr(target, "run", None)):
        return AgentWorkflow(
            _construct(target, workflow_args, {}),
            arguments["gconfig"],
            arguments["tokenizer"],
            processor=arguments.get("processor"),
            workers=arguments.get("workers"),
        )
    if not callable(getattr(target, "arun_episode", None)):
        raise ConfigError(
            f"workflow: got {workflow!r}, expected a RolloutWorkflow or an agent (`async def run`): an instance, a "
            "class, or a dotted string"
        )
    resolved: RolloutWorkflow = _construct(target, workflow_args, arguments)
    return resolved


def reads_raw_rows(workflow: WorkflowLike) -> bool:
    """Return whether the workflow reads the source dataset's columns."""
    return bool(getattr(_resolve_name(workflow, {})[0], "reads_raw_rows", False))


def _resolve_name(workflow: WorkflowLike, arguments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the class or object that `workflow` names, and its constructor arguments."""
    if isinstance(workflow, str):
        if parse_environment(workflow):
            return EnvironmentWorkflow, arguments
        named = None if "." in workflow else _NAMED.find(workflow)
        workflow = translate_path(workflow) if named is None else named
    target, arguments = apply_resolvers(workflow, arguments)
    return (import_dotted(target, "workflow") if isinstance(target, str) else target), arguments


def _construct(target: Any, workflow_args: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Return an instance unchanged; construct a class with `workflow_args` and the `arguments` it names."""
    if not isinstance(target, type):
        if workflow_args:
            raise ConfigError(f"workflow_args {', '.join(workflow_args)}: the workflow is an instance; pass its class")
        return target
    accepted = inspect.signature(target).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    values = {name: value for name, value in arguments.items() if takes_all or name in accepted}
    for name in workflow_args:
        if name not in accepted and not takes_all:
            raise ConfigError(
                f"workflow class {target.__qualname__} has no argument {name!r}{nearest(name, list(accepted))}"
            )
    if "gconfig" in workflow_args and not isinstance(workflow_args["gconfig"], type(arguments.get("gconfig"))):
        raise ConfigError(f"workflow_args.gconfig: got {workflow_args['gconfig']!r}; set the run's `gconfig` instead")
    values |= workflow_args
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {name for name, p in accepted.items() if p.default is p.empty and p.kind not in variable}
    missing = sorted(needed - values.keys())
    if missing == ["reward_fn"]:
        raise ConfigError(
            f"workflow {target.__qualname__} scores answers with a reward, and none is set; set reward to a name "
            f"({', '.join(VALID_REWARD_FN)}), the dotted path of a function, or {{model: FOLDER}}"
        )
    if missing:
        raise ConfigError(
            f"workflow class {target.__qualname__} needs {', '.join(missing)}, but the trainer passes "
            f"{', '.join(arguments) or 'nothing to an agent'}; pass an instance, or set them in workflow_args"
        )
    with user_code(f"workflow class {target.__qualname__}", ConfigError):
        return target(**values)
