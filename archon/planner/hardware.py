"""What a GPU, its node and its network can do: data sheets as files, and the reader of a user's own."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from archon.schema.config import StrictModel
from archon.schema.errors import ConfigError


class Hardware(StrictModel):
    """One kind of GPU and how many of them are joined. Bandwidths are those of one direction, for one GPU."""

    name: str = Field(min_length=1, description="what it is called")
    bf16_flops: float = Field(gt=0, description="dense bfloat16 peak, FLOP/s")
    fp32_flops: float = Field(gt=0, description="float32 peak, FLOP/s")
    memory_bytes: int = Field(gt=0, description="memory, bytes")
    memory_bandwidth: float = Field(gt=0, description="of the memory, bytes/s")
    gpus_per_node: int = Field(ge=1, description="GPUs that the fast link joins")
    node_bandwidth: float = Field(gt=0, description="of the fast link, bytes/s")
    node_latency_s: float = Field(ge=0, description="of a collective within a node, seconds")
    network_bandwidth: float = Field(gt=0, description="of the network between nodes, bytes/s")
    network_latency_s: float = Field(ge=0, description="of a collective across nodes, seconds")
    reserve_bytes: int = Field(ge=0, description="memory that libraries keep for themselves, bytes")
    fragmentation: float = Field(ge=0, lt=1, description="share of a step's allocations that is lost to fragments")
    gemm_efficiency: float = Field(gt=0, le=1, description="share of the peak that large matrix products reach")
    memory_efficiency: float = Field(gt=0, le=1, description="share of the memory bandwidth that work reaches")
    link_efficiency: float = Field(gt=0, le=1, description="share of a link's bandwidth that collectives reach")

    # What a GPU's file leaves out: there the host keeps ahead of the device, and a rank has a device of its own.
    processors: float = Field(
        0, ge=0, description="ranks of a node that run at full speed beside one another, more share it; 0: all of them"
    )
    overlap: float = Field(
        1, ge=0, le=1, description="share of the traffic of weights and stages that runs beside computation"
    )
    node_latency_per_rank_s: float = Field(
        0, ge=0, description="what each rank beyond the second adds to node_latency_s, seconds"
    )
    layer_overhead_s: float = Field(
        0, ge=0, description="of the host, for a layer of a micro-batch forward and backward, seconds"
    )
    micro_batch_overhead_s: float = Field(
        0, ge=0, description="of the host, for embedding, head and loss of a micro-batch, seconds"
    )
    shard_overhead_s: float = Field(
        0, ge=0, description="of the host, for gathering or sharing out a block beside the collective, seconds"
    )

    def flops(self, dtype: str) -> float:
        """The peak of products in `dtype`, FLOP/s."""
        return self.bf16_flops if dtype == "bfloat16" else self.fp32_flops

    def crowding(self, ranks: int) -> float:
        """How many times longer work takes when each of `ranks` does some."""
        beside = min(ranks, self.gpus_per_node)
        return max(1.0, beside / self.processors) if self.processors else 1.0

    def to_yaml(self) -> str:
        """The text of a file that `read_hardware` reads back."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def known_hardware() -> list[str]:
    """The names that `read_hardware` knows."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _data().iterdir() if entry.name.endswith(".yaml"))


def read_hardware(name: str) -> Hardware:
    """A known name, or the path of a YAML file with every field; ConfigError says what is wrong with it."""
    if name in known_hardware():
        return Hardware.parse(_mapping((_data() / f"{name}.yaml").read_text(), name), name)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"gpu is {name!r}; expected one of {', '.join(known_hardware())}, or a .yaml file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not a text file; expected YAML") from None
    return Hardware.parse(_mapping(text, name), name)


def _data() -> Any:
    return files("archon.planner") / "data"


def _mapping(text: str, source: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, brackets without end
        raise ConfigError(f"{source}: not YAML that can be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: expected fields and their values, got {type(found).__name__}")
    return found
