"""Bootstrap of a small Hugging Face checkpoint: configuration, tokenizer, weights and SFT warm-up."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from archon.checkpoint.tokenizer import load_tokenizer
from archon.data.image_rows import IMAGE, open_reader
from archon.data.images import PROCESSOR_FILE, ImageReader
from archon.data.registry import load_rows
from archon.engine.engine import ArchonEngine
from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters
from archon.models import get_model_spec, get_supported_model_types
from archon.models.args.base import ImageFormat
from archon.parallel.control_plane import ControlPlane
from archon.rl.evaluation import evaluate
from archon.rl.prompts import Prompt
from archon.rl.rewards import AsyncRewardWrapper
from archon.rl.rollout import Rollout
from archon.rl.weight_sync import build_inprocess_engine, engine_weights
from archon.rl.workflows import RLVRWorkflow, VisionRLVRWorkflow
from archon.schema.capacity import GIB, memory_bytes
from archon.schema.config import EngineConfig, derive_engine
from archon.schema.errors import ConfigError
from archon.training.config import BootstrapConfig, SFTConfig, TokenizerRecipe, WarmupConfig, WarmupTarget
from archon.training.loop import require_same_rows
from archon.training.runner import Runner
from archon.training.sft import SFTTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML_LETTERS = "\nsystemuserassistant"
"""Characters that ChatML writes around the messages: without them the tokenizer refuses every conversation."""
WEIGHT_BYTES = 4  # of a new weight, which is float32
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_PARTS = (
    "{%- macro parts(content) %}{%- if content is string %}{{- content }}{%- else %}{%- for part in content %}"
    "{%- if part.type == 'image' %}{{- '" + "".join(IMAGE_TOKENS) + "' }}{%- else %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{%- endmacro %}"
)
"""Template macro for image tokenizers: renders message content that may consist of parts."""

CHAT_TEMPLATES = {
    "plain": (
        "{%- for message in messages %}{{- message.content }}"
        "{%- if message.role == 'assistant' %}{{- eos_token }}{%- endif %}{%- endfor %}"
    ),
    # Tools, tool calls and tool responses are written as in Qwen's templates.
    "chatml": (
        "{%- if tools %}{{- '<|im_start|>system\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{%- endif %}"
        "{{- '<tools>' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}"
        "{{- '\n</tools><|im_end|>\n' }}{%- endif %}"
        "{%- for message in messages %}{%- if not (loop.first and tools and message.role == 'system') %}"
        "{%- if message.role == 'tool' %}"
        "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content }}{%- endif %}"
        "{%- for call in message.tool_calls or [] %}"
        "{{- ('' if loop.first and not message.content else '\n') + '<tool_call>\n' }}"
        '{{- \'{"name": "\' + call.function.name }}'
        "{{- '\", \"arguments\": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}"
        "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
}

RECORD = "bootstrap.json"


def make_tokenizer(recipe: TokenizerRecipe, texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with Qwen's special tokens and a chat template.

    Kind `characters` has one token per character of its alphabet and refuses other characters. Kind `bpe` is a
    byte-level BPE trained on `texts`, with split digits as in Qwen.
    """
    from transformers import PreTrainedTokenizerFast

    special = [PAD, START, END, *(IMAGE_TOKENS if recipe.images else ())]
    if recipe.kind == "characters":
        alphabet = sorted({*recipe.alphabet, *(CHATML_LETTERS if recipe.chat_template == "chatml" else "")})
        tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*special, *alphabet])}))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(special)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=recipe.vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
    template = CHAT_TEMPLATES[recipe.chat_template]
    if recipe.images:
        template = _PARTS + re.sub(r"(\{\{-|\+) message\.content", r"\1 parts(message.content)", template)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=template)


