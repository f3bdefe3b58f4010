"""Planted mistakes in the limits of rows and files, and in the handling of user code that exits."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILES, IDS, EXITS = "tests/cli/test_file_limits.py", "tests/cli/test_token_ids.py", "tests/cli/test_user_exits.py"
DAMAGE, WHOLE = "tests/data/test_damaged_files.py", "tests/data/test_whole_images.py"

MUTANTS = (
    Mutant(
        "a file that is not regular is read",
        "archon/schema/files.py",
        "    elif not stat.S_ISREG(mode):\n",
        "    elif stat.S_ISDIR(mode):\n",
        (f"{FILES}::test_whatever_is_not_a_regular_file_is_refused_before_it_is_read",),
    ),
    Mutant(
        "a file that grows is read whole",
        "archon/schema/files.py",
        "    if max(size, len(data)) > limit:\n",
        "    if size > limit:\n",
        (f"{FILES}::test_a_file_that_grows_while_it_is_read_is_limited_too",),
    ),
    Mutant(
        "a line of any length is a row",
        "archon/data/sources.py",
        "        if len(line) > ROW_BYTES:\n",
        "        if False:\n",
        (f"{FILES}::test_a_row_beyond_a_limit_is_named_by_its_line",),
    ),
    Mutant(
        "rows may fill the memory",
        "archon/data/sources.py",
        "        if self.n_bytes > self.limit:\n",
        "        if False:\n",
        (f"{FILES}::test_a_bomb_is_refused_before_it_fills_the_memory",),
    ),
    Mutant(
        "aliases of YAML may stand for any number of values",
        "archon/schema/yaml_files.py",
        "n_values := size(root)) > YAML_VALUES",
        "n_values := size(root)) > YAML_VALUES**9",
        (f"{FILES}::test_aliases_that_stand_for_a_billion_values_are_refused",),
    ),
    Mutant(
        "a truth value is a token id",
        "archon/data/mapping.py",
        "ids = _whole_numbers(row, ids_column, is_id=True)",
        "ids = _whole_numbers(row, ids_column)",
        (f"{IDS}::test_an_id_that_is_none_of_the_models_is_named_by_its_row",),
    ),
    Mutant(
        "the first id after the vocabulary is one of it",
        "archon/data/mapping.py",
        "if not 0 <= token < (vocab_size or 2**31)",
        "if not 0 <= token <= (vocab_size or 2**31)",
        (f"{IDS}::test_an_id_that_is_none_of_the_models_is_named_by_its_row",),
    ),
    Mutant(
        "an end id outside the vocabulary is accepted",
        "archon/checkpoint/tokenizer.py",
        "if size is not None and token_id >= size:",
        "if size is not None and token_id > size:",
        (f"{IDS}::test_an_end_id_outside_the_vocabulary_is_refused",),
    ),
    Mutant(
        "sys.exit in user code ends the command with its code",
        "archon/schema/user_code.py",
        "LEAVING = (SystemExit, GeneratorExit,",
        "LEAVING = (GeneratorExit,",
        (f"{EXITS}::test_a_dataset_function_that_leaves_is_an_error",),
    ),
    Mutant(
        "sys.exit in a task leaves the event loop",
        "archon/training/loop.py",
        "    loop.set_task_factory(create)\n",
        "",
        (f"{EXITS}::test_a_workflow_that_leaves_is_an_error",),
    ),
    Mutant(
        "an Arrow stream that was cut is read",
        "archon/data/sources.py",
        "        if stream.read() != end:\n",
        "        if False:\n",
        (f"{DAMAGE}::test_no_cut_of_a_file_goes_unseen",),
    ),
    Mutant(
        "a PNG of one row less is whole",
        "archon/data/whole_images.py",
        "    return size + len(inflate.flush()) < expected\n",
        "    return size + len(inflate.flush()) < expected - 400\n",
        (f"{WHOLE}::test_a_png_with_some_of_its_rows_is_refused",),
    ),
)
