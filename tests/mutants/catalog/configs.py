"""Mistakes in reading a config's layers."""

from __future__ import annotations

from tests.mutants.catalog.known_tests import PARITY
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the first sliding layer is full",
        "models/hf/config.py",
        "return [layer >= first for layer in range(n_layers)]",
        "return [layer > first for layer in range(n_layers)]",
        ("tests/models/test_hf_config.py",),
    ),
    Mutant(
        "every n-th sparse layer is counted from zero",
        "models/args/moe.py",
        "(layer + 1) % self.decoder_sparse_step == 0",
        "layer % self.decoder_sparse_step == 0",
        (f"{PARITY}[qwen2_moe-1]",),
    ),
    Mutant(
        "layers with a window rotate as the others do",
        "models/args/base.py",
        'if use == "local":',
        'if use == "none":',
        (f"{PARITY}[olmo3-0]",),
    ),
    Mutant(
        "every n-th layer without a window is counted from zero",
        "models/hf/config.py",
        "slides = [(layer + (not first_is_full)) % period != 0 for layer in range(n_layers)]",
        "slides = [layer % period != 0 for layer in range(n_layers)]",
        ("tests/models/test_hf_config.py",),
    ),
    Mutant(
        "memory is allocated for what a config claims",
        "archon/checkpoint/hf_io.py",
        "        require_shapes(path, adapter)\n",
        "        pass\n",
        ("tests/checkpoint/test_hostile_configs.py::test_a_claim_is_refused_before_memory_is_allocated",),
    ),
    Mutant(
        "memory of a trained model is allocated for what a config claims",
        "archon/engine/initialize.py",
        "        require_shapes(config.path, adapter)\n",
        "        pass\n",
        ("tests/checkpoint/test_hostile_configs.py::test_a_claim_is_refused_before_memory_is_allocated",),
    ),
    Mutant(
        "each layer computes the RoPE specs of all layers",
        "models/base.py",
        "None if spec.mixer.rope is None else ropes.index",
        "None if spec.mixer.rope is None else args.ropes.index",
        ("tests/checkpoint/test_hostile_configs.py::test_the_work_of_layers_is_linear",),
    ),
    Mutant(
        "weights may be exported in a dtype that needs scales",
        "archon/checkpoint/hf_reader.py",
        "dtype not in WEIGHT_DTYPES:\n        raise ConfigError",
        "not dtype.is_floating_point:\n        raise ConfigError",
        ("tests/checkpoint/test_hostile_configs.py::test_a_claim_is_refused_before_memory_is_allocated",),
    ),
    Mutant(
        "a batch of any number of rows is made",
        "archon/training/config.py",
        "    batch_size: int = Field(32, ge=1, le=MAX_STEP_ROWS,",
        "    batch_size: int = Field(32, ge=1, le=10**9,",
        ("tests/cli/test_bad_input.py::test_a_batch_has_a_limited_number_of_rows",),
    ),
    Mutant(
        "a step starts any number of answers",
        "rl/config.py",
        "if started > MAX_STEP_ROWS:",
        "if started < 0:",
        ("tests/cli/test_bad_input.py::test_value_that_no_run_could_honor",),
    ),
    Mutant(
        "layers of stages are ignored without stages",
        "parallel/resolve.py",
        "if config.pipeline.layers_per_stage is not None and not dims.pp_enabled:",
        "if False:",
        ("tests/cli/test_bad_input.py::test_value_that_no_run_could_honor",),
    ),
    Mutant(
        "a memory budget is ignored without its mode",
        "archon/schema/config.py",
        'if self.memory_budget is not None and self.mode not in ("memory_budget", "auto"):',
        "if False:",
        ("tests/cli/test_bad_input.py::test_value_that_no_run_could_honor",),
    ),
    Mutant(
        "a LoRA may name parameters that its model lacks",
        "archon/checkpoint/peft/reader.py",
        "if unknown := sorted(config.parameters - suffixes):",
        "if unknown := []:",
        ("tests/lora/test_peft_refusals.py::test_fields_that_contradict_the_tensors_or_archon",),
    ),
    Mutant(
        "every command leaves an empty folder for compiled code",
        "archon/cli/app.py",
        "os.rmdir(folder)",
        "os.stat(folder)",
        ("tests/cli/test_environment.py::test_a_command_that_compiles_nothing_leaves_no_folder_for_compiled_code",),
    ),
)
