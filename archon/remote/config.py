"""Configuration of rollouts on inference servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from archon.schema.config import EXPANDED, MAX_SECONDS, StrictModel


class PushConfig(StrictModel):
    """Weight pushes to the inference servers, time-outs, and the monitoring port."""

    transport: Literal["auto", "disk", "delta", "lora", "gloo", "nccl"] = Field(
        "auto",
        description="disk: a checkpoint in a folder that trainer and servers share; delta: only the changed elements "
        "unless they are many (servers keep a copy of the weights); lora: only the LoRA, in PEFT's format; gloo: "
        "broadcast to the servers' workers, without a folder; nccl: the same between GPUs (never run); auto: lora if "
        "the actor has a LoRA, else disk",
    )
    folder: Annotated[str | None, EXPANDED] = Field(
        None, description="the shared folder; null: a folder in shared memory, if all servers are on this machine"
    )
    max_difference: float | None = Field(
        None,
        gt=0,
        description="largest |logprob difference| of a verified push; null: limits on maximum and mean by the servers' "
        "dtype",
    )
    seconds: float = Field(
        600.0,
        gt=0,
        le=MAX_SECONDS,
        description="time-out of each whole request of a push, plus a second for every 100 MB of a pushed folder",
    )
    answer_seconds: float = Field(600.0, gt=0, le=MAX_SECONDS, description="time-out of a whole generation request")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="loopback port of /metrics for Prometheus and of /servers, where servers join and leave the run; "
        "0: any free port; null: none",
    )


Resources = dict[str, Annotated[float, Field(ge=0)]]
"""Amounts by Ray resource name, such as CPU and GPU."""


class LaunchConfig(StrictModel):
    """Inference servers that the run starts, watches, restarts and stops."""

    engine: Literal["archon", "vllm", "sglang"] = Field("archon", description="the server program")
    count: int = Field(1, ge=1, le=1024, description="number of servers")
    args: list[str] = Field(default_factory=list, description="additional arguments of each server's command")
    command: list[str] | None = Field(
        None, description="the program, such as [path/to/vllm, serve]; null: the engine's default command"
    )
    launcher: Literal["local", "ray", "slurm"] = Field(
        "local",
        description="local: processes on this machine; ray: one actor per server in the cluster at RAY_ADDRESS; slurm: "
        "one job per server, submitted by sbatch",
    )
    resources: Resources | None = Field(
        None, description="launcher ray: resources of each server by Ray name, such as {GPU: 1}; null: one CPU"
    )
    sbatch: list[str] = Field(default_factory=list, description="options of sbatch, such as --partition=gpu")
    gpu_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of the trainer's GPU that the server uses while it samples; it sleeps while the trainer "
        "computes. Needs engine vllm, launcher local, count 1 and one trainer process; null: servers have other GPUs",
    )
    seconds: float = Field(600.0, gt=0, le=MAX_SECONDS, description="time-out of a start, until the first token")
    restarts: int = Field(3, ge=0, description="a server is abandoned after this many failed restarts in a row")

    @model_validator(mode="after")
    def _check_launcher_options(self) -> LaunchConfig:
        for name, launcher in (("resources", "ray"), ("sbatch", "slurm")):
            if getattr(self, name) and self.launcher != launcher:
                raise ValueError(f"{name} needs launcher {launcher}, but launcher is {self.launcher}; unset it")
        for name, needed in (("engine", "vllm"), ("launcher", "local"), ("count", 1)):
            if self.gpu_share is not None and (value := getattr(self, name)) != needed:
                raise ValueError(
                    f"gpu_share is {self.gpu_share:g}, which needs {name} {needed}, but {name} is {value}; set {name} "
                    f"to {needed}, or gpu_share to null"
                )
        return self


class WorkersConfig(StrictModel):
    """Placement of rewards and agents."""

    kind: Literal["local", "ray"] = Field(
        "local",
        description="local: rewards in processes on this machine, agents on the trainer's event loop; ray: both in "
        "workers of the cluster at RAY_ADDRESS, except async rewards",
    )
    rewards: int | None = Field(
        None, ge=1, description="reward processes per trainer process; null: one per core, at most 8"
    )
    agents: int = Field(8, ge=1, le=4096, description="kind ray: agent worker processes per trainer process")
    runs: int = Field(1, ge=1, le=4096, description="kind ray: concurrent agent runs per worker")
    resources: Resources | None = Field(
        None, description="kind ray: resources of each worker by Ray name; null: one CPU"
    )

    @model_validator(mode="after")
    def _check_kind_options(self) -> WorkersConfig:
        for name in ("agents", "resources", "runs"):
            if self.kind == "local" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs kind ray, but kind is local; unset it")
        return self
