"""Configuration of `archon eval`."""

from __future__ import annotations

from pydantic import Field, model_validator

from archon.data.config import DatasetConfig
from archon.schema.config import MAX_SECONDS, ComputeDtype, StrictModel


class EvalDataConfig(DatasetConfig):
    """The rows to answer."""

    split: str = Field("test", description="which part of it")


class EvalConfig(StrictModel):
    """What is asked, how answers are sampled and scored, and who answers."""

    data: EvalDataConfig = Field(description="the rows to answer; also --data PATH")
    reward: str = Field(description="name or dotted path of the reward function; also --reward")
    n: int = Field(1, ge=1, le=2**20, description="answers a prompt; also --n")
    k: list[int] = Field(
        default_factory=list, description="numbers of answers for pass@k, at most n; empty: 1, 2, 4, … and n"
    )
    pass_threshold: float = Field(1.0, description="least reward of a right answer, for pass@k")
    temperature: float = Field(1.0, ge=0, description="0 is the most likely answer; also --temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the smallest set of tokens with this probability")
    max_new_tokens: int = Field(512, ge=1, description="maximum tokens of an answer")
    seed: int | None = Field(0, ge=0, lt=2**63, description="of all answers; null: none is sent to an endpoint")
    reward_timeout: float = Field(15.0, gt=0, le=MAX_SECONDS, description="seconds one reward may run")
    reward_workers: int | None = Field(None, ge=1, description="reward processes; null: one a core, at most 8")
    max_concurrent: int = Field(32, ge=1, le=2**20, description="answers at once")
    tokenizer: str | None = Field(None, description="tokenizer folder; null: the checkpoint's")
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N, for a checkpoint")
    dtype: ComputeDtype = Field("float32", description="of a checkpoint's weights and key-value cache")
    max_tokens: int | None = Field(None, ge=2, description="prompt and answer together; null: the model's limit")

    @model_validator(mode="after")
    def _check_counts(self) -> EvalConfig:
        if wrong := [k for k in self.k if not 1 <= k <= self.n]:
            raise ValueError(f"k: got {wrong[0]}, expected 1 to n = {self.n}, the number of answers to a prompt")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"temperature is 0, so that all n = {self.n} answers are the same; set n=1")
        return self

    @property
    def ks(self) -> list[int]:
        """Returns the numbers of answers for which pass@k is reported."""
        powers = [2**i for i in range(self.n.bit_length())]
        return sorted({*(self.k or [*powers, self.n])})