def ensure_checkpoint(
    config: BootstrapConfig, path: str | Path, *, like: EngineConfig | None = None, log: Callable[[str], None] = print
) -> int:
    """Create the checkpoint at `path` unless it exists. All processes of a run must call it.

    Args:
        config: the recipe.
        path: the target folder.
        like: base engine configuration for the overrides in `config.engine`; None: the defaults.
        log: called when the work starts.

    Returns:
        0, or the number of the signal that interrupted the warm-up; the next call continues it.

    Raises:
        ConfigError: `path` holds something else, or a checkpoint created with other settings.
    """
    target = Path(path)
    expected = config.model_dump(mode="json", exclude={"path", "engine"})
    world = ControlPlane.world()
    if world.broadcast_json(lambda: _is_complete(target, expected)):
        return 0
    workshop = target.with_name(target.name + ".making")
    blank = workshop / "blank"
    made = workshop / "export" if config.warmup is None else workshop / "warmup" / "export"

    def write() -> None:
        if not (blank / RECORD).is_file():
            log(f"bootstrap: making {config.model_type} and its tokenizer in {target}")
            write_blank(config, blank)
            (blank / RECORD).write_text(json.dumps(expected))
        elif json.loads((blank / RECORD).read_text()) != expected:
            raise ConfigError(f"{workshop} holds an unfinished checkpoint with other bootstrap settings; remove it")
        # A process killed before the rename leaves this file, and an export does not replace it.
        (made / RECORD).unlink(missing_ok=True)

    def end() -> None:
        (made / RECORD).write_text(json.dumps(expected, indent=2) + "\n")
        made.rename(target)
        shutil.rmtree(workshop)

    model = bootstrap_engine(config, like, path=str(blank))
    world.main_first(write)
    if config.warmup is None:
        # Nothing is trained here.
        engine = ArchonEngine(model.model_copy(update={"optimizer": None}))
        engine.initialize()
        engine.save(made)
    elif number := warm_up(config.warmup, model, workshop / "warmup"):
        return number
    world.main_first(end)
    return 0


def bootstrap_engine(config: BootstrapConfig, like: EngineConfig | None, path: str) -> EngineConfig:
    """Return the engine configuration for the warm-up from the config.json in `path`.

    It trains all weights, even if the run that follows trains a LoRA.
    """
    fixed = {"path": path, "init_from_scratch": True, "seed": config.seed}
    changes = {"lora": None} | (config.engine or {}) | fixed
    return derive_engine(like or EngineConfig(path=path), changes, "bootstrap: engine")


def _is_complete(target: Path, expected: dict[str, Any]) -> bool:
    if not target.exists():
        return False
    record = target / RECORD
    if not record.is_file():
        raise ConfigError(f"{target} exists and was not created by a bootstrap; set bootstrap=null, or another path")
    if json.loads(record.read_text()) != expected:
        raise ConfigError(f"{target} was created with other bootstrap settings; remove it, or choose another path")
    return True


def warm_up(config: WarmupConfig, model: EngineConfig, run_dir: Path) -> int:
    """Fine-tune the blank model. Return 0, or the number of a stop signal (equal on all ranks)."""
    sft = SFTConfig(
        run_dir=str(run_dir),
        resume=True,
        seed=model.seed,
        total_steps=config.total_steps,
        batch_size=config.batch_size,
        model=model.model_copy(update={"optimizer": config.optimizer, "scheduler": config.scheduler}),
        train_data=config.train_data,
    )
    with ExitStack() as stack:
        runner = stack.enter_context(Runner(run_dir, sft, resume=True))
        probe = None
        if config.target is not None:
            reward = stack.enter_context(AsyncRewardWrapper(config.target.reward))
            probe = RewardProbe(config.target, reward, load_tokenizer(model.path), model.seed, open_reader(model))
        SFTTrainer(sft, runner, probe).train()
    # A signal after the last step's check may have reached only some ranks.
    return runner.world.all_reduce_max(runner.stop_number)


