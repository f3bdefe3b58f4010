"""Seed-OSS (ByteDance Seed 2025): dense decoder with biases on wq, wk and wv, and optionally on wo."""

from dataclasses import dataclass

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import NULLABLE_HEAD_DIM, Field, dense_fields
from archon.models.spec import define_family


@dataclass
class SeedOssModelArgs(BaseModelArgs):
    """Arguments of Seed-OSS, see `BaseModelArgs`."""

    attention_bias: bool = True

    model_types = frozenset({"seed_oss"})
    hf_fields = dense_fields(
        NULLABLE_HEAD_DIM, num_key_value_heads=8, max_position_embeddings=524288, pad_token_id=1
    ) | {
        "head_dim": Field("head_dim", int, 128, null=0),
        "attention_bias": Field("attention_bias", bool, True),
        "attention_out_bias": Field("attention_out_bias", bool, False),
    }


SeedOssModel = BaseArchonModel[SeedOssModelArgs]
SeedOssStateDictAdapter, parallelize_seed_oss, SPEC = define_family("seed_oss", SeedOssModel)
