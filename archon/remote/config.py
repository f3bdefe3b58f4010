"""Configuration of rollouts on inference servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from archon.schema.config import MAX_SECONDS, StrictModel


class PushConfig(StrictModel):
    """How weights reach the inference servers, how long they may take to answer, and where the run tells of them."""

    transport: Literal["auto", "disk", "delta", "lora", "gloo", "nccl"] = Field(
        "auto",
        description="disk: a checkpoint in a folder that trainer and servers share; delta: of it "
        "only the elements that changed, unless they are many, for which servers keep a copy; lora: the adapters "
        "alone, in PEFT's format; gloo: broadcast to the servers' workers, without a folder; nccl: the same between "
        "GPUs, which has never been run; auto: lora where the actor has adapters, else disk",
    )
    folder: str | None = Field(
        None, description="the shared folder; null: one in shared memory, where all servers are on this machine"
    )
    max_difference: float | None = Field(
        None,
        gt=0,
        description="largest |logprob difference| of a verified push; null: that of the servers' "
        "dtype, and its largest mean",
    )
    seconds: float = Field(600.0, gt=0, le=MAX_SECONDS, description="time-out of each request of a push")
    answer_seconds: float = Field(600.0, gt=0, le=MAX_SECONDS, description="time-out of an answer")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="on loopback, of /metrics for Prometheus, and of /servers, where servers join and leave the run; "
        "0: any that is free; null: none",
    )


Resources = dict[str, Annotated[float, Field(ge=0)]]
"""Amounts by Ray's names, such as CPU and GPU."""


class LaunchConfig(StrictModel):
    """Inference servers that the run starts, watches, restarts and ends."""

    engine: Literal["archon", "vllm", "sglang"] = Field("archon", description="what answers")
    count: int = Field(1, ge=1, le=1024, description="servers")
    args: list[str] = Field(default_factory=list, description="further arguments of each server's command")
    command: list[str] | None = Field(
        None, description="the program, such as [path/to/vllm, serve]; null: archon serve, vllm serve, or sglang's"
    )
    launcher: Literal["local", "ray", "slurm"] = Field(
        "local",
        description="local: processes on this machine; ray: an actor each, on the nodes of the cluster at "
        "RAY_ADDRESS; slurm: a job each, submitted by sbatch",
    )
    resources: Resources | None = Field(
        None, description="launcher ray: what a server takes of its node, by Ray's names, such as {GPU: 1}; null: a CPU"
    )
    sbatch: list[str] = Field(default_factory=list, description="options of sbatch, such as --partition=gpu")
    seconds: float = Field(600.0, gt=0, le=MAX_SECONDS, description="until a server must have completed one token")
    restarts: int = Field(
        3, ge=0, description="starts in a row, without a push that succeeded, after which a server is given up"
    )

    @model_validator(mode="after")
    def _check_launcher_options(self) -> LaunchConfig:
        for name, launcher in (("resources", "ray"), ("sbatch", "slurm")):
            if getattr(self, name) and self.launcher != launcher:
                raise ValueError(f"{name} is set, which is of launcher {launcher}, and launcher is {self.launcher}")
        return self


class WorkersConfig(StrictModel):
    """Where rewards and agents run."""

    kind: Literal["local", "ray"] = Field(
        "local",
        description="local: rewards in processes of this machine, agents on the trainer's event loop; ray: both in "
        "workers on the nodes of the cluster at RAY_ADDRESS, except rewards that are async",
    )
    rewards: int | None = Field(
        None, ge=1, description="reward processes of each trainer process; null: one a core, at most 8"
    )
    agents: int = Field(8, ge=1, le=4096, description="kind ray: agent workers of each trainer process, each a process")
    runs: int = Field(1, ge=1, le=4096, description="kind ray: runs of an agent at once in one such worker")
    resources: Resources | None = Field(
        None, description="kind ray: what a worker takes of its node, by Ray's names; null: a CPU"
    )

    @model_validator(mode="after")
    def _check_kind_options(self) -> WorkersConfig:
        of_ray = ("agents", "resources", "runs")
        given = [name for name in of_ray if getattr(self, name) != type(self).model_fields[name].default]
        if self.kind == "local" and given:
            raise ValueError(f"{given[0]} is set, which is of kind ray, and kind is local")
        return self
