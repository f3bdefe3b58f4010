"""Datasets: rows are plain dictionaries; any JSONL, parquet or Hugging Face dataset is read by naming its columns.

An SFT row is `{"input_ids", "loss_mask"}` (lists of int of equal length; 1 where a token is trained). An RL row has
`messages` (for a tokenizer with a chat template), `prompt` (the same as plain text, for one without), `answer`, and the
dataset's other columns, which reward functions get as `**data`.
"""

from archon.schema.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "encoding": ("encode_prompt",),
        "loader": ("RowLoader",),
        "image_datasets": (
            "get_clevr_count_70k_rl_dataset",
            "get_clevr_count_70k_sft_dataset",
            "get_geometry3k_rl_dataset",
            "get_geometry3k_sft_dataset",
        ),
        "mapping": ("rl_dataset", "sft_dataset"),
        "named_datasets": (
            "get_arithmetic_rl_dataset",
            "get_arithmetic_sft_dataset",
            "get_gsm8k_rl_dataset",
            "get_gsm8k_sft_dataset",
            "get_torl_data_rl_dataset",
            "get_torl_data_sft_dataset",
        ),
        "pairs": ("get_hh_rlhf_dpo_dataset", "get_hh_rlhf_rw_dataset", "pair_dataset"),
        "registry": ("VALID_DATASETS", "get_custom_dataset", "register_dataset"),
        "rows": ("RowDataset",),
        "shapes": ("get_shapes_rl_dataset", "get_shapes_sft_dataset"),
        "sources": ("data_folder", "read_rows"),
    },
)
