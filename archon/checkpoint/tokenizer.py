"""Load the tokenizer of a checkpoint, and write it into an export with the ids that end an answer."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

from archon.checkpoint.atomic import publish, staged_folder, sync_tree, write_errors, write_json
from archon.checkpoint.chat_template import SEPARATOR, prompt_separator, stop_token_ids
from archon.checkpoint.hf_reader import read_json
from archon.checkpoint.hub import CONFIG_FILE, CONFIG_FILES, checkpoint_folder, model_folder
from archon.checkpoint.native import find_checkpoint
from archon.checkpoint.template_sandbox import bounded_chat_template
from archon.schema.errors import CheckpointError, TokenizerError
from archon.schema.files import TOKENIZER_BYTES, require_regular_files

GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Tokenizer files of transformers.
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
RUN_TOKENIZER = "tokenizer"
"""Folder of a run's tokenizer, next to its native checkpoints."""
# The chat templates of a tokenizer that has several, by name; the default one is in chat_template.jinja.
NAMED_TEMPLATES = "additional_chat_templates"


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder has the vocabulary of a tokenizer; without one transformers builds an empty one."""
    return any((Path(folder) / name).is_file() for name in VOCABULARY_FILES)


def load_tokenizer(path: str | os.PathLike[str], model_path: str | os.PathLike[str] | None = None) -> Any:
    """Load a tokenizer with `apply_chat_template(tokenize=True)` returning a plain list of ids.

    transformers 5 returns a mapping by default, while workflows of other RL frameworks expect a list.

    Args:
        path: folder of the tokenizer.
        model_path: folder of the model if it is another one. The generation config of both, or else the model config,
            names ids that end an answer; see `stop_token_ids`.

    Raises:
        TokenizerError: the folder has no tokenizer, its tokenizer has no end-of-text token, or an id that ends an
            answer is outside the model's vocabulary.
    """
    folder = model_folder(path, CONFIG_FILES)
    if not folder.is_dir():
        raise TokenizerError(f"{folder}: no such folder; expected one with a tokenizer")
    require_regular_files(folder, TOKENIZER_FILES, TOKENIZER_BYTES, TokenizerError)
    if not has_tokenizer(folder):
        raise TokenizerError(f"{folder}: it holds no tokenizer (no tokenizer.json); copy the tokenizer's files there")
    # Imported here because importing transformers takes seconds.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = _damaged_file(folder) or " ".join(str(error).split())[:200]
        raise TokenizerError(
            f"{folder}: its tokenizer cannot be loaded ({reason}); copy the tokenizer's files again from their source"
        ) from error
    if tokenizer.eos_token_id is None:
        raise TokenizerError(
            f"{folder}: its tokenizer has no end-of-text token to end an answer with; set eos_token in its config"
        )
    # Code of a workflow calls it itself.
    tokenizer.apply_chat_template = functools.partial(
        bounded_chat_template(tokenizer.apply_chat_template), return_dict=False
    )
    folders = dict.fromkeys([folder, folder if model_path is None else model_folder(model_path, CONFIG_FILES)])
    tokenizer.checkpoint_stop_ids = [token_id for source in folders for token_id in _configured_stop_ids(source)]
    tokenizer.checkpoint_vocab_size = size = _model_vocab_size([*folders][-1])
    for token_id in (tokenizer.eos_token_id, *tokenizer.checkpoint_stop_ids):
        if size is not None and token_id >= size:
            raise TokenizerError(
                f"{folder}: the id {token_id}, which ends an answer, is outside the model's vocabulary of {size:,}, so "
                f"that no answer would end; correct eos_token_id in {GENERATION_CONFIG_FILE} or {CONFIG_FILE}, or "
                "eos_token of the tokenizer"
            )
    tokenizer.state_on_disk = _state(tokenizer)
    return tokenizer


def _damaged_file(folder: Path) -> str | None:
    """Say which file of a tokenizer is no JSON object, which transformers' own errors do not name; None for none."""
    for name in TOKENIZER_FILES:
        if name.endswith(".json") and (folder / name).is_file():
            try:
                read_json(folder / name, TOKENIZER_BYTES)
            except CheckpointError as damage:
                return str(damage)
    return None


