"""Performance figures of a GPU, its node and its network, from a bundled data sheet or a user's YAML file."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import Field

from archon.schema.config import StrictModel
from archon.schema.errors import ConfigError
from archon.schema.yaml_files import read_yaml

DATA = Path(__file__).with_name("data")


class AttentionRate(StrictModel):
    """Speed of an attention kernel: `flops` · a / (a + `half_keys`) for queries with a mean of `a` attended keys.

    Counts 4 FLOPs per query, key and feature in the forward pass, and 10 in the backward pass, which computes the
    scores again.
    """

    flops: float = Field(gt=0, description="FLOP/s with very many keys per query")
    half_keys: float = Field(0, ge=0, description="keys per query at which the kernel reaches half of `flops`")

    def reached(self, keys: float) -> float:
        """Return the FLOP/s for queries with a mean of `keys` attended keys."""
        return self.flops * keys / (keys + self.half_keys)


class Hardware(StrictModel):
    """GPU model, its kernels and its links; bandwidths are in one direction, per GPU."""

    name: str = Field(min_length=1, description="name of the hardware")
    bf16_flops: float = Field(gt=0, description="dense bfloat16 peak, FLOP/s")
    fp32_flops: float = Field(gt=0, description="float32 peak, FLOP/s")
    fp8_flops: float = Field(0, ge=0, description="dense FP8 peak, FLOP/s; 0: no FP8 matmuls")
    memory_bytes: int = Field(gt=0, description="memory, bytes")
    memory_bandwidth: float = Field(gt=0, description="memory bandwidth, bytes/s")
    gpus_per_node: int = Field(ge=1, description="GPUs joined by the fast link")
    node_bandwidth: float = Field(gt=0, description="bandwidth of the fast link, bytes/s")
    node_latency_s: float = Field(ge=0, description="latency of a collective within a node, seconds")
    network_bandwidth: float = Field(gt=0, description="bandwidth of the network between nodes, bytes/s")
    network_latency_s: float = Field(ge=0, description="latency of a collective across nodes, seconds")
    host_bandwidth: float = Field(
        0, ge=0, description="bandwidth of the link to host memory, bytes/s; 0: unknown, or a CPU"
    )
    reserve_bytes: int = Field(ge=0, description="memory reserved by libraries, bytes")
    fragmentation: float = Field(ge=0, lt=1, description="fraction of a step's allocations lost to fragmentation")
    gemm_efficiency: float = Field(gt=0, le=1, description="fraction of the peak that large matmuls reach")
    grouped_gemm_efficiency: float | None = Field(
        None, gt=0, le=1, description="fraction of the peak that matmuls of experts reach; null: gemm_efficiency"
    )
    fp8_efficiency: float | None = Field(
        None, gt=0, le=1, description="fraction of the FP8 peak that FP8 matmuls reach; null: gemm_efficiency"
    )
    attention: dict[str, AttentionRate] = Field(
        default_factory=dict, description="speed of attention by backend (attn_type); empty: a fraction of the peak"
    )
    head_passes: float = Field(
        6, ge=0, description="reads and writes of the logits [T, V] in the compute dtype, without the head's matmuls"
    )
    launch_s: float = Field(0, ge=0, description="idle time of the GPU between two kernels, seconds")
    memory_efficiency: float = Field(gt=0, le=1, description="fraction of the memory bandwidth that kernels reach")
    link_efficiency: float = Field(gt=0, le=1, description="fraction of a link's bandwidth that collectives reach")

    # Only calibrated CPUs set these: on GPUs the host runs ahead, and every rank has a separate device.
    processors: float = Field(0, ge=0, description="ranks of a node that can run at full speed at once; 0: all")
    overlap: float = Field(1, ge=0, le=1, description="fraction of FSDP and pipeline traffic that computation hides")
    node_latency_per_rank_s: float = Field(0, ge=0, description="added latency of each rank beyond two, seconds")
    layer_overhead_s: float = Field(0, ge=0, description="host time of a layer of a micro-batch, seconds")
    micro_batch_overhead_s: float = Field(0, ge=0, description="host time of a micro-batch outside of layers, seconds")
    shard_overhead_s: float = Field(
        0, ge=0, description="host time of FSDP per gather or reduction of a block, seconds"
    )

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of matmuls in `dtype`."""
        return self.bf16_flops if dtype == "bfloat16" else self.fp32_flops

    def matmul_flops(self, dtype: str, fp8: str) -> float:
        """Return the peak FLOP/s of a block's matmuls, in FP8 unless `fp8` is "none".

        Raises:
            ConfigError: the hardware has no FP8 matmuls.
        """
        if fp8 == "none":
            return self.flops(dtype)
        if not self.fp8_flops:
            raise ConfigError(
                f"fp8 is {fp8}, but {self.name} has no FP8 matmuls (fp8_flops is 0); set fp8 to none or choose another "
                "GPU"
            )
        return self.fp8_flops

    def attention_backend(self, attn_type: str) -> str | None:
        """Return the key of `attention` to use for `attn_type`: the fastest backend for `auto`; None without rates."""
        if attn_type in self.attention:
            return attn_type
        if attn_type == "flash" and "varlen" in self.attention:
            return "varlen"  # both are FlashAttention-2
        return max(self.attention, key=lambda name: self.attention[name].flops, default=None)

    def oversubscription(self, ranks: int) -> float:
        """Return the slowdown of `ranks` that share their nodes' processors; at least 1."""
        in_node = min(ranks, self.gpus_per_node)
        return max(1.0, in_node / self.processors) if self.processors else 1.0

    def to_yaml(self) -> str:
        """Return the text of a file for `read_hardware`."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def known_hardware() -> list[str]:
    """Return the hardware names of `read_hardware`."""
    return sorted(path.stem for path in DATA.glob("*.yaml"))


def read_hardware(name: str) -> Hardware:
    """Return bundled hardware by name, or hardware from a YAML file with every field.

    Raises:
        ConfigError: an unknown name, or a file that is not valid.
    """
    known = name in known_hardware()
    if not known and Path(name).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"gpu is {name!r}; expected one of {', '.join(known_hardware())}, or a .yaml file")
    path = DATA / f"{name}.yaml" if known else Path(name)
    try:
        fields = yaml.safe_load(read_yaml(path))
    except ConfigError:  # a ValueError too
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # huge numbers and deep nesting raise the last two
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{name}: expected fields and their values, got {type(fields).__name__}")
    return Hardware.parse(fields, name)
