"""`archon new-model PATH`: write the file of a new model family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "name": "new-model",
    "help": "Write the file of a new family from a config.\n\n"
    "Compares config and checkpoint keys with every registered family, prints the coverage of the nearest family, and "
    "writes a copy of its file under the new name.",
}


def command(
    path: Annotated[Path, typer.Argument(metavar="CONFIG|FOLDER", help="config.json or a checkpoint folder")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write; default: MODEL_TYPE.py in the current folder")
    ] = None,
) -> None:
    """Write the file of a new model family."""
    from archon.schema.errors import ConfigError
    from archon.tools.check.new_family import coverages, describe_coverage, family_source, read_new

    config, shapes = read_new(path)
    model_type = config["model_type"]
    file = output or Path(f"{model_type}.py")
    if file.exists():
        raise ConfigError(f"{file} already exists; choose another --output")
    nearest = coverages(config, shapes)[0]
    source = family_source(nearest, model_type)
    file.write_text(source, encoding="utf-8")
    print("\n".join([model_type, *describe_coverage(nearest, config, shapes)]))
    print(f"  written       {file}: {len(source.splitlines())} lines; next:")
    print(f"    archon check-model {file}   # add --reference TYPE if transformers has it under another name")
