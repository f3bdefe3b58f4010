"""Datasets by name, or any source by the names of its columns.

`register_dataset` names a new dataset; another package names it with an entry point in the group `archon.datasets`, a
dictionary of loaders by kind of row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack, get_args

from archon.checkpoint.chat_template import set_prompt_separator, set_template_variables
from archon.data import image_datasets, named_datasets, pairs, shapes
from archon.data.bad_rows import Policy
from archon.data.config import DatasetConfig, DatasetKind, TrainingDataConfig
from archon.data.encoding import TurnOptions, tokenizer_identity
from archon.data.environments import EnvironmentName, environment_function, parse_environment
from archon.data.formats import ENCODED
from archon.data.images import ImageReader
from archon.data.labeled_answers import labeled_dataset
from archon.data.mapping import encoded_rows, rl_dataset, sft_dataset
from archon.data.rows import RowDataset, row_fingerprint
from archon.data.sources import SourceRow, has_column, has_subsets, local_files, open_rows
from archon.data.token_rows import CACHED_BYTES, cached_rows
from archon.schema.errors import DatasetError, TokenizerError
from archon.schema.registry import NamedObjects
from archon.schema.user_code import user_code

Loader: TypeAlias = Callable[..., Iterable[Mapping[str, Any]]]

_HH_RLHF: dict[str, Loader] = {"dpo": pairs.get_hh_rlhf_dpo_dataset, "rw": pairs.get_hh_rlhf_rw_dataset}
# By the name of a dataset: the function that returns its rows of each kind.
_BUILT_IN: dict[str, dict[str, Loader]] = {
    "arithmetic": {
        "rl": named_datasets.get_arithmetic_rl_dataset,
        "sft": named_datasets.get_arithmetic_sft_dataset,
    },
    "clevr_count_70k": {
        "rl": image_datasets.get_clevr_count_70k_rl_dataset,
        "sft": image_datasets.get_clevr_count_70k_sft_dataset,
    },
    "geometry3k": {
        "rl": image_datasets.get_geometry3k_rl_dataset,
        "sft": image_datasets.get_geometry3k_sft_dataset,
    },
    "gsm8k": {"rl": named_datasets.get_gsm8k_rl_dataset, "sft": named_datasets.get_gsm8k_sft_dataset},
    "hh-rlhf": _HH_RLHF,
    "hh_rlhf": _HH_RLHF,
    "shapes": {"rl": shapes.get_shapes_rl_dataset, "sft": shapes.get_shapes_sft_dataset},
    "torl_data": {"rl": named_datasets.get_torl_data_rl_dataset, "sft": named_datasets.get_torl_data_sft_dataset},
}
_NAMED: NamedObjects[dict[str, Loader]] = NamedObjects("dataset", "archon.datasets", _BUILT_IN)
VALID_DATASETS = _NAMED.names
GENERATED = ("arithmetic", "shapes")
"""Datasets that are made from a seed, and read from no files."""
IMAGE_DATASETS = ("clevr_count_70k", "geometry3k", "shapes")
"""Datasets with images."""
WITH_SUBSETS = ("shapes",)
"""Named datasets with a `subset` option."""


def register_dataset(name: str, kind: DatasetKind) -> Callable[[Loader], Loader]:
    """Register the decorated function as the loader of a dataset's rows of one kind; `path: NAME` then reads it.

    It receives the keyword arguments that its signature names among `path`, `split`, `tokenizer` and `max_length`.
    `path` is `data_dir` of the configuration, by default the dataset's name. It returns rows as dictionaries: a list,
    `RowDataset`, or Hugging Face dataset. SFT rows hold `input_ids` and `loss_mask`.

    Raises:
        DatasetError: the dataset has another loader for this kind.
    """
    if kind not in get_args(DatasetKind):
        raise DatasetError(f"kind is {kind!r}; expected one of {', '.join(get_args(DatasetKind))}")

    def add(loader: Loader) -> Loader:
        loaders = _NAMED.find(name)
        if loaders is None:
            loaders = _NAMED.register(name)({})
        known = loaders.get(kind, loader)
        if (known.__module__, known.__qualname__) != (loader.__module__, loader.__qualname__):
            raise DatasetError(
                f"dataset {name!r} has a loader of {kind} rows already: {known.__module__}.{known.__qualname__}"
            )
        loaders[kind] = loader
        return loader

    return add


def load_rows(
    config: DatasetConfig, kind: DatasetKind, tokenizer: Any, reader: ImageReader | None = None
) -> RowDataset:
    """Return at most `limit` rows of a configured dataset; `reader` is a vision-language model's image reader."""
    turns = _turn_options(config, kind)
    if config.separator is not None and tokenizer is not None:
        set_prompt_separator(tokenizer, config.separator)
    if tokenizer is not None:
        set_template_variables(tokenizer, config.chat_template_kwargs)
    of_tokenizer = {"separator", "chat_template_kwargs"}
    options = config.model_dump(exclude={"limit", *of_tokenizer, *TurnOptions.__dataclass_fields__})
    load = partial(get_custom_dataset, kind=kind, tokenizer=tokenizer, reader=reader, turns=turns, **options)
    if kind == "rl":
        dataset = load()
        return replace(dataset, rows=dataset.rows[: config.limit])
    # A file may move between a run and its resume; everything else that changes encoded rows counts.
    # A field that is newer than runs to resume is left out of the fingerprint while it has its default.
    newer = {"bad_rows"} if config.bad_rows == "refuse" else set()
    fields = config.model_dump(exclude={"path", "data_dir", "limit", *newer})
    recipe = [fields, getattr(tokenizer, "chat_template", None)]
    files = {} if reader is not None or _NAMED.find(config.path) else local_files(config.path)
    if sum(file.stat().st_size for file in files.values()) < CACHED_BYTES:
        dataset = load()
    else:

        def prepare() -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
            prepared = load()
            names = ("name", "n_filtered", "n_skipped", "source_fingerprint")
            return prepared.rows, {name: getattr(prepared, name) for name in names}

        rows, facts = cached_rows(files, [kind, *recipe, tokenizer_identity(tokenizer)], prepare)
        dataset = RowDataset(rows=rows, **facts)
    fingerprint = row_fingerprint([dataset.source_fingerprint, recipe])
    return replace(dataset, rows=dataset.rows[: config.limit], source_fingerprint=fingerprint)


