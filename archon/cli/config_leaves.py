"""Leaf counts of each training command's configuration: `python -m archon.cli.config_leaves`.

See `archon.cli.config.leaves`. A section that overrides the fields of another one, such as `ref`, is one leaf.
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
    """Return the number of leaves in the configuration of `archon COMMAND`."""
    return len(leaves(import_schema(SCHEMAS[command])))


def main() -> None:
    """Print the leaf count of every training command by section."""
    for command, schema in SCHEMAS.items():
        keys = leaves(import_schema(schema))
        sections = Counter(key.partition(".")[0] if "." in key else "alone" for key in keys)
        print(f"{command:<11}{len(keys):>4}  " + ", ".join(f"{name} {n}" for name, n in sections.most_common()))


if __name__ == "__main__":
    main()
