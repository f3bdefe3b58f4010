"""Configuration of `archon eval`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from archon.data.config import DatasetConfig
from archon.schema.config import EXPANDED, MAX_SAMPLES, MAX_SECONDS, ComputeDtype, StrictModel


class EvalDataConfig(DatasetConfig):
    """Dataset of the prompts."""

    split: str = Field("test", description="split of the dataset")


class EvalConfig(StrictModel):
    """Prompts, sampling, scoring and model of an evaluation."""

    data: EvalDataConfig = Field(description="dataset of the prompts; also --data PATH")
    reward: str = Field(description="name or dotted path of the reward function; also --reward")
    n: int = Field(1, ge=1, le=MAX_SAMPLES, description="answers per prompt; also --n")
    k: list[int] = Field(default_factory=list, description="values of k for pass@k, at most n; empty: 1, 2, 4, … and n")
    pass_threshold: float = Field(1.0, description="minimum reward of a correct answer, for pass@k")
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy; also --temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the smallest set of tokens with this probability")
    max_new_tokens: int = Field(512, ge=1, description="maximum tokens of an answer")
    seed: int | None = Field(0, ge=0, lt=2**63, description="sampling seed; null: endpoints receive none")
    reward_timeout: float = Field(15.0, gt=0, le=MAX_SECONDS, description="timeout of one reward, in seconds")
    reward_workers: int | None = Field(None, ge=1, description="reward processes; null: one per core, at most 8")
    max_concurrent: int = Field(32, ge=1, le=2**20, description="answers generated concurrently")
    tokenizer: Annotated[str | None, EXPANDED] = Field(
        None, description="tokenizer folder; null: the checkpoint's, or none with --url"
    )
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N, for a checkpoint")
    dtype: ComputeDtype = Field("float32", description="dtype of the weights and the KV cache, for a checkpoint")
    max_tokens: int | None = Field(None, ge=2, description="maximum prompt plus answer tokens; null: the model's limit")

    @model_validator(mode="after")
    def _check_counts(self) -> EvalConfig:
        if invalid := [k for k in self.k if not 1 <= k <= self.n]:
            raise ValueError(f"k: got {invalid[0]}, expected 1 to n = {self.n}, the number of answers to a prompt")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"temperature is 0, so all n = {self.n} answers are the same; set n=1")
        return self

    @property
    def ks(self) -> list[int]:
        """Values of k for pass@k."""
        powers = [2**i for i in range(self.n.bit_length())]
        return sorted({*(self.k or [*powers, self.n])})
