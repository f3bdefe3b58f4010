"""Configuration of a dataset."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationInfo

from archon.data.sources import has_splits
from archon.schema.config import EXPANDED, StrictModel

DatasetKind = Literal["rl", "sft", "dpo", "rw", "kto"]
"""Kind of rows that a run reads."""


class DatasetConfig(StrictModel):
    """One dataset: a named one, files, or a Hugging Face dataset."""

    path: Annotated[str, EXPANDED] = Field(
        description="a named set (gsm8k, arithmetic, …) | a file (.jsonl, .json, .csv, .parquet, .arrow), a pattern of "
        "files or a folder | a hub id owner/name or owner/name@revision | python:package.module.function, which "
        "returns the rows of a split | an environment, such as reasoning_gym:leg_counting?size=500"
    )
    split: str = Field("train", description="which part of it")
    subset: str | None = Field(
        None, description="configuration of a Hugging Face set that has several | of shapes: count+color"
    )
    data_dir: Annotated[str | None, EXPANDED] = Field(
        None, description="folder of a named set's files; null: the folder of that name in $ARCHON_DATA"
    )
    prompt_key: str = Field(
        "prompt",
        description="column of the prompt, such as question or extra.question; the default also reads messages, "
        "ShareGPT and TRL rows; ignored for named sets",
    )
    response_key: str | None = Field(
        "response",
        description="column of the answer; null: RL rows have none, others hold conversations",
    )
    separator: str | None = Field(
        None, description="text between prompt and answer without a chat template; null: the tokenizer's, else none"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="variables of the chat template, such as enable_thinking; defaults of the exported template",
    )
    system_prompt: str | None = Field(None, description="system message of rows that have none")
    instruction: str | None = Field(
        None, description="text appended to the last user message; null: the default of the named set"
    )
    max_length: int | None = Field(None, ge=1, description="maximum tokens of a row; longer rows are dropped")
    bad_rows: Literal["refuse", "skip"] = Field(
        "refuse",
        description="rows that cannot be used. refuse: the first one is an error; skip: leave them out and count them",
    )
    limit: int | None = Field(None, ge=1, description="use only the first rows, this many")
    seed: int = Field(0, ge=0, lt=2**63, description="of the split of a generated dataset, and of environments")
    raw: bool = Field(False, description="RL rows also hold the unmodified source row, for Trinity-style workflows")


Data = TypeVar("Data", bound=DatasetConfig)


def _hold_out(held_out: Data | None, info: ValidationInfo) -> Data | None:
    """Return `eval_data`, with the split `test` if it has the path of `train_data` and sets no split.

    Raises:
        ValueError: the path has no splits, so the evaluation would read the training rows.
    """
    train = info.data.get("train_data")
    if held_out is None or train is None or held_out.path != train.path or "split" in held_out.model_fields_set:
        return held_out
    if not has_splits(held_out.path):
        raise ValueError(
            f"{held_out.path} is also the path of train_data, so the evaluation would read the training rows; write "
            "held-out rows to another file, or set eval_data.split: train evaluates on the training rows"
        )
    return held_out.model_copy(update={"split": "test"})


HELD_OUT = AfterValidator(_hold_out)
"""Validator of the field `eval_data` in a model that also has `train_data`."""


class TrainingDataConfig(DatasetConfig):
    """A dataset of SFT rows or preference pairs."""

    train_turns: Literal["all", "last"] = Field("all", description="assistant turns that SFT trains")
    stripped_thinking: Literal["mask", "train"] = Field(
        "mask", description="what SFT does with an assistant turn without the thinking that the chat template removes"
    )
    ignore_fields: list[str] = Field(
        default_factory=list, description="fields of messages, and tools, that the chat template may leave out"
    )
    long_rows: Literal["drop", "truncate"] = Field(
        "drop", description="SFT rows longer than max_length: drop them, or cut conversations after a whole turn"
    )
