"""Folders of torch.distributed.checkpoint: PyTorch reads archon's, archon reads PyTorch's, and refuses bad ones."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForCausalLM

from archon.checkpoint import tensor_reader
from archon.checkpoint.convert import convert, detect_format
from archon.checkpoint.formats.dcp.folder import open_dcp
from archon.checkpoint.formats.dcp.names import MARKER_FILE, Names
from archon.checkpoint.safetensors_file import RegularFile, TensorEntry
from archon.cli import main
from archon.models import get_model_spec
from archon.schema.errors import CheckpointError, ConfigError
from tests.checkpoint.conversions import FAMILIES, SIZES, edit, read_back
from tests.checkpoint.tiny_checkpoints import assert_bitwise, config_with, make_checkpoint

LLAMA: dict[str, Any] = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 6}
ALL: dict[str, dict[str, Any]] = FAMILIES | {"llama": LLAMA}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path, state: dict[str, Any]) -> Path:
    """Save by PyTorch, in one process."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def load(folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read by PyTorch, strictly, into tensors like those given."""
    state = {name: torch.full_like(tensor, 7) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def native_state(weights: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    """The `state_dict()` of archon's model of a family with these weights."""
    config = config_with(**changes)
    spec = get_model_spec(config["model_type"])
    model = spec.model_class(spec.state_dict_adapter_class(config).args)
    model.load_state_dict(spec.state_dict_adapter_class(config).from_hf(weights), strict=False)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ALL)
def test_pytorch_loads_it_into_a_model_and_what_it_saves_is_read(tmp_path: Path, family: str, tied: bool) -> None:
    changes = ALL[family] | {"tie_word_embeddings": tied}
    folder, weights = make_checkpoint(tmp_path / "hf", dtype=torch.bfloat16 if tied else torch.float32, **changes)
    expected = native_state(weights, **changes)
    expected = {name: tensor.to(weights["model.norm.weight"].dtype) for name, tensor in expected.items()}

    convert(folder, tmp_path / "dcp", "dcp")

    assert detect_format(tmp_path / "dcp") == "dcp"
    assert_bitwise(load(tmp_path / "dcp", expected), expected)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "one.pt")
    assert_bitwise(torch.load(tmp_path / "one.pt", weights_only=True), expected)

    save(tmp_path / "theirs", {"model": expected, "optim": {"step": 3, "state": {"norm.weight": torch.ones(2)}}})
    names: Names | None = "native" if family == "llama" else None
    convert(tmp_path / "theirs", tmp_path / "back", "hf", like=folder, names=names)
    convert(tmp_path / "dcp", tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "again", "hf", like=folder)

    assert_bitwise(read_back(tmp_path / "back"), weights)
    assert_bitwise(read_back(tmp_path / "again"), weights)


@pytest.mark.parametrize("family", ALL)
def test_hugging_face_names(tmp_path: Path, family: str) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **ALL[family])

    convert(folder, tmp_path / "dcp", "dcp", names="hf")
    convert(tmp_path / "dcp", tmp_path / "back", "hf")

    assert_bitwise(load(tmp_path / "dcp", weights), weights)
    assert_bitwise(read_back(tmp_path / "back"), weights)


