"""Rows for the second LoRA of multi_lora.yaml: a number plus itself."""


def rows(split):
    """Yield prompts and responses."""
    for number in range(100) if split == "train" else range(100, 120):
        yield {"prompt": f"{number}+{number}=", "response": str(2 * number)}
