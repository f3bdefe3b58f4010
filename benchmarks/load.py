"""Load a checkpoint, side by side: 2.43 GB of bfloat16 in four shards, with a warm page cache.

`archon.load_model` against transformers' `from_pretrained` and torch.distributed.checkpoint's Hugging Face reader, in
bfloat16 and into float32. Every side builds its model and touches every byte, because transformers maps the file and
defers the cost to the first use. `trained` reads and writes each byte, like the first optimizer step; `read` only
reads, like inference. Another run watches anonymous memory above the model size from outside. An extra side reads no
file and only allocates the model's memory: the lower bound of any loader that copies weights.

    python -m benchmarks.load
    python -m benchmarks.load --case float32 --quick
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from archon.tools.bench.origin import spread
from benchmarks import harness
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.harness import Sides, say

ARCHON, TRANSFORMERS, DCP = "archon", "transformers", "torch.distributed.checkpoint"
MEMORY = "memory alone, nothing read"
AIMS = {"bfloat16": "<= 0.4", "float32": "<= 0.65"}


def prepare(side: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[[str], dict[str, Any]]]:
    """Load once and hash every tensor; the parent compares the hashes by Hugging Face name."""
    load = {ARCHON: load_archon, TRANSFORMERS: load_transformers, DCP: load_dcp, MEMORY: load_nothing}[side]

    def run(touch: str) -> dict[str, Any]:
        start = time.perf_counter()
        model = load(options)
        TOUCH[touch](model)
        seconds = time.perf_counter() - start
        del model
        return {"seconds": seconds}

    model = load(options)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    hashes = {name: digest(tensor) for name, tensor in hf_named(side, model, options) if side != MEMORY}
    del model
    return {"hashes": hashes, "model_bytes": size, "largest_tensor_bytes": largest}, run


def load_archon(options: dict[str, Any]) -> Any:
    """archon.load_model."""
    import torch

    from archon import load_model

    return load_model(options["checkpoint"], dtype=getattr(torch, options["dtype"]))


def load_transformers(options: dict[str, Any]) -> Any:
    """from_pretrained with its defaults and the dtype asked for."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(options["checkpoint"], dtype=getattr(torch, options["dtype"]))


def load_dcp(options: dict[str, Any]) -> Any:
    """transformers' model on the meta device, then allocated, then filled by the reader, one thread a core."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    model = allocated(options)
    state = dict(model.named_parameters())
    dcp.load(state, storage_reader=HuggingFaceStorageReader(options["checkpoint"], thread_count=options["threads"]))
    return model


def load_nothing(options: dict[str, Any]) -> Any:
    """Allocate the same model and touches each page, with as many threads as archon reads with."""
    from archon.checkpoint.hf_reader import READERS
    from archon.checkpoint.tensor_reader import prefault

    model = allocated(options)
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(prefault, model.parameters()):
            pass
    return model


def allocated(options: dict[str, Any]) -> Any:
    """transformers' model with memory and no values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(options["checkpoint"])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options["dtype"]))
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


def bits(model: Any) -> Iterator[Any]:
    """Return every parameter's memory as integers."""
    import torch

    for parameter in model.parameters():
        flat = parameter.detach().flatten()
        yield flat.view(torch.int64 if flat.nbytes % 8 == 0 else torch.int16)


def read_all(model: Any) -> None:
    """Read every byte, at the speed of memory."""
    for integers in bits(model):
        integers.sum()


def write_all(model: Any) -> None:
    """Read and rewrite every byte unchanged, so that file-backed memory becomes private."""
    for integers in bits(model):
        integers.add_(0)


TOUCH = {"trained": write_all, "read": read_all}


