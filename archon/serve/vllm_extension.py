"""Extension of vLLM's workers that loads weights pushed by archon's trainer.

    PYTHONPATH=<archon's folder> vllm serve … --worker-extension-cls archon.serve.vllm_extension.Extension \
        --weight-transfer-config '{"backend": "archon"}'

The server's environment imports this file and `archon/remote/weight_stream.py`: they need vLLM, torch and safetensors,
and no package of archon's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from archon.remote.weight_stream import receive_tensors

BACKEND = "archon"


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is no connection to open."""


@dataclass
class Checkpoint(WeightTransferUpdateInfo):
    """A Hugging Face checkpoint in a shared directory, or its changes since another one.

    Attributes:
        version: version of the checkpoint, which is kept in memory for later changes; None: it is not kept.
        since: the directory holds only elements that changed since this version.
    """

    folder: str
    version: str | None = None
    since: str | None = None


@dataclass
class Stream(WeightTransferUpdateInfo):
    """A checkpoint that the trainer broadcasts, see `archon.remote.weight_stream`.

    Attributes:
        address, port: rendezvous of the server's `workers` workers.
        backend: `gloo` or `nccl`.
        seconds: time-out of every wait.
    """

    address: str
    port: int
    workers: int
    backend: str
    seconds: float


class Transfer(WeightTransferEngine):
    """Loads checkpoints through vLLM's layerwise reload, which repacks and reshards them as when the server started."""

    init_info_cls, update_info_cls = Nothing, Checkpoint
    _names: set[str] | None = None
    """The parameters that the first checkpoint set."""
    _kept: dict[str, torch.Tensor] | None = None
    """The checkpoint that later changes are of, and its version."""
    _kept_version: str | None = None

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: the folder needs no connection."""
        del init_info

    def start_weight_update(self) -> None:
        """Prepare for new weights."""
        initialize_layerwise_reload(self.model)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Checkpoint | Stream:
        """Return which of the two kinds of update this is."""
        return Stream(**update_dict) if "address" in update_dict else Checkpoint(**update_dict)

    def receive_weights(self, update_info: Checkpoint | Stream) -> None:
        """Load the weights of a checkpoint or stream."""
        if isinstance(update_info, Checkpoint):
            self._load(self._stored(update_info))
            return
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        s = update_info
        stream = receive_tensors(s.address, s.port, rank, s.workers, s.backend, s.seconds, self.device)
        try:
            self._load(stream)
        finally:
            for _ in stream:  # the trainer and the other workers wait for this one
                pass

    def _stored(self, update_info: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors of a directory, merged into the kept checkpoint if they are changes."""
        source = tensors(Path(update_info.folder))
        if update_info.since is not None:
            if self._kept is None or self._kept_version != update_info.since:
                raise ValueError(f"changes since {update_info.since} were pushed, and {self._kept_version} is here")
            patch(self._kept, dict(source))
        elif update_info.version is not None:
            self._kept = {name: tensor.clone() for name, tensor in source}
        if update_info.version is not None and self._kept is not None:
            self._kept_version, source = update_info.version, iter(self._kept.items())
        return source

    def _load(self, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load a whole checkpoint; raise ValueError if its parameters differ from an earlier one."""
        loaded = self.model.load_weights(source)
        if loaded is None:
            return
        if self._names is not None and self._names != loaded:
            # vLLM would keep the old weights of missing tensors, with only a line in its log.
            raise ValueError(f"the checkpoint set {len(loaded)} parameters, and an earlier one {len(self._names)}")
        self._names = set(loaded)

    def finish_weight_update(self) -> None:
        """Finish the update."""
        finalize_layerwise_reload(self.model, self.model_config)
        share_packed_embeddings(self.model)

    def shutdown(self) -> None:
        """Do nothing."""


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of all safetensors files of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no safetensors files; do trainer and server share this directory?")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def patch(checkpoint: dict[str, torch.Tensor], changes: dict[str, torch.Tensor]) -> None:
    """Set the elements NAME.indices of each tensor NAME to NAME.values."""
    for name, tensor in checkpoint.items():
        tensor.view(-1)[changes[f"{name}.indices"].long()] = changes[f"{name}.values"]


def share_packed_embeddings(model: torch.nn.Module) -> None:
    """Let heads of tied embeddings use the packed embedding matrix.

    On a CPU a layer multiplies with a packed copy of its matrix. A reload in vLLM 0.32 packs the embeddings again,
    which need no packing, and leaves the head its old copy.
    """
    packed = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    embeddings = {id(m.weight): m for m in packed if type(m) is VocabParallelEmbedding}
    for head in packed:
        if isinstance(head, ParallelLMHead) and id(head.weight) in embeddings:
            head.cpu_linear = embeddings[id(head.weight)].cpu_linear


class Extension:
    """Base class of vLLM's worker; importing its module has the effects."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
