"""Typed configuration: the base class and the engine section.

Every field has its default, description and unit here; `archon <command> --help` prints them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from archon.schema.errors import ConfigError
from archon.schema.name_patterns import NamePatterns

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # pydantic has no public name for it

ContextParallelKind = Literal["ulysses", "allgather"]
ComputeDtype = Literal["float32", "bfloat16", "float64"]
Fp8Recipe = Literal["none", "tensorwise", "rowwise"]
Fp8Choice = Fp8Recipe | Literal["tensorwise_inner", "rowwise_inner"]
MAX_SECONDS = 1e9  # thirty years; larger timeouts overflow in PyTorch and asyncio
MAX_LR = 1e3  # Adam moves each weight by about lr, and weights are below 100; a step of 1e3 leaves nothing of a model
MAX_STEP_ROWS = 2**18  # rows or answers of one step or call, which keeps up to 11 KB of each in Python (measured)
MAX_SAMPLES = 2**14  # 16,384 answers to one prompt; pass@k is measured up to k = 10,000
SinkName = Literal["tensorboard", "wandb", "trackio"]
RELATIVE_TO_CONFIG = "a path relative to the configuration file that contains it"
"""Annotation of a path field that becomes absolute when the file is read."""


def expand_path(path: Any) -> Any:
    """Replace `~` and environment variables (`$NAME`, `${NAME}`) in a path; return other values unchanged.

    Raises:
        ConfigError: the path is empty or contains NUL, a variable is not set, or `~name` is no user.
    """
    if not isinstance(path, str | Path):
        return path
    if path == "" or "\0" in str(path):  # an empty path would be the current folder
        raise ConfigError(f"path {str(path)!r}: expected the name of a file or folder")
    expanded = os.path.expanduser(os.path.expandvars(path))
    if missing := re.search(r"\$(?:\{\w+\}|[A-Za-z_]\w*)", expanded):
        raise ConfigError(
            f"path {str(path)!r}: the environment variable {missing[0]} is not set; set it, or replace it"
        )
    if re.match(r"~[\w.-]*(?:/|$)", expanded):
        raise ConfigError(f"path {str(path)!r}: no such user; expected ~ or ~USER, or ./~ for a file name")
    return type(path)(expanded)


EXPANDED = BeforeValidator(expand_path)
"""Annotation of a path field in which `~` and environment variables are replaced."""


class OneLineErrors(ModelMetaclass):
    """Metaclass that turns pydantic's ValidationError into a one-line `ConfigError`."""

    def __call__(self, *args: Any, **fields: Any) -> Any:
        """Create the model."""
        try:
            return super().__call__(*args, **fields)
        except ValidationError as error:
            raise ConfigError(f"{self.__name__}: {describe_validation_error(error)}") from None


def _reject_bool(key: str, value: Any, annotation: Any) -> None:
    """Raise ValueError for true or false in a field of numbers, which pydantic reads as 1 or 0."""
    values = value if isinstance(value, list) else (value,)
    if any(isinstance(item, bool) for item in values):
        types = _types(annotation)
        if bool not in types and (int in types or float in types):
            raise ValueError(f"{key}: got {json.dumps(value)}, expected a number")


def _types(annotation: Any) -> list[Any]:
    """Return an annotation and all types and literals inside it."""
    return [annotation, *(part for argument in get_args(annotation) for part in _types(argument))]


class StrictModel(BaseModel, metaclass=OneLineErrors):
    """A pydantic model that rejects unknown keys, naming the nearest valid one."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, str) and "path" in cls.model_fields:
            raise ValueError(f"got {data!r}, expected a section with the key path: SECTION.path={data}")
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    if nested := cls._nested_key(str(key)):
                        raise ValueError(f"unknown key {key!r}, did you mean {nested!r}?")
                    raise ValueError(f"unknown key {key!r}{nearest(str(key), list(cls.model_fields))}")
                _reject_bool(str(key), data[key], cls.model_fields[key].annotation)
        return data

    @classmethod
    def _nested_key(cls, key: str) -> str | None:
        """Return the dotted path of a key in the sections of this one, the shallowest; None if no section has it."""
        sections: list[tuple[str, type[StrictModel]]] = [("", cls)]
        for prefix, section in sections:
            if prefix and key in section.model_fields:
                return f"{prefix}{key}"
            for name, field in section.model_fields.items():
                for part in (field.annotation, *get_args(field.annotation)):
                    if isinstance(part, type) and issubclass(part, StrictModel):
                        sections.append((f"{prefix}{name}.", part))
        return None

    @model_validator(mode="after")
    def _check_integer_range(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            for number in value if isinstance(value, list) else (value,):
                if isinstance(number, int) and not -(2**63) <= number < 2**63:
                    raise ValueError(f"{name}: got {_short_repr(number)}, expected an integer of at most 64 bits")
        return self

    @classmethod
    def parse(cls, data: dict[str, Any], source: str = "config") -> Self:
        """Validate `data`. Raises ConfigError with the dotted key, its value and the expectation."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{source}: {describe_validation_error(error)}") from None