def test_a_model_of_transformers_is_loaded_and_saved(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", tie_word_embeddings=True, **SIZES)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))

    convert(folder, tmp_path / "dcp", "dcp", names="hf")
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_bitwise({name: tensor for name, tensor in state.items() if name != "lm_head.weight"}, weights)

    save(tmp_path / "theirs", {"app": {"model": state}})
    convert(tmp_path / "theirs", tmp_path / "back", "hf", like=folder)
    assert_bitwise(read_back(tmp_path / "back"), weights)


# torchtitan's adapters read these numbers from the config that they are given.
def titan_config(config: dict[str, Any]) -> Any:
    attention = SimpleNamespace(
        n_heads=config["num_attention_heads"], n_kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"]
    )
    moe = SimpleNamespace(num_experts=config["num_experts"]) if "num_experts" in config else None
    layers = [SimpleNamespace(attention=attention, moe=moe) for _ in range(config["num_hidden_layers"])]
    return SimpleNamespace(layers=layers, dim=config["hidden_size"], enable_weight_tying=config["tie_word_embeddings"])


def titan_state(folder: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What torchtitan's own adapter makes of a Hugging Face checkpoint."""
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    if not find_spec("triton"):  # compiled on import, and unused here
        sys.modules.setdefault(kernels, mock.MagicMock())
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "llama":
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter as Adapter
    else:
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter as Adapter
    adapter: Any = Adapter(titan_config(config), None)
    adapter._validate_hf_rope_config = lambda *_: None
    return adapter.from_hf(dict(weights))


# No extra brings torchtitan; without it, the names are tested below.
if find_spec("torchtitan") and find_spec("spmd_types"):

    @pytest.mark.slow
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    @pytest.mark.parametrize("family", ["llama", "qwen3", "moe"])
    def test_torchtitans_adapter_gives_the_same(tmp_path: Path, family: str, tied: bool) -> None:
        folder, weights = make_checkpoint(
            tmp_path / "hf", **ALL[family] | {"tie_word_embeddings": tied, "mlp_only_layers": None}
        )
        expected = titan_state(folder, weights)

        convert(folder, tmp_path / "dcp", "dcp", names="torchtitan")
        save(tmp_path / "theirs", expected | {"optimizer": {"norm.weight": torch.ones(3)}, "train_state": {"step": 3}})
        convert(tmp_path / "theirs", tmp_path / "back", "hf", like=folder)

        assert_bitwise(load(tmp_path / "dcp", expected), expected)
        assert_bitwise(read_back(tmp_path / "back"), weights)


def test_torchtitans_names_and_the_rows_of_its_llama(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **LLAMA)
    convert(folder, tmp_path / "dcp", "dcp", names="torchtitan")
    convert(tmp_path / "dcp", tmp_path / "back", "hf")
    with open_dcp(tmp_path / "dcp") as stored:
        query, key = (stored[f"layers.1.attention.qkv_linear.w{p}.weight"].read() for p in "qk")
        assert "lm_head.weight" in stored and "output.weight" not in stored

    assert_bitwise(read_back(tmp_path / "back"), weights)
    for theirs, name in ((query, "q"), (key, "k")):
        ours = weights[f"model.layers.1.self_attn.{name}_proj.weight"]
        for row in range(theirs.shape[0]):
            head, place = divmod(row, 6)  # pairs of neighbors there, of halves here
            assert torch.equal(theirs[row], ours[head * 6 + place % 2 * 3 + place // 2])


def test_torchtitan_of_before_0_3_and_archon_name_a_llama_alike(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **LLAMA)
    convert(folder, tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "hf")  # archon's own says so
    (tmp_path / "dcp" / MARKER_FILE).unlink()

    with pytest.raises(ConfigError, match=r"its names fit native and torchtitan before 0.3, which order the rows"):
        convert(tmp_path / "dcp", tmp_path / "guessed", "hf")
    convert(tmp_path / "dcp", tmp_path / "native", "hf", names="native")
    convert(tmp_path / "dcp", tmp_path / "titan", "hf", names="torchtitan")

    assert_bitwise(read_back(tmp_path / "native"), weights)
    query = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(read_back(tmp_path / "titan")[query], weights[query])


def test_torchtitan_has_no_such_model(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **FAMILIES["qwen2"])
    with pytest.raises(ConfigError, match=r"known for llama, qwen3, qwen3_moe without biases, not for this qwen2"):
        convert(folder, tmp_path / "dcp", "dcp", names="torchtitan")
    assert [*tmp_path.iterdir()] == [folder]


def test_a_critic(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    edit(
        folder / "model.safetensors", lambda t: (t.pop("lm_head.weight"), t.update({"score.weight": torch.ones(1, 24)}))
    )
    convert(folder, tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "hf")
    assert_bitwise(read_back(tmp_path / "back"), read_back(folder))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **SIZES | {"num_hidden_layers": 6})
    read, alive, most = tensor_reader.read_region, [0], [0]

    def counted(file: RegularFile, entry: TensorEntry, region: Any) -> Tensor:
        part = read(file, entry, region)
        alive[0] += part.nbytes
        most[0] = max(most[0], alive[0])
        weakref.finalize(part, lambda size: alive.__setitem__(0, alive[0] - size), part.nbytes)
        return part

    monkeypatch.setattr(tensor_reader, "read_region", counted)
    convert(folder, tmp_path / "dcp", "dcp")

    largest = max(tensor.nbytes for tensor in weights.values())
    assert 0 < most[0] <= 3 * largest < sum(tensor.nbytes for tensor in weights.values()) / 3


def test_any_region_of_any_stored_order_is_read(tmp_path: Path) -> None:
    plain = torch.randn(5, 6, 4)
    state = {
        "plain": plain,
        "transposed": plain.permute(2, 0, 1),
        "part": plain[1:3],
        "one": plain[:1, :, :1].transpose(0, 1),
        "number": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "half": plain.half().transpose(0, 2),
    }
    save(tmp_path / "dcp", state)
    with open_dcp(tmp_path / "dcp") as stored:
        assert_bitwise({name: tensor.read() for name, tensor in stored.items()}, state)
        for name in ("plain", "transposed", "half"):
            region = (slice(1, 3), slice(0, 4), slice(2, 3))
            assert torch.equal(stored[name].read(region), state[name][region])


def test_a_view_into_a_larger_storage_is_read(stored: Path, tmp_path: Path) -> None:
    larger = torch.arange(60.0).view(10, 6)
    torch.save(larger[3:7], tmp_path / "view.pt")
    content = (tmp_path / "view.pt").read_bytes()
    (stored / "view.distcp").write_bytes(content)
    change_metadata(stored, place("w", relative_path="view.distcp", offset=0, length=len(content)))
    with open_dcp(stored) as tensors:
        assert torch.equal(tensors["w"].read(), larger[3:7])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **LLAMA)

    def run(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit):
            main(["convert", *map(str, arguments)])
        return "".join(capsys.readouterr())

    told = run(folder, tmp_path / "dcp", "--to", "dcp", "--names", "torchtitan")
    assert told.startswith(f"llama, {len(weights)} tensors: hf ") and f" GB in {len(weights)} files" in told
    run(tmp_path / "dcp", tmp_path / "back", "--to", "hf")

    assert_bitwise(read_back(tmp_path / "back"), weights)
    told = run(folder, tmp_path / "no", "--to", "native", "--names", "hf")
    assert "--names requires the dcp format; got --from hf and --to native" in " ".join(told.split())


# Damage: what is wrong with a folder, and what is said of it.


def change_metadata(folder: Path, change: Any) -> None:
    """Rewrite `.metadata`: `change` gets PyTorch's object."""
    file = folder / ".metadata"
    content = pickle.loads(file.read_bytes())  # noqa: S301 - written by this test
    change(content)
    file.write_bytes(pickle.dumps(content))


def entry(content: Any, name: str) -> Any:
    return next(index for index in content.storage_data if index.fqn == name)


def place(name: str, **changes: Any) -> Any:
    def change(content: Any) -> None:
        for field, value in changes.items():
            setattr(content.storage_data[entry(content, name)], field, value)

    return change


def described(name: str, **changes: Any) -> Any:
    return lambda content: [setattr(content.state_dict_metadata[name], *item) for item in changes.items()]


def chunks(*regions: tuple[tuple[int, int], tuple[int, int]]) -> Any:
    """Describe `w` [4, 6] as chunks (offsets, sizes), all stored where it is."""

    def change(content: Any) -> None:
        info = content.storage_data.pop(entry(content, "w"))
        found = [dcp_metadata.ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in regions]
        content.state_dict_metadata["w"].chunks = found
        for offsets, _ in regions:
            content.storage_data[dcp_metadata.MetadataIndex("w", offsets)] = info

    return change


DAMAGE: dict[str, tuple[Any, str]] = {
    "outside": (place("w", relative_path="../w.distcp"), "expected the name of a file in the folder"),
    "absolute": (place("w", relative_path="/etc/passwd"), "expected the name of a file in the folder"),
    "the folder": (place("w", relative_path=".."), "expected the name of a file in the folder"),
    "no file": (place("w", relative_path="other.distcp"), "other.distcp: cannot be read"),
    "beyond the end": (place("w", offset=10**6), r"places 'w' up to byte .*truncated\?"),
    "negative": (place("w", offset=-1), "is not a valid count"),
    "too short": (place("w", length=90), "has 90 bytes, too few for"),
    "cut": (place("w", length=1000), "no valid torch.save archive"),
    "shifted": (place("w", offset=3), "no valid torch.save archive|truncated"),
    "compressed": (place("w", transform_descriptors=["zstd"]), "compressed or otherwise transformed"),
    "another dtype": (
        described("w", properties=dcp_metadata.TensorProperties(torch.int32)),
        r"it holds torch.float32 \[4, 6\], .metadata says torch.int32",
    ),
    "another shape": (chunks(((0, 0), (2, 6)), ((2, 0), (2, 6))), r"it holds torch.float32 \[4, 6\], .metadata says"),
    "an overlap": (chunks(((0, 0), (3, 6)), ((2, 0), (1, 6))), r"chunks of 'w' at \[0, 0\] and \[2, 0\] overlap"),
    "a gap": (chunks(((0, 0), (3, 6))), "hold 18 elements, its shape"),
    "an overhang": (chunks(((2, 0), (4, 6))), "exceeds its shape"),
    "a huge shape": (described("w", size=torch.Size((2**40, 2**20))), "hold 24 elements"),
    "no chunk": (described("w", chunks=[]), "hold 0 elements"),
    "no place": (lambda content: content.storage_data.pop(entry(content, "w")), "is stored nowhere"),
    "no places": (lambda content: setattr(content, "storage_data", None), "storage_data is a NoneType"),
    "nothing": (lambda content: setattr(content, "state_dict_metadata", [1]), "state_dict_metadata is a list"),
    "a text": (lambda content: content.state_dict_metadata.update(w="a"), "'w' does not describe"),
    "a number": (
        lambda content: content.state_dict_metadata.update({5: None}),
        "a repeated name or one that is no string",
    ),
    "an info for a tensor": (
        lambda content: content.state_dict_metadata.update(w=_StorageInfo("a", 0, 1)),
        "has torch.distributed.checkpoint.filesystem._StorageInfo where",
    ),
}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return save(tmp_path / "dcp", {"w": torch.arange(24.0).view(4, 6), "v": torch.ones(3)})


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told(stored: Path, what: str) -> None:
    change, message = DAMAGE[what]
    change_metadata(stored, change)
    with pytest.raises(CheckpointError, match=message), open_dcp(stored) as tensors:
        tensors["w"].read()


def test_every_changed_byte_of_the_description_is_refused_or_harmless(stored: Path) -> None:
    content = (stored / ".metadata").read_bytes()
    generator, refusals = torch.Generator().manual_seed(0), list[str]()
    for position in torch.randperm(len(content), generator=generator)[:250].tolist():
        byte = int(torch.randint(256, (), generator=generator))
        (stored / ".metadata").write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
        try:  # any other error fails the test
            with open_dcp(stored) as tensors:
                for tensor in tensors.values():
                    tensor.read()
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 50 and all(str(stored) in refusal for refusal in refusals)


@pytest.mark.parametrize("length", [0, 1, 500, -700, -1])
def test_a_truncated_file(stored: Path, length: int) -> None:
    file = stored / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: it has .* truncated"), open_dcp(stored):
        pass


class Hostile:
    """Pickled, it is a call of `touch` for a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return subprocess.call, (["touch", str(self.path)],)


def test_a_hostile_description_is_not_executed(stored: Path, tmp_path: Path) -> None:
    change_metadata(stored, lambda content: setattr(content, "planner_data", {"a": Hostile(tmp_path / "executed")}))
    with pytest.raises(CheckpointError, match=r"names 'subprocess.call', which is not among"), open_dcp(stored):
        pass
    with pytest.raises(CheckpointError, match=r"names 'subprocess.call', which is not among"):
        convert(stored, tmp_path / "out", "hf", like=make_checkpoint(tmp_path / "hf", **SIZES)[0])
    assert not (tmp_path / "executed").exists()


def test_a_hostile_tensor_is_not_executed(stored: Path, tmp_path: Path) -> None:
    torch.save(Hostile(tmp_path / "executed"), tmp_path / "hostile.pt")
    content = (tmp_path / "hostile.pt").read_bytes()
    (stored / "__0_0.distcp").write_bytes(content)
    change_metadata(stored, place("w", offset=0, length=len(content)))
    change_metadata(stored, place("v", offset=0, length=len(content)))
    with pytest.raises(CheckpointError, match=r"names '\w+.call', which is not among"), open_dcp(stored) as tensors:
        tensors["w"].read()
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"x": torch.ones(3)}, "its 1 tensors do not match this model: 25 names of the nearest scheme"),
        ("dropped", r"1 names of the nearest scheme, native, are missing, 'model.norm.weight' first"),
        ("another", "tensor 'model.extra' is not part of this model"),
        ("twice", "it holds two models, at 'model.' and 'ema.'"),
        ("shape", r"tensor 'model.norm.weight' has shape \[25\], expected \[24\]"),
        ("integers", "'model.norm.weight' is torch.int64; expected float"),
        ("bias", "1 balancing biases are not 0"),
    ],
    ids=str,
)
def test_another_models_tensors(tmp_path: Path, state: Any, message: str) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", **SIZES)
    model = native_state(weights, **SIZES)
    changes: dict[str, Any] = {
        "dropped": lambda: model.pop("norm.weight"),
        "another": lambda: model.update(extra=torch.ones(1)),
        "shape": lambda: model.update({"norm.weight": torch.ones(25)}),
        "integers": lambda: model.update({"norm.weight": torch.ones(24, dtype=torch.int64)}),
        "bias": lambda: model.update({"layers.1.moe.expert_bias_E": torch.tensor([0.0, 1.0])}),
    }
    changes.get(state if isinstance(state, str) else "", lambda: None)()
    given = state if isinstance(state, dict) else {"model": model} | ({"ema": model} if state == "twice" else {})
    save(tmp_path / "dcp", given)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "dcp", tmp_path / "out", "hf", like=folder)
    assert not (tmp_path / "out").exists()


def test_a_tied_copy_that_differs(tmp_path: Path) -> None:
    folder, weights = make_checkpoint(tmp_path / "hf", tie_word_embeddings=True, **SIZES)
    state = dict(weights)
    save(tmp_path / "without", state)
    convert(tmp_path / "without", tmp_path / "back", "hf", like=folder)
    assert_bitwise(read_back(tmp_path / "back"), weights)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][60, 23] += 1
    save(tmp_path / "dcp", state)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from the embedding"):
        convert(tmp_path / "dcp", tmp_path / "out", "hf", like=folder)


@pytest.mark.parametrize("marker", ["{", "[]", '{"names": "other"}', '{"names": [1]}', "[" * 100_000])
def test_a_marker_that_says_nothing(tmp_path: Path, marker: str) -> None:
    folder, _ = make_checkpoint(tmp_path / "hf", **SIZES)
    convert(folder, tmp_path / "dcp", "dcp")
    (tmp_path / "dcp" / MARKER_FILE).write_text(marker)
    with pytest.raises(CheckpointError, match=MARKER_FILE):
        convert(tmp_path / "dcp", tmp_path / "out", "hf")
    shutil.rmtree(tmp_path / "dcp")