def _turn_options(config: DatasetConfig, kind: DatasetKind) -> TurnOptions | None:
    if not isinstance(config, TrainingDataConfig):
        return None
    if config.long_rows == "truncate" and (kind != "sft" or config.max_length is None):
        raise DatasetError(f"long_rows is 'truncate' for {config.path}; it needs SFT rows and max_length")
    return TurnOptions(**config.model_dump(include={*TurnOptions.__dataclass_fields__}))


class RowOptions(TypedDict, total=False):
    """Options that `get_custom_dataset` passes to the loader of rows.

    Attributes:
        turns: which turns of a conversation are trained, for "sft", "dpo" and "rw".
        bad_rows: "refuse" raises the error of the first row that cannot be used; "skip" leaves such rows out.
    """

    turns: TurnOptions | None
    bad_rows: Policy


def get_custom_dataset(
    path: str | Path,
    *,
    kind: DatasetKind = "rl",
    split: str = "train",
    tokenizer: Any = None,
    prompt_key: str = "prompt",
    response_key: str | None = "response",
    system_prompt: str | None = None,
    instruction: str | None = None,
    max_length: int | None = None,
    subset: str | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
    raw: bool = False,
    reader: ImageReader | None = None,
    **options: Unpack[RowOptions],
) -> RowDataset:
    """Return rows of a named dataset (`VALID_DATASETS`), a JSONL, parquet or Hugging Face dataset, or an environment.

    Args:
        path: a name of `VALID_DATASETS`, or a source of `open_rows`: a file, a pattern of files, a folder, a hub id, a
            function; or an environment's name, for example `reasoning_gym:leg_counting`.
        kind: "rl" rows have `messages`, `prompt`, `answer`; "sft" rows `input_ids`, `loss_mask`; "dpo" and "rw" rows
            ids and masks of a chosen and a rejected answer; "kto" rows of one answer, with `label`.
        split: "train" or "test" for the named datasets.
        tokenizer: required except for "rl" without `max_length`.
        prompt_key: column with the prompt: a string, or a list of messages; a dotted key for a nested column. With the
            defaults of both keys, public formats are recognized, see `recognize`. Not used for named datasets.
        response_key: column with the response, or for "rl" the gold answer. RL rows need none: None adds no
            `answer`. None for "sft": conversations in `prompt_key`; for pairs: in
            the columns `chosen` and `rejected`, which otherwise hold the two answers.
        system_prompt: prepended to conversations without a system message.
        instruction: appended to the last user message. For RL on gsm8k the default asks for a boxed answer.
        max_length: drop longer rows, in tokens: of the full example for "sft", of the prompt for "rl".
        subset: configuration of a hub dataset with several, or kinds of questions of the dataset shapes; not for other
            sources.
        data_dir: directory of a named dataset's files.
        seed: seed of the split of arithmetic and shapes, and of an environment's rows.
        raw: RL rows also hold the source row, under `raw_task`. Rows of a file or a hub dataset without the two columns
            then hold nothing else, and are not dropped by length.
        reader: image reader of a vision-language model: rows keep their images, see `rl_dataset` and `sft_dataset`.
        options: see `RowOptions`.

    Raises:
        DatasetError: missing, empty or malformed data; names the file, the line and the key.
        TokenizerError: no tokenizer where one is required, or one that cannot encode SFT examples.
    """
    if kind not in get_args(DatasetKind):
        raise DatasetError(f"kind is {kind!r}; expected one of {', '.join(get_args(DatasetKind))}")
    if kind != "rl" and tokenizer is None:
        raise TokenizerError(f"{kind.upper()} rows of {path} are token ids: pass a tokenizer")
    if raw and kind != "rl":
        raise DatasetError(f"raw is true, but the rows are of kind {kind!r}; expected 'rl': leave raw out")
    named = _NAMED.find(str(path))
    if data_dir is not None and (named is None or str(path) in GENERATED):
        raise DatasetError(
            f"data_dir is {str(data_dir)!r}, but the dataset is {path}; expected one that is read from files, of "
            f"{', '.join(name for name in VALID_DATASETS if name not in GENERATED)}: leave data_dir out"
        )
    environment = parse_environment(str(path))
    is_source = named is None and environment is None
    if subset is not None and not (is_source and has_subsets(path)) and str(path) not in WITH_SUBSETS:
        raise DatasetError(f"subset is {subset!r}, but {path} is not a Hugging Face dataset; leave subset out")
    shared: dict[str, Any] = {"tokenizer": tokenizer, "max_length": max_length, "system_prompt": system_prompt}
    if instruction is not None:
        shared["instruction"] = instruction
    # Pass only values that differ from the defaults, since a loader may lack the option.
    shared |= {key: value for key, value in options.items() if value not in (None, TurnOptions(), "refuse")}
    if named is not None:
        if data_dir is not None:
            shared["path"] = data_dir
        loaded = _load_named(str(path), kind, named, {"split": split, "seed": seed, "subset": subset, **shared}, reader)
        return replace(loaded, rows=[{**row, "raw_task": row} for row in loaded]) if raw else loaded
    name = f"{path}[{split}]"
    source = open_rows(path, split, subset) if environment is None else _generated(environment, name, split, seed)
    if environment is not None and "prompt" not in source[0].data:
        return _episodes(source, name, kind, {**shared, "raw": raw or None})
    if kind in ("rl", "sft"):
        shared["reader"] = reader
    if raw:
        source = [SourceRow(row.where, {**row.data, "raw_task": row.data}) for row in source]
        if any(key is None or not has_column(row, key) for row in source for key in (prompt_key, response_key)):
            return RowDataset(name, [{"raw_task": row.data["raw_task"]} for row in source])
    if kind in ("dpo", "rw"):
        key = None if response_key is None else prompt_key
        encoded = pairs.pair_dataset(source, name, prompt_key=key, margins=kind == "rw", **shared)
        return replace(encoded, source_fingerprint=row_fingerprint(source, key=lambda row: row.data))
    if kind == "kto":
        encoded = labeled_dataset(source, name, prompt_key=prompt_key, response_key=response_key, **shared)
        return replace(encoded, source_fingerprint=row_fingerprint(source, key=lambda row: row.data))
    if kind == "sft":
        encoded = sft_dataset(source, name, prompt_key=prompt_key, response_key=response_key, **shared)
        return replace(encoded, source_fingerprint=row_fingerprint(source, key=lambda row: row.data))
    return rl_dataset(source, name, prompt_key=prompt_key, response_key=response_key, **shared)