class RewardProbe:
    """Held-out reward during a warm-up; it stops the warm-up at the target."""

    def __init__(
        self,
        config: WarmupTarget,
        reward: AsyncRewardWrapper,
        tokenizer: Any,
        seed: int,
        reader: ImageReader | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._seed = seed
        rows = load_rows(config.eval_data, "rl", tokenizer, reader)
        require_same_rows(rows, config.eval_data.path)
        self._prompts = [Prompt(i, row) for i, row in enumerate(rows)]
        gconfig = GenerationHyperparameters(max_new_tokens=config.max_new_tokens)
        self._workflow = (
            RLVRWorkflow(reward, gconfig, tokenizer)
            if reader is None
            else VisionRLVRWorkflow(reward, gconfig, tokenizer, reader)
        )
        self._generator: InProcessEngine | None = None

    def __call__(self, engine: ArchonEngine, step: int) -> tuple[dict[str, float], bool]:
        """Return the metrics of an evaluation due at `step`, and whether the target is reached."""
        if step % self.config.every:
            return {}, False
        if self._generator is None:
            self._generator = build_inprocess_engine(engine, self.tokenizer, max_slots=256)
        self._generator.update_weights(engine_weights(engine), version=step)
        rollout = Rollout(self._generator, self._workflow, seed=self._seed)
        measured = asyncio.run(evaluate(rollout, self._prompts))
        return {"eval/reward": measured["reward"]}, measured["reward"] >= self.config.target_reward


def write_blank(config: BootstrapConfig, path: Path) -> None:
    """Write everything but the weights: configs, tokenizer and, for a vision model, image processor."""
    recipe = config.tokenizer
    if recipe.kind == "bpe" and recipe.train_data is None:
        raise ConfigError("bootstrap: tokenizer.train_data is not set; kind 'bpe' needs a training dataset")
    tokenizer = make_tokenizer(recipe)
    image = _write_config(config, tokenizer, path)
    if recipe.kind == "bpe":
        assert recipe.train_data is not None
        rows = load_rows(recipe.train_data, "rl", None, None if image is None else ImageReader(path, image))
        texts = [text.replace(IMAGE, "") for row in rows for text in (row["prompt"], str(row.get("answer", "")))]
        tokenizer = make_tokenizer(recipe, texts)
        _write_config(config, tokenizer, path)
    tokenizer.save_pretrained(path)


def _write_config(config: BootstrapConfig, tokenizer: Any, path: Path) -> ImageFormat | None:
    """Write config and image-processor files for a tokenizer. Return the model's image format."""
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    spec = get_model_spec(config.model_type)  # raises for an unknown family
    recipe = config.tokenizer
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if recipe.images else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.model_type not in classes:
        families = ", ".join(sorted(classes.keys() & get_supported_model_types()))
        raise ConfigError(
            f"bootstrap: model_type {config.model_type} does not fit tokenizer.images={json.dumps(recipe.images)}; "
            f"expected one of {families}"
        )
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer)} | ids
    values = {"architectures": [classes[config.model_type]], "dtype": "float32"}
    if recipe.images:
        write, image_token, end = tokenizer.convert_tokens_to_ids([*IMAGE_TOKENS])
        values |= {"vision_start_token_id": write, "image_token_id": image_token, "vision_end_token_id": end}
        values |= config.hf_config | {"text_config": sizes | config.hf_config.get("text_config", {})}
    else:
        values |= sizes | config.hf_config
    try:
        hf_config = AutoConfig.for_model(config.model_type, **values)
    except Exception as error:  # transformers raises many types
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"bootstrap: hf_config is not a config of {config.model_type}: {reason}") from error
    try:
        args = spec.model_args_class.from_hf_config(hf_config)
        shapes = spec.state_dict_adapter_class(hf_config.to_dict()).native_shapes
    except ConfigError as error:
        raise ConfigError(f"bootstrap: hf_config: {error}") from None
    image = args.image_format
    if args.vocab_size < len(tokenizer):
        raise ConfigError(
            f"bootstrap: hf_config: vocab_size is {args.vocab_size}, but the tokenizer has {len(tokenizer)} tokens; "
            "leave it out to use that number"
        )
    parameters = sum(math.prod(shape) for shape in shapes.values())
    if parameters * WEIGHT_BYTES > memory_bytes():
        raise ConfigError(
            f"bootstrap: hf_config describes a model of {parameters:,} parameters in float32, more than the "
            f"{memory_bytes() / GIB:.1f} GiB of memory of this machine; set hidden_size, intermediate_size and "
            "num_hidden_layers, whose defaults are those of a large model"
        )
    if recipe.images != (image is not None):
        raise ConfigError(
            f"bootstrap: tokenizer.images is {json.dumps(recipe.images)}, but {config.model_type} has "
            f"{'no' if image is None else 'a'} vision encoder; expected both or neither"
        )
    hf_config.save_pretrained(path)
    GenerationConfig(**ids).save_pretrained(path)
    if image is not None:
        (path / PROCESSOR_FILE).write_text(json.dumps(_image_processor(image), indent=2) + "\n")
    return image


def _image_processor(image: ImageFormat) -> dict[str, Any]:
    """Return settings of Qwen's image processor for images from one merged patch to 2^20 pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": image.patch_size,
        "temporal_patch_size": image.temporal_patch_size,
        "merge_size": image.merge_size,
        "size": {"shortest_edge": (image.patch_size * image.merge_size) ** 2, "longest_edge": 2**20},
        "image_mean": [0.5] * image.channels,
        "image_std": [0.5] * image.channels,
    }
