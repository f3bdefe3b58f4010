"""Training and saved LoRAs: the work of the service's engine thread, without HTTP, queues and clients."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from archon.checkpoint.atomic import publish, staged_folder, sync_tree, undo_replacement, write_errors
from archon.checkpoint.peft.export import LoRAWeights
from archon.checkpoint.peft.reader import read_lora_tensors, read_sizes
from archon.checkpoint.peft.writer import write_lora
from archon.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from archon.checkpoint.tensor_reader import lazy_tensor
from archon.engine import ArchonEngine
from archon.engine.batch import PackedBatch
from archon.engine.lora_pool import AdamStep, LoRAPool
from archon.models.lora.targets import EMBEDDING, HEAD, VISION_PREFIX, LoRASize, lora_matrices
from archon.schema.errors import CheckpointError, UserError
from archon.serve.training.wire import LossRequest, LossResult

Result = TypeVar("Result")

LORA_ALPHA = 32.0
"""LoRA alpha of all models, as in https://thinkingmachines.ai/blog/lora; the SDK has no field for it."""
MAX_RANK = 256
"""Maximum LoRA rank."""
_IDLE = -1
"""Request of a document without a loss."""
ADAPTER, OPTIMIZER = "adapter", "optimizer.safetensors"
"""Parts of a checkpoint: the LoRA in PEFT's format, and the moments of AdamW."""