def _state(tokenizer: Any) -> tuple[Any, ...]:
    return tokenizer.chat_template, len(tokenizer), str(tokenizer.special_tokens_map)


def _configured_stop_ids(folder: Path) -> list[int]:
    """Return `eos_token_id` of the generation config, or else of the model config, as transformers generates."""
    ids: list[Any] = []
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        if ids or not os.path.lexists(folder / name):
            continue
        config = read_json(folder / name)
        for part in _with_text_config(config):
            value = part.get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise TokenizerError(f"{folder}: eos_token_id is {ids!s:.80} in its configuration; expected token ids")
    return ids


def _with_text_config(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a model's config, and its section of the text decoder if it has one."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _model_vocab_size(folder: Path) -> int | None:
    """Return `vocab_size` of the model config; None if the folder has none."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    sizes = (part.get("vocab_size") for part in _with_text_config(read_json(folder / CONFIG_FILE)))
    return next((size for size in sizes if type(size) is int), None)


def write_tokenizer(folder: Path, tokenizer: Any, assets: Path | None) -> None:
    """Write the tokenizer of an export, and the generation config with every id that ends an answer.

    Other tools stop at the ids of the generation config alone. Files of a loaded tokenizer are copied unchanged, but
    for the prompt separator.

    Args:
        folder: the export.
        tokenizer: a tokenizer, its folder, or None for the one in `assets`, if it has one.
        assets: folder of the generation config and of the model config.
    """
    source = assets
    if isinstance(tokenizer, str | os.PathLike):
        source = checkpoint_folder(tokenizer)
    elif hasattr(tokenizer, "state_on_disk") and tokenizer.state_on_disk == _state(tokenizer):  # of load_tokenizer
        source = Path(tokenizer.name_or_path)
    elif tokenizer is not None:
        tokenizer.save_pretrained(folder)
        source = None
    if source is not None:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / NAMED_TEMPLATES).is_dir():
            shutil.copytree(source / NAMED_TEMPLATES, folder / NAMED_TEMPLATES)
    if assets is not None and (assets / GENERATION_CONFIG_FILE).is_file():
        shutil.copyfile(assets / GENERATION_CONFIG_FILE, folder / GENERATION_CONFIG_FILE)
    if not has_tokenizer(folder):
        return
    if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
        try:
            tokenizer = load_tokenizer(source or folder, assets)
        except TokenizerError:
            return  # the files are copied all the same
    if separator := prompt_separator(tokenizer):
        config = read_json(folder / TOKENIZER_CONFIG_FILE)
        write_json(folder / TOKENIZER_CONFIG_FILE, config | {SEPARATOR: separator})
    file = folder / GENERATION_CONFIG_FILE
    config = read_json(file) if file.is_file() else {}
    configured = _configured_stop_ids(folder)
    ids = list(
        dict.fromkeys([*configured, *stop_token_ids(tokenizer), *(_configured_stop_ids(assets) if assets else ())])
    )
    if set(ids) != set(configured):
        file.write_text(json.dumps(config | {"eos_token_id": ids}, indent=2) + "\n", encoding="utf-8")


def save_run_tokenizer(checkpoints: Path, tokenizer: Any, model_path: str | os.PathLike[str]) -> None:
    """Write the tokenizer of a run next to its native checkpoints, for later exports.

    Args:
        checkpoints: folder of the checkpoints.
        tokenizer: the tokenizer.
        model_path: folder of the trained model; its generation config is written too.
    """
    target = checkpoints / RUN_TOKENIZER
    with write_errors(target), staged_folder(target) as folder:
        write_tokenizer(folder, tokenizer, model_folder(model_path, CONFIG_FILES))
        sync_tree(folder)
        publish(folder, target)


def saved_tokenizer(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the tokenizer's folder of a LoRA (folder or hub id), a run or a native checkpoint; None if it has none."""
    if path is None:
        return None
    path = model_folder(path)
    checkpoint = find_checkpoint(path) or find_checkpoint(path / "checkpoints")
    folder = path if checkpoint is None else checkpoint.parent / RUN_TOKENIZER
    return folder if has_tokenizer(folder) else None