def _generated(environment: EnvironmentName, name: str, split: str, seed: int) -> list[SourceRow]:
    with user_code(f"the environment of {name}", DatasetError):
        rows = environment_function(environment, "rows")(environment, split, seed)
        return [SourceRow(f"{name} row {number}", row) for number, row in enumerate(rows)]


def _episodes(source: Sequence[SourceRow], name: str, kind: DatasetKind, options: Mapping[str, Any]) -> RowDataset:
    """Return rows that only name episodes; raise DatasetError for options that need prompts or answers."""
    if kind != "rl":
        raise DatasetError(f"{name} has episodes to play, and no rows of kind {kind!r}; it is for archon rl")
    for option in ("system_prompt", "instruction", "max_length", "raw"):
        if options.get(option) is not None:
            where = " here, and set it in workflow_args" if option == "system_prompt" else ""
            raise DatasetError(
                f"{option} is {options[option]!r}, but rows of {name} have no prompt, as the environment makes it; "
                f"leave {option} out{where}"
            )
    return RowDataset(name, [row.data for row in source])


def _load_named(
    name: str,
    kind: DatasetKind,
    loaders: Mapping[str, Loader],
    options: dict[str, Any],
    reader: ImageReader | None,
) -> RowDataset:
    """Return the rows of a named dataset. A custom loader receives only the options that its signature names."""
    if kind not in loaders:
        raise DatasetError(f"{name} has no rows of kind {kind!r}; expected {' or '.join(loaders)}")
    if name not in GENERATED:
        del options["seed"]
    if name not in WITH_SUBSETS:
        del options["subset"]
    if name in IMAGE_DATASETS and kind in ("rl", "sft"):
        options["reader"] = reader
    if name in _BUILT_IN:
        rows = loaders[kind](**options)
        assert isinstance(rows, RowDataset)
        return rows
    title = f"{name}[{options['split']}]"
    with user_code(f"the loader of dataset {title}", DatasetError):
        returned = loaders[kind](**_loader_options(name, loaders[kind], {"path": name, **options}))
        source = [SourceRow(f"{title} row {number}", dict(row)) for number, row in enumerate(returned)]
    if not source:
        raise DatasetError(f"the loader of dataset {title} returned no row; expected at least one")
    if kind == "rl":
        return RowDataset(title, [row.data for row in source])
    vocab_size = getattr(options["tokenizer"], "checkpoint_vocab_size", None)
    encoded = encoded_rows(source, vocab_size, (ENCODED,) if kind == "sft" else pairs.ENCODED_PAIR)
    extra: list[dict[str, Any]] = [{} if kind == "sft" else row.data for row in source]
    return RowDataset(title, [others | row for others, row in zip(extra, encoded, strict=True)])


def _loader_options(name: str, loader: Loader, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a loader names. Raises DatasetError for one that is set and that it does not name."""
    accepted = inspect.signature(loader).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        return options
    for option in ("system_prompt", "instruction", "max_length", "turns", "bad_rows"):
        if options.get(option) is not None and option not in accepted:
            raise DatasetError(
                f"{option} is {options[option]!r}, but the loader of dataset {name!r} ({loader.__qualname__}) has no "
                f"such argument; add it there, or leave {option} out"
            )
    return {option: value for option, value in options.items() if option in accepted}
