"""Advice for folders that are not Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path

_CONVERT = "archon convert {folder} OUT --to hf --like BASE writes its weights"
_MEGATRON = "it is a Megatron-LM checkpoint, which archon cannot read; convert it with Megatron-LM or Megatron-Bridge"
# Kind and advice by glob pattern. The first pattern that matches wins; {match} is its last match, or the folder.
_OTHER_WEIGHTS = {
    "*.gguf": "archon does not read GGUF ({match}); use the model's safetensors, or write them with transformers: "
    "from_pretrained({folder!r}, gguf_file={match!r}) and save_pretrained",
    "zero_to_fp32.py": "it is a DeepSpeed checkpoint; python {folder}/zero_to_fp32.py {folder} OUT "
    "--safe_serialization writes its weights: add config.json and the tokenizer of the base",
    "megatron.json": f"it holds Megatron ranks; {_CONVERT}",
    "mp_rank_*/*.safetensors": f"it holds Megatron ranks; {_CONVERT}",
    "latest_checkpointed_iteration.txt": _MEGATRON,
    "mp_rank_*": _MEGATRON,
    ".metadata": f"it is a torch.distributed checkpoint; {_CONVERT}",
}
_KINDS = {
    "adapter_config.json": "it holds a LoRA, which needs its base: set path to the base and lora.path (--lora) to this "
    "folder, or merge them with archon export {folder} OUT --merge",
    "manifest.json": f"it is a training checkpoint; {_CONVERT}",
    "step-*/manifest.json": f"it holds training checkpoints; {_CONVERT}",
    "export/config.json": "it is a run directory; its export is {folder}/export",
    "export/adapter_config.json": "it is a run directory; its LoRA is {folder}/export",
    "checkpoints/step-*": f"it is a run directory; {_CONVERT.replace('{folder}', '{folder}/checkpoints')}",
    **_OTHER_WEIGHTS,
    "params.json": "its weights have the original format of Llama or Mistral; use the Hugging Face version",
    "checkpoint-*/config.json": "it holds checkpoints of transformers' Trainer; name one, such as {folder}/{match}",
    "*/config.json": "it holds folders of checkpoints; name one, such as {folder}/{match}",
    "*/adapter_config.json": "it holds folders of LoRAs; name one, such as {folder}/{match}",
    "*.safetensors": "it holds weights; copy the model's config.json and tokenizer into it",
    "tokenizer*.json": "it holds only a tokenizer; name the folder of its model",
}


def advice(folder: Path) -> str:
    """Return what a folder without `config.json` holds, and how to use it."""
    return (
        _match(folder, _KINDS) or "expected the folder of a model, with config.json, model.safetensors and a tokenizer"
    )


def advice_on_weights(folder: Path) -> str | None:
    """Return the format of another program's weights next to `config.json`, and how to use them; None without."""
    return _match(folder, _OTHER_WEIGHTS)


def _match(folder: Path, kinds: dict[str, str]) -> str | None:
    for pattern, text in kinds.items():
        if matches := sorted(folder.glob(pattern), key=lambda path: (len(str(path)), path)):
            match = matches[-1].relative_to(folder)
            return text.format(folder=str(folder), match=str(match.parent if "/" in pattern else match))
    return None
