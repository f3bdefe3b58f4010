"""Counts the leaves of each training command's configuration, as its `--help` shows them:

    python -m archon.cli.config_leaves

Every section is expanded once; one that is null unless given, such as `eval_data`, counts as one, and the help has its
fields at the end; a choice between methods counts as the choice and the settings of all methods; a mapping over another
section's fields, such as `ref`, counts as one.
"""

from __future__ import annotations

from collections import Counter

from archon.cli.config import import_schema, leaves

SCHEMAS = {
    "rl": "archon.rl.config:RLConfig",
    "sft": "archon.training.config:SFTConfig",
    "preference": "archon.training.config:PreferenceConfig",
    "bootstrap": "archon.training.config:BootstrapConfig",
}


def count(command: str) -> int:
    """Return how many leaves the configuration of `archon COMMAND` has."""
    return len(leaves(import_schema(SCHEMAS[command])))


def main() -> None:
    for command, schema in SCHEMAS.items():
        keys = leaves(import_schema(schema))
        sections = Counter(key.partition(".")[0] if "." in key else "alone" for key in keys)
        print(f"{command:<11}{len(keys):>4}  " + ", ".join(f"{name} {n}" for name, n in sections.most_common()))


if __name__ == "__main__":
    main()