def hf_named(side: str, model: Any, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, tensor) of every parameter."""
    if side != ARCHON:
        yield from model.named_parameters()
        return
    from archon.models import get_model_spec
    from benchmarks.peer_models import hf_config

    config = hf_config(options["checkpoint"])
    adapter = get_model_spec(config["model_type"]).state_dict_adapter_class(config)
    yield from adapter.export(model.named_parameters())


def digest(tensor: Any) -> str:
    """Hash of a tensor's bits."""
    import torch

    return hashlib.blake2b(tensor.detach().contiguous().view(torch.uint8).numpy(), digest_size=16).hexdigest()


def measure(dtype: str, options: dict[str, Any], rounds: int, keep: bool) -> None:
    """Measure one dtype: checks for equal weights, then measures anonymous memory and time."""
    say(f"load.{dtype}: {options['model']} in {options['shards']} shards")
    record = harness.new_record("load", dtype, options["threads"])
    record.setup = {
        "model": shape(options["model"]),
        "file_dtype": "bfloat16",
        "dtype": dtype,
        "shards": options["shards"],
    }
    record.notes.append("page cache warm; every side reads every byte of the model it has loaded")
    with Sides("benchmarks.load", [ARCHON, TRANSFORMERS, DCP, MEMORY], {**options, "dtype": dtype}) as sides:
        theirs = {name: sides.facts(name)["hashes"] for name in sides.workers if name not in (ARCHON, MEMORY)}
        record.checks += harness.check_same("hashes of all weights", sides.facts(ARCHON)["hashes"], theirs)
        beyond = {
            name: anonymous_beyond(worker, sides.facts(name))
            for name, worker in sides.workers.items()
            if name != MEMORY
        }
        largest = sides.facts(ARCHON)["largest_tensor_bytes"] / 1e9
        record.setup |= {key: sides.facts(ARCHON)[key] for key in ("model_bytes", "largest_tensor_bytes")}
        runs = {touch: sides.alternate(rounds, touch=touch) for touch in TOUCH}
    for touch, results in runs.items():
        seconds = {side: [run["seconds"] for run in results[side]] for side in results}
        for side, values in seconds.items():
            record.sides[f"{side}, {touch}"] = spread(values, "s", results[side])
            if side == MEMORY and TRANSFORMERS in seconds:
                record.ratios[f"{side} / {TRANSFORMERS}, time until {touch}"] = harness.ratio(
                    values, seconds[TRANSFORMERS]
                )
            elif side not in (ARCHON, MEMORY):
                aim = AIMS[dtype] if side == TRANSFORMERS and touch == "trained" else None
                record.ratios[f"archon / {side}, time until {touch}"] = harness.ratio(seconds[ARCHON], values, aim)
    for side, values in beyond.items():
        record.sides[f"{side}, anonymous memory above the model size"] = spread(values, "GB")
    peaks = [max(value, 0.0) for value in beyond[ARCHON]]
    record.ratios["peak anonymous memory above the model size / largest tensor"] = harness.ratio(
        peaks, [largest] * len(peaks), "<= 1"
    )
    record.missing = sides.missing
    harness.finish(record, keep)


def anonymous_beyond(worker: harness.Worker, facts: dict[str, Any]) -> list[float]:
    """Measure gigabytes of anonymous memory above the model size at the peak of a load, three times."""
    return [(worker.run_watched(touch="read")["anonymous_peak_bytes"] - facts["model_bytes"]) / 1e9 for _ in range(3)]


def main() -> None:
    """Parse, make the checkpoint, measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=list(AIMS), help="one dtype only")
    arguments = parser.parse_args()
    if arguments.worker:
        return harness.serve(prepare, arguments.worker)
    model, shards = ("tiny", 1) if arguments.quick else ("2.43GB", 4)
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder), model, dtype="bfloat16", shards=shards)
        files = sorted(made.glob("*.safetensors"))
        for file in files:
            file.read_bytes()  # warm the page cache
        options = {"threads": arguments.threads, "checkpoint": str(made), "model": model, "shards": len(files)}
        for dtype in [arguments.case] if arguments.case else AIMS:
            measure(dtype, options, arguments.rounds, not (arguments.quick or arguments.no_record))
    return None


if __name__ == "__main__":
    main()