def nearest(name: str, known: list[str]) -> str:
    """Return the end of an error message: `", did you mean 'lr'?"`, or the valid names."""
    close = _close(name, known)
    return f", did you mean {close!r}?" if close else f"; valid keys: {', '.join(sorted(known))}"


def _close(name: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def describe_validation_error(error: ValidationError) -> str:
    """Format a pydantic error as one line: `actor.lr: got 'abc', input should be a valid number`."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        if item["type"] == "literal_error":
            close = _close(str(item["input"]), re.findall("'([^']*)'", item["ctx"]["expected"]))
            message += f", did you mean {close!r}?" if close else ""
        # For a missing field, pydantic reports the whole section as input.
        received = "" if item["type"] in ("value_error", "missing") else f"got {_short_repr(item['input'])}, "
        lines.append(f"{where + ': ' if where else ''}{received}{message}")
    return "; ".join(lines)


def _short_repr(value: Any) -> str:
    """Return the repr of a value, cut to 200 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python's limit of 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}…"


class OptimizerConfig(StrictModel):
    """Optimizer. Norms, biases and embeddings have no weight decay."""

    kind: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: Muon for the matrices of layers, with updates of AdamW's size, so that lr and weight_decay "
        "of AdamW fit; AdamW for embeddings, heads, norms and biases",
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="decay of Muon's momentum")
    lr: float = Field(1e-5, gt=0, le=MAX_LR, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay")
    moments: Literal["float32", "bfloat16", "int8"] = Field(
        "float32",
        description="format of both moments; float32: the dtype of the weights, at least float32. int8: 8 bits with a "
        "scale per block of up to 256 elements (extra fp8)",
    )
    max_grad_norm: float | None = Field(1.0, gt=0, description="global gradient norm to clip to; null never clips")
    max_skipped_in_a_row: int = Field(
        5, ge=1, description="steps in a row with a non-finite gradient, after which training stops"
    )

    @model_validator(mode="after")
    def _check_decay(self) -> OptimizerConfig:
        if self.lr * self.weight_decay > 1:
            raise ValueError(
                f"lr * weight_decay is {self.lr * self.weight_decay:g}; expected at most 1, because a step multiplies "
                "weights by 1 - lr * weight_decay"
            )
        return self

    @model_validator(mode="after")
    def _check_moments(self) -> OptimizerConfig:
        if self.kind == "muon" and self.moments != "float32":
            raise ValueError(
                f"kind = muon needs moments = float32, got {self.moments}; set moments to float32, or kind to adamw"
            )
        return self


class SchedulerConfig(StrictModel):
    """Learning-rate schedule, by optimizer step."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant", description="shape after the warm-up; wsd: constant, then linear over the last decay_steps"
    )
    warmup_steps: int | float = Field(
        0, ge=0, description="steps of linear warm-up from 0; below 1: share of all steps, such as 0.05"
    )
    decay_steps: int | float = Field(
        0.2, gt=0, description="steps of the decay of wsd; below 1: share of all steps, such as 0.2"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="final learning rate, as a share of the peak")

    @model_validator(mode="after")
    def _check_shares(self) -> SchedulerConfig:
        for name in ("warmup_steps", "decay_steps"):
            steps = getattr(self, name)
            if isinstance(steps, float) and steps >= 1:
                raise ValueError(f"{name} is {steps}; expected whole steps, or a share below 1")
        return self


class ActivationCheckpointConfig(StrictModel):
    """Activations to keep, and activations to recompute in the backward pass."""

    mode: Literal["none", "full", "offload", "selective", "memory_budget", "auto"] = Field(
        "none",
        description="recompute policy. offload: full, with block inputs in host memory; auto: recompute as many of the "
        "first blocks as memory requires; the log and --dry-run print them",
    )
    selective: Literal["op"] | int | Annotated[str, Field(pattern=r"^first [1-9][0-9]{0,4}$")] = Field(
        "op",
        description="selective mode: 'op' keeps matmul and attention outputs; n checkpoints every n-th layer; "
        "'first n' the first n layers of each pipeline stage",
    )
    memory_budget: float | None = Field(
        None,
        ge=0,
        description="memory_budget mode: share of activation memory kept (needs compile), null: 0.5; auto mode: GiB of "
        "a rank for weights, states and activations, null: the free memory of its GPU, or its part of the CPU's memory",
    )

    @model_validator(mode="after")
    def _check_details(self) -> ActivationCheckpointConfig:
        if isinstance(self.selective, int) and self.selective < 1:
            raise ValueError(f"selective must be 'op', 'first n' or a number of layers >= 1, got {self.selective}")
        if self.memory_budget is not None and self.mode not in ("memory_budget", "auto"):
            raise ValueError(
                f"memory_budget is {self.memory_budget:g}, which mode {self.mode} ignores; set mode to memory_budget "
                "or auto, or remove it"
            )
        if self.selective != "op" and self.mode != "selective":
            raise ValueError(
                f"selective is {self.selective}, which mode {self.mode} ignores; set mode to selective, or remove it"
            )
        if self.mode == "memory_budget" and self.kept_share > 1:
            raise ValueError(
                f"memory_budget must be a share from 0 to 1 in mode memory_budget, got {self.kept_share:g}"
            )
        return self

    @property
    def kept_share(self) -> float:
        """Share of activation memory that mode `memory_budget` keeps."""
        return 0.5 if self.memory_budget is None else self.memory_budget

    @property
    def saves_ops(self) -> bool:
        """Whether recomputed blocks keep the outputs of matmuls and attention."""
        return self.mode == "selective" and self.selective == "op"

    def recomputes(self, position: int) -> bool:
        """Return whether a stage's block recomputes; `position` counts from 1."""
        if self.mode != "selective" or self.selective == "op":
            return self.mode in ("full", "offload", "selective")
        if isinstance(self.selective, int):
            return position % self.selective == 0
        return position <= int(self.selective.removeprefix("first "))

    @property
    def name(self) -> str:
        """The policy as text: `none`, `full`, `offload`, `selective op`, `selective 2`, `memory_budget 0.5`, `auto`."""
        detail = {"selective": f" {self.selective}", "memory_budget": f" {self.kept_share}"}
        return self.mode + detail.get(self.mode, "")

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Return the policy called `name`, with the default detail if it has none; raise ConfigError if unknown."""
        mode, _, detail = name.partition(" ")
        detailed = detail and mode in ("selective", "memory_budget")
        return cls.parse({"mode": mode, mode: detail} if detailed else {"mode": name}, source="a recompute policy")


class LoRASpec(StrictModel):
    """LoRA settings, with the names and meanings of PEFT."""

    rank: int = Field(16, ge=1, description="LoRA rank")
    alpha: float = Field(32.0, gt=0, description="LoRA scale is alpha / rank")
    targets: list[str] | str = Field(
        "all-linear",
        description="modules with LoRA: all-linear (experts too, but no routers, embedding or head), or module names "
        "of the checkpoint, such as q_proj, layers.3.mlp.down_proj, embed_tokens or lm_head",
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="rank per module; keys are regular expressions for the end of module names, as in PEFT",
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="alpha per module; keys as in rank_pattern"
    )
    rslora: bool = Field(False, description="rsLoRA: scale is alpha / sqrt(rank)")
    init: Literal["zero", "gaussian", "random"] = Field(
        "zero",
        description="initialization. zero: A uniform like the weight of a linear layer, B zero, so training starts at "
        "the base model; gaussian: A normal with standard deviation 1 / rank, B zero; random: both uniform",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="probability of dropping an input feature of a LoRA in training; null: lora_dropout of path, or 0",
    )
    dora: bool = Field(
        False, description="DoRA (Liu et al. 2024): train the norm of each row of a matrix too; not of experts"
    )
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="modules trained whole next to the LoRA, such as lm_head or input_layernorm, as in PEFT",
    )
    seed: int = Field(0, ge=0, description="seed of the initialization and of dropout")
    export_experts: Literal["stacked", "per_expert"] = Field(
        "stacked",
        description="LoRA of experts in a PEFT export. stacked: one tensor for all experts, as in transformers 5; "
        "per_expert: one module per expert, as in checkpoints and older versions",
    )
    path: Annotated[str | None, EXPANDED] = Field(
        None, description="folder or hub id of a LoRA in PEFT's format to start from; null: a fresh LoRA"
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if not self.targets:
            raise ValueError(
                f"targets is {self.targets!r}, which selects no module; expected all-linear or module names (to train "
                "all weights, set lora to null)"
            )
        for field in ("rank_pattern", "alpha_pattern"):
            try:
                NamePatterns(getattr(self, field))
            except ValueError as error:
                raise ValueError(f"{field} has {error}") from None
        fresh_fields = LoRASpec.model_fields.keys() - {"path", "export_experts", "dropout", "seed"}
        fresh = self.model_dump(exclude_defaults=True).keys() & fresh_fields
        if self.path is not None and fresh:
            raise ValueError(
                f"{', '.join(sorted(fresh))} configures a fresh LoRA, and path = {self.path!r} loads one; set one of "
                "them"
            )
        return self


class NamedLoRAConfig(LoRASpec):
    """One of several LoRAs that train in the same batches, each as if alone."""

    optimizer: OptimizerConfig | None = Field(None, description="AdamW of this LoRA; null: the AdamW of the model")
    scheduler: SchedulerConfig | None = Field(
        None, description="learning-rate schedule by the steps of this LoRA; null: the schedule of the model"
    )
    total_steps: int | None = Field(
        None, ge=1, description="steps of this LoRA after which a decaying schedule ends; null: the steps of the run"
    )


class LoRAConfig(LoRASpec):
    """LoRA on frozen weights: one LoRA, or several named ones in `loras`."""

    loras: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")], NamedLoRAConfig] | None = Field(
        None,
        description="multi-LoRA: several LoRAs by name, each with separate values in place of this section",
    )
    quantize_base: Literal["none", "nf4", "fp8"] = Field(
        "none",
        description="QLoRA: store the frozen linear layers of blocks quantized. nf4: 4-bit NormalFloat with double "
        "quantization, as in bitsandbytes; fp8: e4m3 with a scale per 128 x 128 block. Matmuls run in dtype",
    )

    @model_validator(mode="after")
    def _check_loras(self) -> LoRAConfig:
        if self.loras is None:
            return self
        if not self.loras:
            raise ValueError("loras is empty; name at least one, or leave it out for one LoRA per matrix")
        if single := sorted(self.model_dump(exclude_defaults=True).keys() - {"loras", "quantize_base"}):
            raise ValueError(
                f"{', '.join(single)} configures a single LoRA, and loras names {len(self.loras)}; move it into each "
                "of them"
            )
        return self


class PipelineConfig(StrictModel):
    """How a layout with p > 1 splits the model into stages and schedules them."""

    schedule: Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = Field(
        "1f1b", description="order of forward and backward passes"
    )
    stages_per_rank: int = Field(2, ge=1, description="stages a rank holds in the interleaved schedules")
    head_weight: float = Field(1.0, ge=0, description="cost of head and loss on the last stage, in layers")
    layers_per_stage: list[int] | None = Field(None, description="layers of each stage by hand; null balances them")


class MetricsConfig(StrictModel):
    """Additional destinations of metrics, besides `metrics.jsonl`."""

    sinks: list[SinkName] = Field(
        default_factory=list, description="tensorboard (RUN_DIR/tensorboard), wandb, trackio: any of them"
    )
    project: str = Field(
        "archon", min_length=1, description="project of wandb and trackio; the run is named after its folder"
    )


class EngineConfig(StrictModel):
    """One model being trained: its checkpoint, its layout and its optimization."""

    path: Annotated[str, EXPANDED] = Field(
        description="Hugging Face checkpoint folder, or hub id owner/name or owner/name@revision"
    )
    is_critic: bool = Field(False, description="value head (`score`) instead of the language-model head")
    init_score: bool | None = Field(
        None,
        description="allow a critic from an actor checkpoint, with a freshly initialized `score`; null: true for the "
        "critic of RL and for reward models, else false",
    )
    init_from_scratch: bool = Field(False, description="initialize all weights; read only config.json")
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N")
    dtype: ComputeDtype = Field(
        "float32", description="compute dtype; master weights and optimizer state are at least float32"
    )
    export_dtype: Literal["checkpoint", "float32", "bfloat16", "float16"] = Field(
        "checkpoint",
        description="dtype of exported weights. checkpoint: the dtype of each tensor in the checkpoint at path. LoRAs "
        "in PEFT's format are always float32",
    )
    fp8: Fp8Choice = Field(
        "none",
        description="FP8 matmuls of blocks, as in torchao: tensorwise, or rowwise (rowwise_with_gw_hp: weight "
        "gradients in dtype); *_inner excludes the first and the last block. Embedding, head, routers, norms and LoRA "
        "stay in dtype. Turns share_prefixes off; emulated on a CPU; GPUs need bfloat16 and torchao (extra fp8)",
    )
    layout: str = Field("d1", description="parallel layout, e.g. d4p2t2c1e1")
    vision: Literal["frozen", "trained", "off"] = Field(
        "frozen",
        description="vision encoder of a vision-language model: frozen, trained with the other weights, or off (text "
        "only; exports copy the vision encoder bitwise)",
    )
    lora: LoRAConfig | None = Field(None, description="train LoRA on frozen weights instead of all weights")
    context_parallel: Literal["auto"] | ContextParallelKind = Field(
        "auto",
        description="attention over c ranks. ulysses: shard heads; allgather: shard queries and gather keys; auto: "
        "ulysses if c divides the heads",
    )
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="stages of a layout with p > 1")
    reshard_after_forward: Literal["default", "always", "never"] = Field(
        "default",
        description="free gathered FSDP weights after the forward: default keeps the root's weights, always frees all, "
        "never keeps all",
    )
    cpu_offload: bool = Field(False, description="keep sharded weights, gradients and optimizer state on the CPU")
    timeout_s: float = Field(
        600.0,
        gt=0,
        le=MAX_SECONDS,
        description="time-out of a collective in seconds; at least 30 minutes where ranks wait for rollouts or for "
        "checkpoint files",
    )
    stall_s: float | None = Field(
        None,
        gt=0,
        le=MAX_SECONDS,
        description="seconds of a training step after which every rank writes its stacks to stacks/rankN.txt; null: "
        "never",
    )
    router_aux_loss_coef: float = Field(
        0.0, ge=0, description="weight of the auxiliary load-balancing loss of MoE models"
    )
    mtp_loss_weight: float = Field(
        0.0,
        ge=0,
        description="weight of the multi-token-prediction loss, the mean over MTP layers of their cross-entropy per "
        "token (DeepSeek-V3's lambda). It trains these layers alone; 0: off, exports copy them bitwise. Turns "
        "share_prefixes off",
    )
    router_bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="change of a router's balancing bias after each step; 0: off. Families that do not store these "
        "biases in checkpoints refuse a Hugging Face export",
    )
    delta_rule: Literal["torch", "fla"] = Field(
        "torch", description="implementation of gated delta nets: torch anywhere, or fla's CUDA kernels (extra fla)"
    )
    attn_type: str = Field(
        "auto", description="attention backend: auto, sdpa, varlen, flash, fa4 or another registered one"
    )
    share_prefixes: bool = Field(
        True,
        description="compute shared prefixes once if that saves time; not with context_parallel = allgather",
    )
    max_tokens_per_mb: int = Field(16384, gt=0, description="tokens in one packed micro-batch")
    gradient_reduction: Literal["per_step", "per_microbatch", "step_in_backward"] = Field(
        "per_step",
        description="reduce gradients over ranks once per step, or after each micro-batch (less memory). "
        "step_in_backward: update each weight as soon as its gradient is complete, and free the gradient; one process, "
        "optimizer.max_grad_norm = null",
    )
    optimizer: OptimizerConfig | None = Field(
        default_factory=OptimizerConfig, description="optimizer; null: the model is only evaluated"
    )
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="learning-rate schedule")
    activation_checkpoint: ActivationCheckpointConfig = Field(
        default_factory=ActivationCheckpointConfig, description="activation recomputation"
    )
    compile: bool | Literal["auto"] = Field("auto", description="torch.compile each block; auto: CUDA only")
    deterministic: bool = Field(False, description="use only deterministic kernels")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of initialized weights")

    @model_validator(mode="after")
    def _check_fields(self) -> EngineConfig:
        if self.init_score and not self.is_critic:
            raise ValueError("init_score = true makes a critic from an actor; set is_critic = true as well")
        if self.lora is not None and self.init_from_scratch:
            raise ValueError(
                "lora needs the weights of a checkpoint, and init_from_scratch = true reads none; set "
                "init_from_scratch to false, or lora to null"
            )
        optimizers = [self.optimizer]
        if self.lora is not None:
            optimizers += [lora.optimizer for lora in (self.lora.loras or {}).values()]
        if self.lora is not None and any(each is not None and each.kind == "muon" for each in optimizers):
            raise ValueError(
                "optimizer.kind = muon orthogonalizes updates of whole matrices, and lora trains two factors of each; "
                "set it to adamw, or lora to null"
            )
        if self.lora is not None and self.router_bias_update_rate:
            raise ValueError(
                f"router_bias_update_rate = {self.router_bias_update_rate:g} changes biases of the base model, which "
                "lora freezes; set it to 0, or lora to null"
            )
        if self.lora is not None and self.lora.quantize_base != "none" and self.fp8 != "none":
            raise ValueError(
                f"fp8 = {self.fp8} rounds weights in each matmul, and lora.quantize_base = {self.lora.quantize_base} "
                "stores them rounded and multiplies in dtype; set one of them to none"
            )
        if self.gradient_reduction == "step_in_backward" and self.optimizer is not None:
            if self.optimizer.max_grad_norm is not None:
                raise ValueError(
                    "gradient_reduction = step_in_backward updates weights before the norm of all gradients is known, "
                    f"and optimizer.max_grad_norm is {self.optimizer.max_grad_norm:g}; set it to null, or "
                    "gradient_reduction to per_step"
                )
            if self.lora is not None and self.lora.loras is not None:
                raise ValueError(
                    "gradient_reduction = step_in_backward has one optimizer, and lora.loras trains several LoRAs; set "
                    "it to per_step"
                )
        if self.mtp_loss_weight:
            self._check_mtp()
        if self.vision == "trained" and self.lora is not None:
            raise ValueError(
                "vision = 'trained' trains the vision encoder, and lora freezes all weights; name modules of the "
                "vision encoder in lora.targets, or set lora to null"
            )
        if self.router_bias_update_rate and self.optimizer is None:
            raise ValueError(
                f"router_bias_update_rate = {self.router_bias_update_rate:g} changes biases after each optimizer step, "
                "and optimizer is null; set it to 0"
            )
        return self

    def _check_mtp(self) -> None:
        """Raise ValueError for options that do not work with multi-token prediction."""
        problem = ""
        if self.lora is not None:
            problem = "lora freezes all other weights; set lora to null"
        elif self.is_critic:
            problem = "a critic has no language-model head; set is_critic to false"
        elif self.optimizer is None:
            problem = "optimizer is null; set one"
        elif self.gradient_reduction == "step_in_backward":
            problem = (
                "gradient_reduction = step_in_backward does not separate their gradients; set it to per_step or "
                "per_microbatch"
            )
        elif self.activation_checkpoint.mode == "auto":
            problem = "activation_checkpoint.mode = auto does not predict their memory; choose another mode"
        if problem:
            raise ValueError(
                f"mtp_loss_weight = {self.mtp_loss_weight:g} trains multi-token-prediction layers, and {problem}, or "
                "mtp_loss_weight to 0"
            )

    @model_validator(mode="after")
    def _check_loras(self) -> EngineConfig:
        if self.lora is None or self.lora.loras is None:
            return self
        if self.fp8_recipe == "tensorwise":
            raise ValueError(
                f"fp8 = {self.fp8} uses one scale for all documents of a micro-batch, but each of several LoRAs trains "
                "as if it were alone; set fp8 = rowwise"
            )
        if self.is_critic:
            raise ValueError("a critic has one value head, and lora.loras names several LoRAs; set lora.rank instead")
        if self.router_aux_loss_coef:
            raise ValueError(
                f"router_aux_loss_coef = {self.router_aux_loss_coef:g} is a loss over all documents of a batch, but "
                "each of several LoRAs trains as if it were alone; set it to 0, or train each LoRA in a separate run"
            )
        if self.optimizer is None and any(lora.optimizer for lora in self.lora.loras.values()):
            raise ValueError("a LoRA has an optimizer, but the optimizer of the model is null; set one")
        return self

    @property
    def fp8_recipe(self) -> Fp8Recipe:
        """Scaling recipe of FP8 matmuls, without the choice of blocks."""
        return cast(Fp8Recipe, self.fp8.removesuffix("_inner"))

    def fp8_blocks(self, n_layers: int) -> range:
        """Return the indices of the blocks with FP8 matmuls. Raises ConfigError if the recipe leaves no block."""
        if self.fp8 == "none":
            return range(0)
        blocks = range(1, n_layers - 1) if self.fp8.endswith("_inner") else range(n_layers)
        if not blocks:
            raise ConfigError(
                f"fp8 = {self.fp8} leaves none of {n_layers} blocks in FP8; set fp8 = {self.fp8_recipe}, or none"
            )
        return blocks


def merge_sections(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Update `values` with `over`, section by section."""
    both = {name: (values[name], over[name]) for name in values.keys() & over.keys()}
    sections = {name: merge_sections(*pair) for name, pair in both.items() if all(isinstance(x, Mapping) for x in pair)}
    return {**values, **over, **sections}


def derive_engine(model: EngineConfig, changes: Mapping[str, Any], source: str) -> EngineConfig:
    """Return `model` with nested `changes`; `source` names their section in errors.

    Raises:
        ConfigError: a change is unknown or invalid; the message names the field.
    """
    return EngineConfig.parse(merge_sections(model.model_dump(), changes), source=source)


def derive_critic(model: EngineConfig, changes: Mapping[str, Any], source: str) -> EngineConfig:
    """Derive a critic: a value head, freshly initialized unless `changes` set `init_score: false`.

    The critic has LoRA only if `changes` have `lora`.
    """
    if changes.get("is_critic") is False:
        raise ConfigError(f"{source}.is_critic is false, and this model is a critic; leave it out")
    defaults = {"init_score": True, "lora": None, "mtp_loss_weight": 0.0}
    return derive_engine(model, {**defaults, **changes, "is_critic": True}, source)


def derive_reference(model: EngineConfig, changes: Mapping[str, Any], source: str) -> EngineConfig:
    """Derive a reference model: no optimizer, no bias updates, no LoRA (the reference of a LoRA is its base model)."""
    defaults, fixed = {"lora": None, "mtp_loss_weight": 0.0}, {"optimizer": None, "router_bias_update_rate": 0.0}
    return derive_engine(model, {**defaults, **changes, **fixed}, source)


def require_output(file: Path, suffix: str, inputs: Iterable[Path | None] = ()) -> None:
    """Raise ConfigError unless an output file can be written without loss.

    Its folder must exist. It may replace an earlier file with the same suffix, but no file inside the folders `inputs`.
    """
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            f"{file.parent} is not a folder, so {file.name} cannot be written there; create the folder first"
        )
    if os.path.lexists(file) and not (file.is_file() and file.suffix == suffix):
        raise ConfigError(f"{file} already exists and is not a {suffix} file; choose another name")
    require_separate(file, inputs)


def require_separate(
    output: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str] | None], *, may_contain: bool = False
) -> None:
    """Raise ConfigError if an output is one of the inputs, lies inside one or contains one; links are followed.

    Writing there would change what is read. Inputs that do not exist, such as hub ids, are ignored. With `may_contain`
    the output may contain inputs.
    """
    target = Path(os.path.realpath(output))
    for path in inputs:
        if path is None or not os.path.exists(path):
            continue
        source = Path(os.path.realpath(path))
        contains = target in source.parents and not may_contain
        if target == source or source in target.parents or contains:
            relation = "is" if target == source else "is inside" if source in target.parents else "contains"
            raise ConfigError(f"output {os.fspath(output)} {relation} input {os.fspath(path)}; choose another folder")
