"""Supervised fine-tuning: next-token cross-entropy on the tokens that the loss mask selects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from archon.checkpoint.tokenizer import load_tokenizer
from archon.data import RowDataset, RowLoader
from archon.data.image_rows import open_reader
from archon.data.images import ImageReader
from archon.data.registry import load_rows
from archon.data.token_rows import row_lengths
from archon.engine.build import require_exportable
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.parallel.layout import parse_layout
from archon.schema.errors import ConfigError
from archon.training.batch_sharding import require_documents, shard_indices
from archon.training.config import SFTConfig
from archon.training.loop import BaseTrainer, require_same_rows, timed
from archon.training.multi_lora import MultiLoRALoader, multi_lora, with_total_steps
from archon.training.python_rows import Rows, config_of_rows
from archon.training.runner import Runner

logger = logging.getLogger(__name__)

TOKEN_COLUMNS = ("input_ids", "chosen_ids", "rejected_ids")


def padded_batch(rows: Sequence[dict[str, Any]], reader: ImageReader | None = None) -> dict[str, Any]:
    """Return SFT rows as a padded batch [B, S] for the engine.

    The batch has the LoRA indices [B] of the rows, if they have any, and the images that `reader` reads.
    """
    width = max(len(row["input_ids"]) for row in rows)

    def column(name: str) -> Tensor:
        return torch.tensor([[*row[name], *[0] * (width - len(row[name]))] for row in rows])

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = torch.arange(width) < lengths.unsqueeze(1)
    batch: dict[str, Any] = {"input_ids": column("input_ids"), "attention_mask": mask, "loss_mask": column("loss_mask")}
    if "lora" in rows[0]:
        batch["lora"] = torch.tensor([row["lora"] for row in rows])
    if reader is not None:
        batch["images"] = [[reader.read(source) for source in row.get("images", ())] for row in rows]
    return batch


Probe = Callable[[ArchonEngine, int], tuple[dict[str, float], bool]]
"""Called with (engine, step) after every step on every rank; returns extra metrics and whether the target is reached.
A reached target ends the run on all ranks."""


class SFTTrainer(BaseTrainer):
    """Supervised fine-tuning of one model: `SFTTrainer(config).train()`.

    Or without a configuration: `SFTTrainer(model="path/to/model", train_dataset=rows, run_dir="runs/x").train()`.

    Args:
        config: the run.
        runner: environment of the run; by default `train` creates and closes one.
        probe: measures extra metrics and can end the run early.
        model: without `config`: checkpoint folder, or fields of the section `model`.
        train_dataset: without `config`: a dataset path, or rows (list, `RowDataset`, Hugging Face dataset).
        eval_dataset: without `config`: held-out rows, as `train_dataset`.
        fields: without `config`: other fields of the configuration, such as `epochs`.
    """

    title = "sft"
    columns: tuple[str, ...] = ("loss", "eval/loss", "token_prob", "grad_norm", "lr", "tokens_per_second")
    config: SFTConfig
    loader: RowLoader | MultiLoRALoader
    held_out: RowDataset | None
    held_out_by_name: Mapping[str, RowDataset]
    """Held-out rows by LoRA name, for multi-LoRA."""
    reader: ImageReader | None = None
    """Reader of images; None for a text model."""

    config_type: type[SFTConfig] = SFTConfig

    def __init__(
        self,
        config: SFTConfig | None = None,
        runner: Runner | None = None,
        probe: Probe | None = None,
        *,
        model: str | Path | Mapping[str, Any] | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        **fields: Any,
    ) -> None:
        datasets = {"train_data": train_dataset, "eval_data": eval_dataset}
        super().__init__(config_of_rows(config, self.config_type, "model", model, datasets, fields), runner)
        self.probe = probe
        self._target_reached = False
        self._loss = CrossEntropyLoss()

    def train(self) -> dict[str, float]:
        """Run to the last step or until a stop signal; return the latest metrics."""
        return self.run(self.config.model, self.opened())

    @property
    def finished(self) -> bool:
        """Whether the last step is done or the target of the probe is reached."""
        return self._target_reached or super().finished

    @contextmanager
    def opened(self) -> Iterator[SFTTrainer]:
        """Context manager around `open`, for `run`."""
        self.open()
        yield self

    def section_rows(self, section: str, tokenizer: Any) -> RowDataset | None:
        """Load the rows of `train_data` or `eval_data`; None if not configured."""
        configured = getattr(self.config, section)
        return load_rows(configured, self.config.data_kind, tokenizer, self.reader) if configured else None

    def open(self) -> None:
        """Load tokenizer, rows and model, and with `resume` the latest checkpoint."""
        config = self.config
        require_exportable(config.model, "model")
        tokenizer = self.tokenizer = load_tokenizer(config.tokenizer or config.model.path, config.model.path)
        self.reader = open_reader(config.model)
        rows = self.section_rows("train_data", tokenizer)
        assert rows is not None  # the configuration requires it
        self.held_out = self.section_rows("eval_data", tokenizer)
        if self.held_out is not None and self.held_out[0] == rows[0]:
            logger.warning("eval_data starts with the first row of train_data; set eval_data.split, or another path")
        for loaded, section in ((rows, config.train_data), (self.held_out, config.eval_data)):
            if loaded is not None:
                require_same_rows(loaded, section.path if section else "the held-out rows")
        ranks = parse_layout(config.model.layout).dp
        require_documents(config.batch_size, ranks, "batch_size")
        require_row_lengths(rows, config.model.max_tokens_per_mb)
        # A run of epochs trains each row equally often; a run of steps has full batches.
        tail: Literal["keep", "wrap"] = "keep" if config.total_steps is None else "wrap"
        self.loader = loader = RowLoader(rows, config.batch_size, seed=config.seed, tail=tail)
        self.held_out_by_name = {}
        self.eval_every = config.eval_every
        self.total_steps = config.total_steps or config.epochs * loader.steps_per_epoch
        if names := multi_lora(config):
            config = self._open_loras(names, rows, tokenizer, ranks, tail)
        self.engine = ArchonEngine(config.resolve().model)
        self.engine.initialize(self.total_steps)
        limit = self.engine.args.max_seq_len
        if beyond := sum(length > limit for length in row_lengths(rows, TOKEN_COLUMNS)):
            logger.warning(
                "%d of %d rows are longer than the model's %d positions; set train_data.max_length=%d to drop them",
                *(beyond, len(rows), limit, limit),
            )
        assert self.runner is not None
        self.engine.stall_watch.folder = self.runner.directory.stacks
        self.resume()

    def _open_loras(
        self, names: Sequence[str], rows: RowDataset, tokenizer: Any, ranks: int, tail: Literal["keep", "wrap"]
    ) -> SFTConfig:
        """Load the rows of every LoRA; return the config with the number of steps of each."""
        config, lora = self.config, self.config.model.lora
        assert lora is not None and lora.loras is not None
        loaders, steps, held_out = dict[str, RowLoader](), dict[str, int](), dict[str, RowDataset]()
        for name in names:
            data, train_rows, size = (config.lora_data or {}).get(name), rows, config.batch_size
            eval_rows = self.held_out
            if data is not None:
                train_rows = load_rows(data.train_data, self.config.data_kind, tokenizer, self.reader)
                eval_rows = None
                if data.eval_data is not None:
                    eval_rows = load_rows(data.eval_data, self.config.data_kind, tokenizer, self.reader)
                    require_same_rows(eval_rows, data.eval_data.path)
                size = data.batch_size or size
                require_same_rows(train_rows, data.train_data.path)
                require_documents(size, ranks, f"lora_data.{name}.batch_size")
                require_row_lengths(train_rows, config.model.max_tokens_per_mb)
            if eval_rows is not None:
                held_out[name] = eval_rows
            loaders[name] = RowLoader(train_rows, size, seed=config.seed, tail=tail)
            run_steps = config.total_steps or config.epochs * loaders[name].steps_per_epoch
            steps[name] = lora.loras[name].total_steps or run_steps
        self.loader, self.held_out_by_name = MultiLoRALoader(loaders, steps), held_out
        self.total_steps = min(config.total_steps or max(steps.values()), max(steps.values()))
        return with_total_steps(config, steps)

    def position(self) -> dict[str, Any]:
        """See `BaseTrainer.position`."""
        return {"rows": self.loader.state_dict(), "enough": self._target_reached}

    def load_position(self, state: dict[str, Any]) -> None:
        """See `BaseTrainer.load_position`."""
        self.loader.load_state_dict(state["rows"])
        self._target_reached = state["enough"]
        if self.config.total_steps is not None:
            return
        if isinstance(self.loader, MultiLoRALoader):
            steps, loaders = self.loader.steps, self.loader.loaders
            positions = [(loader, min(self.step, steps[name])) for name, loader in loaders.items()]
        else:
            positions = [(self.loader, self.step)]
        for loader, step in positions:
            if loader.steps_taken != step:
                raise ConfigError(
                    f"the checkpoint of step {step} was trained with another batch_size than {loader.batch_size}, or "
                    f"with total_steps, so the steps of epochs={self.config.epochs} cannot be counted; keep the batch "
                    "size, or set total_steps"
                )

    def after_step(self) -> dict[str, float]:
        """Return the metrics of the probe."""
        if self.probe is None:
            return {}
        assert self.runner is not None
        measured, reached = self.probe(self.engine, self.step)
        # All ranks must stop together: otherwise the others wait for this rank in their next step.
        self._target_reached = self.runner.world.all_reduce_max(int(reached)) > 0
        return measured

    def train_step(self) -> dict[str, float]:
        """Take an optimizer step on the next rows."""
        seconds: dict[str, float] = {}
        self._mid_update = True
        with timed(seconds, "seconds/step"):
            batch = self._local_batch(self.loader.next_batch())
            metrics = self.engine.train_batch(batch, self._loss, loss_token_count)
            self.engine.step_lr_scheduler()
        return metrics | {"tokens_per_second": metrics["tokens"] / seconds["seconds/step"]} | seconds

    def _local_batch(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the padded documents of this rank."""
        indices = shard_indices([len(row["input_ids"]) for row in rows], self.engine.ranks.dp)
        if not indices:  # the last batch of an epoch has fewer rows than ranks
            return padded_batch([rows[0] | {"loss_mask": [0] * len(rows[0]["loss_mask"])}], self.reader)
        return padded_batch([rows[index] for index in indices], self.reader)

    def evaluate(self) -> dict[str, float]:
        """Return `eval/loss`, the mean over all trained tokens of the held-out rows, and the metrics of the loss.

        Multi-LoRA has metrics per LoRA, such as `eval/NAME/loss`. Without held-out rows the result is {}.
        """
        if not isinstance(self.loader, MultiLoRALoader):
            return {} if self.held_out is None else self._evaluate(self.held_out)
        metrics: dict[str, float] = {}
        for index, name in enumerate(self.loader.loaders):
            rows = [row | {"lora": index} for row in self.held_out_by_name.get(name, [])]
            measured = self._evaluate(rows) if rows else {}
            metrics |= {key: value for key, value in measured.items() if key.startswith(f"eval/{name}/")}
        return metrics

    def _evaluate(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        sums: dict[str, float] = {}
        size = self.config.batch_size
        for start in range(0, len(rows), size):
            batch = self._local_batch(rows[start : start + size])
            measured = self.engine.eval_batch(batch, self._loss, loss_token_count)
            weight = measured.pop("loss_weight")
            sums["weight"] = sums.get("weight", 0.0) + weight
            for name in measured.keys() - {"tokens"}:
                if name.endswith("/loss_weight"):  # of one LoRA
                    continue
                sums[name] = sums.get(name, 0.0) + weight * measured[name]
        weight = sums.pop("weight")
        return {f"eval/{name}": value / weight for name, value in sorted(sums.items())}


def require_row_lengths(rows: Sequence[dict[str, Any]], max_tokens: int) -> None:
    """Raise ConfigError if a training row has more than `max_tokens` tokens, the size of a micro-batch."""
    longest = max(row_lengths(rows, TOKEN_COLUMNS))
    if longest > max_tokens:
        raise ConfigError(
            f"a row of train_data has {longest} tokens, more than model.max_tokens_per_mb = {max_tokens}; raise it, "
            f"or drop long rows with train_data.max_length={max_tokens}"
        )
