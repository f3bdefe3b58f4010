"""Configuration of a run from a model and rows in Python, as TRL's trainers take them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from archon.checkpoint.atomic import write_synced
from archon.data.sources import without_nulls
from archon.schema.config import StrictModel, expand_path
from archon.schema.errors import ConfigError, DatasetError

Config = TypeVar("Config", bound=StrictModel)
Rows: TypeAlias = str | Path | Iterable[Mapping[str, Any]]
"""A dataset path, or rows: a list, a `RowDataset` or a Hugging Face dataset."""

_TRL_NAMES = {
    "args": "the fields of the configuration as arguments, such as batch_size=8",
    "learning_rate": "model.optimizer.lr: model={'path': 'path/to/model', 'optimizer': {'lr': 1e-5}}",
    "num_train_epochs": "epochs=1",
    "output_dir": "run_dir='runs/x'",
    "peft_config": "model.lora: model={'path': 'path/to/model', 'lora': {'rank': 16}}",
    "per_device_train_batch_size": "batch_size=32, the rows of a step over all processes",
    "processing_class": "tokenizer='path/to/tokenizer'",
    "reward_funcs": "reward=function",
}


def config_of_rows(
    config: Config | None,
    config_type: type[Config],
    section: str,
    model: str | Path | Mapping[str, Any] | None,
    datasets: Mapping[str, Rows | None],
    fields: Mapping[str, Any],
) -> Config:
    """Return the configuration of a run. Rows are written to `RUN_DIR/data`, so that the run can be resumed.

    Args:
        config: the configuration, if the caller has one; the other arguments are then None or empty.
        config_type: type of the configuration.
        section: its field of the model.
        model: checkpoint folder, or fields of `EngineConfig`.
        datasets: dataset by section, `train_data` and `eval_data`.
        fields: other fields of the configuration.
    """
    for name in sorted(fields.keys() & _TRL_NAMES.keys()):
        raise ConfigError(f"unknown argument {name!r}; pass {_TRL_NAMES[name]}")
    is_empty = model is None and not fields and all(rows is None for rows in datasets.values())
    if config is not None and is_empty:
        return config
    if config is not None or model is None or datasets["train_data"] is None or "run_dir" not in fields:
        raise ConfigError(
            f"pass either a {config_type.__name__}, or model, train_dataset and run_dir: model='path/to/model', "
            "train_dataset=rows, run_dir='runs/x'"
        )
    paths = {"model": model, "tokenizer": fields.get("tokenizer")}
    for name, path in paths.items():
        if not isinstance(path, str | Path | Mapping | None):
            raise ConfigError(
                f"{name} is an object of type {type(path).__name__}; expected a folder: save it with save_pretrained, "
                f"and pass {name}='path/to/folder'"
            )
    # Rows are written before the configuration is validated, which also expands this path.
    values = {**fields, "run_dir": expand_path(fields["run_dir"])}
    values[section] = dict(model) if isinstance(model, Mapping) else {"path": str(model)}
    for name, rows in datasets.items():
        if rows is None:
            continue
        path = str(rows) if isinstance(rows, str | Path) else _write(Path(values["run_dir"]), name, rows)
        values[name] = {**values.get(name, {}), "path": path}
    return config_type.parse(values)


def _write(run_dir: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    if isinstance(rows, Mapping):
        raise DatasetError(
            f"{name} is a {type(rows).__name__} with keys {', '.join(map(str, rows))}; expected rows: pass one split, "
            f"such as dataset[{next(iter(rows), 'train')!r}]"
        )
    is_arrow = type(rows).__module__.partition(".")[0] == "datasets"
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(without_nulls(row) if is_arrow else dict(row), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"row {number} of {name} cannot be written as JSON: {error}; expected strings, numbers, lists and "
                f"mappings: save other rows to a file, and pass its path"
            ) from None
    if not lines:
        raise DatasetError(f"the dataset of {name} is empty; expected at least one row")
    text = "\n".join(lines) + "\n"
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    file = run_dir / "data" / f"{name}-{digest}.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")  # every rank writes the rows
        write_synced(partial, text)
        partial.replace(file)
    return str(file)
