"""Files that are named by options and rows: anything but a regular file of a limited size is one line, at once."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path

import pytest

from archon.cli.config import load_config, read_values
from archon.data import sources
from archon.data.images import open_image
from archon.data.sources import local_files, read_rows
from archon.schema import files
from archon.schema.capacity import memory_bytes
from archon.schema.errors import ConfigError, DatasetError, ImageError, UserError
from archon.schema.yaml_files import read_yaml
from archon.training.config import BootstrapConfig, SFTConfig

ROW = b'{"prompt": "1+1=", "response": "2"}\n'


@pytest.fixture
def odd_files(tmp_path, monkeypatch):
    """Paths that are not regular files, by kind, relative to the current folder."""
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    os.mkfifo("pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.jsonl")
        os.symlink("/dev/zero", "device.jsonl")
        os.symlink("loop.jsonl", "loop.jsonl")
        Path("folder.jsonl").mkdir()
        names = {kind: f"{kind}.jsonl" for kind in ("pipe", "socket", "device", "loop", "folder")}
        yield names | {"long": "a" * 5000 + ".jsonl", "nul": "a\0b.jsonl", "missing": "no.jsonl"}


REASONS = {
    "pipe": "it is a named pipe, not a regular file",
    "socket": "it is a socket or a device, not a regular file",
    "device": "it is a device, not a regular file",
    "loop": "Too many levels of symbolic links",
    "folder": "it is a directory, not a regular file",
    "long": "(5006 characters)",
    "nul": r"'a\x00b.jsonl'",
    "missing": "cannot be read: No such file",
}


def test_whatever_is_not_a_regular_file_is_refused_before_it_is_read(odd_files):
    readers = {
        "prompts": lambda path: files.read_limited(path, files.PROMPTS_BYTES),
        "yaml": read_yaml,
        "library": lambda path: files.require_regular(path, files.TOKENIZER_BYTES),
        "image": lambda path: open_image({"path": Path(path)}),
        "rows": read_rows,
    }
    for kind, path in odd_files.items():
        for name, read in readers.items():
            with pytest.raises(UserError) as error:
                read(path)
            text = str(error.value)
            assert len(text) < 600 and text.isprintable(), (kind, name)
            # A folder and a missing file are sources of rows with a message of their own.
            assert REASONS[kind] in text or (name == "rows" and kind in ("folder", "missing")), (kind, name, text)


@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_commands_refuse_them(archon, checkpoint, sft_overrides, odd_files, kind):
    path = odd_files[kind]
    asked = {
        "--prompts-file": ("generate", checkpoint, "--prompts-file", path),
        "train_data.path": ("sft", *sft_overrides, f"train_data.path={path}"),
        "--config": ("sft", *sft_overrides, "--config", path),
    }
    for option, arguments in asked.items():
        complaint = archon(*arguments).complaint
        assert REASONS[kind] in complaint, option


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
def test_a_pipe_in_a_checkpoint_is_refused(archon, checkpoint, name):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    complaint = archon("generate", checkpoint, "--prompt", "1+1=").complaint
    assert name in complaint and ("a named pipe, not a regular file" in complaint or "holds no" in complaint)


def test_a_folder_of_rows_with_pipes_and_loops_is_read_once(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(ROW)
    os.mkfifo(tmp_path / "notes.txt")
    for number in range(3):  # 3 loops would be 3^40 folders
        os.symlink(".", tmp_path / f"loop-{number}")
    assert [*local_files(tmp_path)] == ["train.jsonl"]
    assert len(read_rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("limit", "name", "read"),
    [
        ("PROMPTS_BYTES", "prompts.txt", "archon.cli.generate.read_prompts"),
        ("YAML_BYTES", "config.yaml", "archon.schema.yaml_files.read_yaml"),
        ("JSON_BYTES", "config.json", "archon.checkpoint.hf_reader.read_json"),
    ],
)
def test_a_file_larger_than_its_limit_is_not_read(tmp_path, monkeypatch, limit, name, read):
    from archon.schema.lazy import import_dotted

    size = 2**40
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, size)  # a hole takes no disk
    with pytest.raises(UserError, match=f"{size:,} bytes; expected at most {getattr(files, limit):,}"):
        import_dotted(read, "reader")(tmp_path / name)


def test_a_file_that_grows_while_it_is_read_is_limited_too():
    # The kernel says 0 bytes of every file in /proc.
    with pytest.raises(ConfigError, match="has 11 bytes; expected at most 10"):
        files.read_limited("/proc/self/status", 10)


ROWS_BEYOND_A_LIMIT = {
    "a long line": (b'{"a": "' + b"x" * 3000 + b'"}\n', "jsonl", ":2: the line is longer than 2,000 bytes"),
    "a long line of gzip": (b'{"a": "' + b"x" * 10**7 + b'"}\n', "jsonl.gz", ":2: the line is longer than 2,000 bytes"),
    "a long line of CSV": (b"x" * 3000 + b",1\n", "csv", ":2: the line is longer than 2,000 bytes"),
    "many keys": (json.dumps({str(n): 0 for n in range(60)}).encode(), "jsonl", ":2: .* an object has 60 keys"),
    "deep lists": (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}\n", "jsonl", ":2: .* nested deeper than 100 levels"),
    "deep objects": (b'{"a":' * 102 + b"1" + b"}" * 102, "jsonl", ":2: .* nested deeper than 100 levels"),
    "endless lists": (b"[" * 1500, "jsonl", ":2: .*(recursion|nested deeper)"),
}


@pytest.mark.parametrize("kind", ROWS_BEYOND_A_LIMIT)
def test_a_row_beyond_a_limit_is_named_by_its_line(tmp_path, monkeypatch, kind):
    content, suffix, reason = ROWS_BEYOND_A_LIMIT[kind]
    monkeypatch.setattr(sources, "ROW_BYTES", 2000)
    monkeypatch.setattr(sources, "ROW_COLUMNS", 50)
    first = b"a,b\n" if suffix == "csv" else b'{"a": [' + b"[" * 90 + b"]" * 90 + b"]}\n"
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(gzip.compress(first + content) if suffix.endswith("gz") else first + content)
    with pytest.raises(DatasetError, match=f"rows.{suffix}{reason}") as error:
        read_rows(file)
    assert len(str(error.value)) < 400


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROW_BYTES", 2**16)
    file = tmp_path / "bomb.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"a": 0}\n' * 500_000))
    assert file.stat().st_size < 20_000
    monkeypatch.setattr(sources, "MEMORY_SHARE", 2**20 / memory_bytes())
    with pytest.raises(DatasetError, match=r"bomb.jsonl.gz: its rows take more than 1,048,57\d bytes"):
        read_rows(file)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "jsonl.gz", "parquet"])
def test_a_file_larger_than_the_memory_is_refused_before_it_is_read(archon, checkpoint, tmp_path, suffix):
    file = tmp_path / f"rows.{suffix}"
    with file.open("wb") as sparse:
        sparse.truncate(2**42)
    run = [f"run_dir={tmp_path / 'run'}", f"model.path={checkpoint}", "total_steps=1", "batch_size=1"]
    complaint = archon("sft", *run, f"train_data.path={file}").complaint
    assert f"{file}: its rows take more than" in complaint and "of this machine's memory" in complaint


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_has_a_limit_of_columns_and_of_memory(tmp_path, monkeypatch, suffix):
    import pyarrow as pa
    from pyarrow import feather, parquet

    table, file = pa.table({f"c{n}": ["x"] * 3000 for n in range(20)}), tmp_path / f"rows.{suffix}"
    parquet.write_table(table, file) if suffix == "parquet" else feather.write_feather(table, str(file))
    monkeypatch.setattr(sources, "MEMORY_SHARE", 2**18 / memory_bytes())
    with pytest.raises(DatasetError, match=r"its rows take more than 262,14\d bytes"):
        read_rows(file)
    monkeypatch.setattr(sources, "ROW_COLUMNS", 10)
    with pytest.raises(DatasetError, match="20 columns; expected at most 10"):
        read_rows(file)


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [ha, ha]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def test_aliases_that_stand_for_a_billion_values_are_refused(tmp_path):
    (tmp_path / "few.yaml").write_text("model: &model {path: x}\nref: *model\n")
    assert "*model" in read_yaml(tmp_path / "few.yaml")
    for text, reason in (
        (laughs(40), "stand for [0-9,]{16,} values; expected at most 100,000"),
        ("a: &a [*a]\n", "an alias stands for a value that contains it"),
    ):
        (tmp_path / "bomb.yaml").write_text(text)
        with pytest.raises(ConfigError, match=reason):
            load_config(SFTConfig, tmp_path / "bomb.yaml", [])
    inline = "[&a [0, 0], " + ", ".join(f"&{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]" for n in range(24)) + "]"
    with pytest.raises(ConfigError, match=r"override .* its aliases stand for"):
        load_config(SFTConfig, None, [f"tags={inline}"])


@pytest.mark.parametrize(
    "value",
    [
        "${aN} ${aN}",
        "['${aN}', '${aN}']",
        "{b: '${aN}', c: '${aN}'}",
        "'${oc.select:aN}${.aN}'",
        "'${oc.env:NO,${aN}${aN}}'",
    ],
)
def test_interpolations_that_expand_without_end_are_refused_before_they_are_resolved(tmp_path, value):
    file = tmp_path / "bomb.yaml"
    file.write_text("a0: ha\n" + "".join(f"a{n}: {value.replace('aN', f'a{n - 1}')}\n" for n in range(1, 60)))
    with pytest.raises(
        ConfigError, match=r"bomb.yaml: its interpolations \$\{…\} expand to more than 10,000 references"
    ):
        load_config(SFTConfig, file, [])


def test_interpolations_of_overrides_are_limited_before_a_later_override_resolves_them():
    values = ", ".join(f"a{n}: '${{tags.a{n - 1}}} ${{tags.a{n - 1}}}'" for n in range(1, 60))
    with pytest.raises(ConfigError, match=r"override .* expand to more than 10,000 references"):
        load_config(SFTConfig, None, [f"tags={{a0: ha, {values}}}", "tags.a59.b=1"])
    with pytest.raises(ConfigError, match=r"override 'tags15=.* expand to more than 16,777,216 characters"):
        load_config(SFTConfig, None, [f"tags={'x' * 1_000_000}", *(f"tags{n}=${{tags}}" for n in range(20))])
    with pytest.raises(ConfigError, match=r"more than 20 interpolations \$\{…\} are inside each other"):
        load_config(SFTConfig, None, [f"run_dir={'${' * 3000}a{'}' * 3000}"])


@pytest.mark.parametrize("text", ["hf_config: {a: [NUMBER]}", "seed: -NUMBER"])
def test_an_integer_that_python_does_not_print_is_refused(tmp_path, text):
    (tmp_path / "long.yaml").write_text(text.replace("NUMBER", "0x" + "f" * 5000))
    with pytest.raises(ConfigError, match=r"long.yaml: .*got a number of thousands of digits, expected one of at"):
        load_config(BootstrapConfig, tmp_path / "long.yaml", [])
    with pytest.raises(
        ConfigError, match=r"override 'hf_config.*': hf_config.hidden_size: got a number of thousands of digits"
    ):
        load_config(BootstrapConfig, None, ["hf_config.hidden_size=0x" + "f" * 5000])


def test_interpolations_within_the_limits_are_resolved(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "run_dir: ${.${seed}}/${model.path}/${oc.select:total_steps}\n7: chosen\nseed: 7\ntotal_steps: 3\n"
        "model: {path: m, layout: '${oc.env:LAYOUT,d1}'}\n"
    )
    values = read_values(file, ["train_data.path=${..model.path}"])
    assert values["run_dir"] == "chosen/m/3" and values["model"]["layout"] == "d1"
    assert values["train_data"]["path"] == "m"


def test_rows_name_images_that_are_regular_files(odd_files):
    for kind in ("pipe", "device"):
        with pytest.raises(ImageError, match=REASONS[kind]):
            open_image(odd_files[kind])