@dataclass(frozen=True)
class LoRAShape:
    """The LoRA that a client requests, `tinker.types.LoraConfig` without the unembedding."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    seed: int = field(default_factory=lambda: secrets.randbits(31))


class Trainer:
    """LoRAs of one frozen base model by model id. Use it from one thread.

    At most `max_resident` LoRAs are in memory. Before another one enters, the least recently used ones move to files
    with moments and gradients, and they return at their next request.

    Args:
        engine: the engine, which runs the base model.
        base: path or name of the base checkpoint.
        idle: folder of the files, which all ranks see.
        max_resident: maximum LoRAs in memory, and in one batch.
        idle_bytes: maximum bytes of the files.
    """

    def __init__(
        self, engine: ArchonEngine, base: str, idle: Path, max_resident: int = 64, idle_bytes: int = 64 << 30
    ) -> None:
        self._idle, self.max_resident, self._idle_bytes = idle, max_resident, idle_bytes
        self._resident: dict[str, None] = {}  # names of LoRAs in memory, the least recently used first
        self._moved: dict[str, tuple[Mapping[str, LoRASize], int]] = {}  # sizes and bytes of the others
        self.engine, self._base = engine, base
        self._pool = LoRAPool(engine)
        self._names: dict[str, str] = {}  # model id to the LoRA's name, which PyTorch restricts
        self._created = 0

    @property
    def is_main(self) -> bool:
        """True on the rank that answers clients and writes files."""
        return True

    def _agree(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work` once it has succeeded on every rank."""
        return work()

    def close(self) -> None:
        """End the work of other ranks."""

    @property
    def family(self) -> str:
        """The name of the model family."""
        return self.engine.spec.name

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.engine.args.vocab_size

    @property
    def max_tokens(self) -> int:
        """The longest document."""
        return min(self.engine.args.max_seq_len, self.engine.config.max_tokens_per_mb)

    def sizes(self, shape: LoRAShape) -> dict[str, LoRASize]:
        """Return the LoRA sizes by native matrix name.

        Raises:
            UserError: the rank is out of range, or no matrix is trained.
        """
        adapter = self.engine.adapter
        if not 1 <= shape.rank <= MAX_RANK:
            raise UserError(f"LoRA rank {shape.rank}; expected 1 to {MAX_RANK}")
        names = []
        for name in lora_matrices(adapter):
            is_mlp = any(part in ("feed_forward", "moe") for part in name.split("."))
            is_block = not name.startswith((VISION_PREFIX, EMBEDDING, HEAD))
            if is_block and (shape.train_mlp if is_mlp else shape.train_attn):
                names.append(name)
        if not names:
            raise UserError("train_attn and train_mlp are false, so the LoRA has no matrix; set one of them")
        limit = min(max(adapter.native_shapes[name][-2:]) for name in names)
        if shape.rank > limit:
            raise UserError(f"LoRA rank {shape.rank} exceeds a matrix of this model; expected at most {limit}")
        return {name: LoRASize(shape.rank, LORA_ALPHA, rslora=False) for name in names}

    def create(self, model_id: str, shape: LoRAShape) -> None:
        """Add a fresh LoRA."""
        name, sizes = f"lora_{self._created}", self.sizes(shape)
        self._make_room(1, ())
        self._pool.add(name, sizes, shape.seed)
        self._created += 1
        self._names[model_id] = name
        self._resident[name] = None

    def remove(self, model_id: str) -> None:
        """Free the memory of a LoRA; there is no effect for an unknown id."""
        name = self._names.pop(model_id, None)
        if name is None:
            return
        if self._moved.pop(name, None) is not None:
            if self.is_main:
                self._file(name).unlink()
            return
        del self._resident[name]
        self._pool.remove(name)

    def _name(self, model_id: str) -> str:
        """Return the name of a LoRA, which is then in memory."""
        return self._bring([model_id])[0]

    def _bring(self, model_ids: Sequence[str]) -> list[str]:
        """Return the names of at most `max_resident` LoRAs; those on disk return to memory."""
        for model_id in model_ids:
            if model_id not in self._names:
                raise UserError(f"model {model_id} has no weights, because its creation failed; create another")
        names = [self._names[model_id] for model_id in model_ids]
        absent = [name for name in names if name in self._moved]
        self._make_room(len(absent), names)
        for name in absent:

            def read(name: str = name) -> dict[str, Tensor]:
                with SafetensorsFile(self._file(name)) as file:
                    return {key: lazy_tensor(file, entry).read() for key, entry in file.entries.items()}

            self._pool.restore(name, self._moved[name][0], self._agree(read))
            del self._moved[name]
            if self.is_main:
                self._file(name).unlink()
        for name in names:
            self._resident.pop(name, None)
            self._resident[name] = None
        return names

    def _make_room(self, n_loras: int, kept: Collection[str]) -> None:
        """Move LoRAs to disk, except for `kept`, until `n_loras` more fit into memory."""
        excess = len(self._resident) + n_loras - self.max_resident
        for name in [name for name in self._resident if name not in kept][: max(excess, 0)]:
            state, sizes = self._pool.state(name), self._pool[name].sizes
            n_bytes = sum(x.numel() * x.element_size() for x in state.values())
            used = sum(moved for _, moved in self._moved.values())
            if used + n_bytes > self._idle_bytes:
                raise UserError(
                    f"idle models have {used:,} bytes on disk, and this request needs {n_bytes:,} more; expected at "
                    f"most {self._idle_bytes:,}: close some sessions, or raise max_models or disk_gib"
                )

            def write(name: str = name, state: Mapping[str, Tensor] = state) -> None:
                if self.is_main:
                    self._idle.mkdir(parents=True, exist_ok=True)
                    with write_errors(self._file(name)):
                        write_safetensors(self._file(name), state, "export.tensor")

            self._agree(write)
            self._moved[name] = sizes, n_bytes
            del self._resident[name]
            self._pool.remove(name)

    def delete_idle_files(self) -> None:
        """Delete the files that a killed server has left; call it before the first LoRA."""
        shutil.rmtree(self._idle, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._idle / f"{name}.safetensors"

    def run(self, requests: Sequence[tuple[str, LossRequest]]) -> list[LossResult]:
        """Run requests of one kind, each with its model id, as one batch; return their results in order.

        Gradients are added to those of earlier calls. After an error no gradient has changed.
        """
        index = {model_id: number for number, model_id in enumerate(dict.fromkeys(model for model, _ in requests))}
        losses = _RequestLosses([request for _, request in requests])
        dp = self._pool.ranks.dp
        batch = _pack(requests, index, _share([request for _, request in requests], dp.rank, dp.size))
        names = self._bring(list(index))
        self._pool.accumulate(batch, names, losses, backward=requests[0][1].backward)
        return losses.results(self._pool)

    def step(self, model_id: str, settings: AdamStep) -> float:
        """Take an optimizer step; return the norm of the gradient before clipping."""
        return self._pool.step(self._name(model_id), settings)

    def save(self, model_id: str, folder: Path, optimizer: bool) -> int:
        """Write a checkpoint, in place of an earlier one in the folder; return its bytes.

        The folder is complete at every moment, also after a kill.
        """
        name = self._name(model_id)
        if not self.is_main:
            return 0
        folder.parent.mkdir(parents=True, exist_ok=True)
        undo_replacement(folder)
        with write_errors(folder), staged_folder(folder) as staged:
            sizes, weights = self._pool[name].sizes, self._pool.weights(name)
            write_lora(staged / ADAPTER, self.engine.adapter, sizes, weights, base=self._base)
            if optimizer:
                write_safetensors(staged / OPTIMIZER, self._pool.moments(name), "export.tensor")
            sync_tree(staged)
            publish(staged, folder)
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def load(self, model_id: str, folder: Path, optimizer: bool) -> None:
        """Load a checkpoint into a LoRA of the same sizes; without `optimizer` its moments are reset.

        Raises:
            CheckpointError: the LoRA has other sizes, or the checkpoint lacks the moments.
        """
        name, adapter = self._name(model_id), self.engine.adapter

        def read() -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
            sizes = read_sizes(folder / ADAPTER, adapter)
            if sizes != self._pool[name].sizes:
                raise CheckpointError("the checkpoint's LoRA has another rank or other matrices than this model")
            moments: Mapping[str, Tensor] = {}
            if optimizer:
                if not (folder / OPTIMIZER).is_file():
                    raise CheckpointError("the checkpoint has no optimizer state; it was saved for a sampler")
                with SafetensorsFile(folder / OPTIMIZER) as file:
                    moments = {key: lazy_tensor(file, entry).read() for key, entry in file.entries.items()}
            return read_lora_tensors(folder / ADAPTER, adapter, sizes), moments

        self._pool.load(name, *self._agree(read))

    def read(self, folder: Path) -> LoRAWeights:
        """Read the LoRA of a checkpoint; any thread may call it."""
        sizes = read_sizes(folder / ADAPTER, self.engine.adapter)
        return LoRAWeights(sizes, read_lora_tensors(folder / ADAPTER, self.engine.adapter, sizes))


class _RequestLosses:
    """Loss function of a batch with documents of several requests; collects the results of each document."""

    needs_entropy = False

    def __init__(self, requests: Sequence[LossRequest]) -> None:
        self._requests = requests
        self._logprobs: dict[tuple[int, int], Tensor] = {}
        self._losses: dict[tuple[int, int], Tensor] = {}

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> Tensor:
        """Return the summed loss of the documents; the copies of a document with several targets are adjacent."""
        total = logprobs.new_zeros(())
        rows = logprobs.split(mb.lengths)
        documents = zip(mb["request"].tolist(), mb["datum"].tolist(), mb["target"].tolist(), rows, strict=True)
        columns: dict[tuple[int, int], dict[int, Tensor]] = {}
        for request, datum, target, values in documents:
            if request == _IDLE:
                total = total + 0 * values.sum()
                continue
            columns.setdefault((request, datum), {})[target] = values
        for (request, number), values in columns.items():
            entry = self._requests[request]
            datum = entry.data[number]
            targets = sorted(values)
            score = torch.stack([values[target] for target in targets], dim=-1)
            inputs = {key: x.view(len(x), -1)[:, targets].to(score) for key, x in datum.inputs.items()}
            loss = entry.loss.fn(score, inputs, entry.settings)
            total = total + loss.sum()
            self._keep(self._logprobs, (request, number), score, targets)
            self._keep(self._losses, (request, number), loss, targets)
        return total

    def _keep(self, kept: dict[tuple[int, int], Tensor], key: tuple[int, int], x: Tensor, targets: list[int]) -> None:
        """Store columns [N, len(targets)] of a document; a micro-batch may hold only some of them."""
        datum = self._requests[key[0]].data[key[1]]
        if key not in kept:
            kept[key] = torch.zeros(len(datum.tokens), datum.copies)
        kept[key][:, targets] = x.detach().float().cpu()

    def results(self, pool: LoRAPool) -> list[LossResult]:
        """Return the results of all requests in order, from all ranks."""
        self._exchange(pool)
        results = []
        for index, request in enumerate(self._requests):
            shapes = [datum.targets.shape for datum in request.data]
            columns = (
                [kept[index, number].view(shape) for number, shape in enumerate(shapes)]
                for kept in (self._logprobs, self._losses)
            )
            results.append(LossResult(*columns))
        return results

    def _exchange(self, pool: LoRAPool) -> None:
        """Add the results of the other ranks; each rank has the results of its own documents."""
        if pool.world_size == 1:
            return
        shapes = {
            (number, place): (len(datum.tokens), datum.copies)
            for number, request in enumerate(self._requests)
            for place, datum in enumerate(request.data)
        }
        kept = (self._logprobs, self._losses)
        known = [values if pool.reports else {} for values in kept]
        columns = [values.get(key, torch.zeros(shape)) for values in known for key, shape in shapes.items()]
        flat = pool.sum_over_ranks(torch.cat([column.flatten() for column in columns]))
        parts = iter(flat.split([column.numel() for column in columns]))
        for values in kept:
            values.update({key: next(parts).view(shape) for key, shape in shapes.items()})


def _share(requests: Sequence[LossRequest], rank: int, size: int) -> list[tuple[int, int]]:
    """Return (request, datum) of the documents of one of `size` data-parallel ranks, with about equal tokens."""
    places = [(number, place) for number, request in enumerate(requests) for place in range(len(request.data))]
    if size == 1:
        return places

    def n_tokens(place: tuple[int, int]) -> int:
        datum = requests[place[0]].data[place[1]]
        return len(datum.tokens) * datum.copies

    loads, shares = [0] * size, [list[tuple[int, int]]() for _ in range(size)]
    for place in sorted(places, key=n_tokens, reverse=True):
        least = loads.index(min(loads))
        loads[least] += n_tokens(place)
        shares[least].append(place)
    return sorted(shares[rank])


def _pack(
    requests: Sequence[tuple[str, LossRequest]], index: Mapping[str, int], places: Sequence[tuple[int, int]]
) -> PackedBatch:
    """Return the documents at `places`; a position with K targets becomes K documents with a shared prefix.

    A rank without documents gets the first one, without a loss: it takes part in the collectives of the others.
    """
    tokens, labels, columns = list[Tensor](), list[Tensor](), list[tuple[int, int, int, int]]()
    for number, place in places or [(0, 0)]:
        model_id, request = requests[number]
        datum = request.data[place]
        for target, targets in enumerate(datum.targets.view(len(datum.tokens), -1).unbind(1)):
            tokens.append(datum.tokens)
            labels.append(targets)
            columns.append((index[model_id], number if places else _IDLE, place, target))
    lengths = tuple(map(len, tokens))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.tensor(columns).unbind(1)
    fields = dict(zip(("lora", "request", "datum", "target"), values, strict=True))
    return PackedBatch(
        tokens=torch.cat(tokens),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        labels=torch.cat(labels),
        cu_seqlens=bounds.int(),
        max_seqlen=max(lengths),
        lengths=lengths,
        fields={**fields, "loss_mask": torch.ones(int(bounds[-1]))},
        per_document=frozenset(fields),
        source=torch.arange(int(bounds[-1])),
    )
