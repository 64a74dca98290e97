"""No code in a checkpoint is run: in its index, in values other than tensors, or in the files of its ranks."""

import ast
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.lr_scheduler import ConstantLR

import nemo_opd
from nemo_opd.checkpoint.convert import shapes_in
from nemo_opd.checkpoint.shards import read_metadata, wrong_shards
from nemo_opd.checkpoint.state import load_state, save_state
from nemo_opd.errors import CheckpointError


@dataclass(frozen=True)
class Hostile:
    """Makes the folder `mark` if it is unpickled with code allowed."""

    mark: Path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@dataclass
class Trained:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: ConstantLR

    def save(self, folder: Path) -> None:
        save_state(folder, self.model, self.optimizer, self.scheduler)

    def load(self, folder: Path) -> None:
        load_state(folder, self.model, self.optimizer, self.scheduler)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def new(*, fused: bool | None = None) -> Trained:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    return Trained(model, optimizer, ConstantLR(optimizer))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "state"
    new().save(folder)
    return folder


@pytest.fixture
def state(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "state")


def test_a_state_without_harm_comes_back(tmp_path: Path) -> None:
    first, second = new(), new()
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for parameter, expected in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    assert second.optimizer.state_dict()["param_groups"] == first.optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize(("written", "read"), [(True, None), (None, True)])
def test_the_optimizers_kernels_are_those_of_the_machine_that_reads(
    tmp_path: Path, written: bool | None, read: bool | None
) -> None:
    """Bug: a state from a CPU turns fused kernels off on a GPU."""
    first, second = new(fused=written), new(fused=read)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for trained in (first, second):
        for parameter in trained.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        trained.optimizer.step()

    assert second.optimizer.param_groups[0]["fused"] is read
    for parameter, expected in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_the_index_is_read_as_torch_reads_it(saved: Path) -> None:
    expected = FileSystemReader(saved).read_metadata()
    expected.storage_meta.load_id = None
    expected.storage_meta.checkpoint_id = str(saved)
    assert read_metadata(saved) == expected


def test_every_dtype_and_a_tensor_in_parts(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    tensors = {str(dtype): torch.ones(2, 2).to(dtype) for dtype in dtypes}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    entries = read_metadata(tmp_path).state_dict_metadata
    assert {name: entry.properties.dtype for name, entry in entries.items()} == {str(dtype): dtype for dtype in dtypes}


def edited(state: Path, edit: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((state / ".metadata").read_bytes())
    edit(metadata)
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


def refused(state: Path) -> str:
    """Return the error for this index; all its readers must refuse it."""
    with pytest.raises(CheckpointError) as caught:
        new().load(state)
    with pytest.raises(CheckpointError):
        shapes_in(state)
    assert list(wrong_shards(state))
    assert "\n" not in str(caught.value)
    return str(caught.value)


PLACES: dict[str, Callable[[Metadata, object], object]] = {
    "the plan": lambda metadata, evil: setattr(metadata, "planner_data", evil),
    "a size": lambda metadata, evil: setattr(metadata.state_dict_metadata["model.weight"], "size", evil),
    "an entry": lambda metadata, evil: metadata.state_dict_metadata.update({"model.weight": evil}),
    "a place": lambda metadata, evil: setattr(next(iter(metadata.storage_data.values())), "relative_path", evil),
    "where it was": lambda metadata, evil: setattr(metadata.storage_meta, "checkpoint_id", evil),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_in_the_index_is_not_run(place: str, state: Path, tmp_path: Path) -> None:
    edited(state, lambda metadata: PLACES[place](metadata, Hostile(tmp_path / "mark")))

    assert "it names posix.mkdir, which no run writes there; it was not run" in refused(state)
    assert not (tmp_path / "mark").exists()


ATTACKS = {
    "a whole pickle": b"cposix\nmkdir\n(V{mark}\ntR.",
    "a newer protocol": b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c{length}{mark}\x85R.",
    "an instance": b"(iposix\nmkdir\n.",
    "an attribute of a class that is admitted": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__class__\x93.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0bos.makedirs0\x93.",
    "a module of torch": b"ctorch.serialization\nload\n.",
    "an extension": b"\x82\x01.",
    "what persists": b"Vposix\nQ.",
    "attributes set on an admitted class": b"ctorch\nSize\n(N}V__reduce__\nI1\nstb.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_index_of_another_kind_is_refused(attack: str, state: Path, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark").encode()
    content = ATTACKS[attack].replace(b"{length}", bytes([len(mark)])).replace(b"{mark}", mark)
    (state / ".metadata").write_bytes(content)

    refused(state)
    assert not (tmp_path / "mark").exists()
    assert torch.Size([1]).__reduce__ != 1


def test_one_value_that_is_mentioned_without_end(state: Path) -> None:
    """Bug: hours for a few hundred bytes: a pair of one value twice, a pair of this pair twice, and so on."""
    pairs = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
    (state / ".metadata").write_bytes(b"\x80\x02N\x85q\x00" + pairs + b".")
    assert "it is not an index of tensors" in refused(state)


def move(path: str, metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = path


def test_a_file_outside_the_state_is_not_read(state: Path, tmp_path: Path) -> None:
    shutil.copy(state / "__0_0.distcp", tmp_path / "other")
    for path in ("../other", str(tmp_path / "other")):
        edited(state, partial(move, path))
        assert f"no run has written a tensor in {path!r}" in refused(state)


def test_an_index_of_each_rank_is_not_looked_for(state: Path, tmp_path: Path) -> None:
    """Bug: torch unpickles the index of a single rank if the common index cannot be read."""
    (state / "__0.metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "mark")))
    (state / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        new().load(state)
    assert not (tmp_path / "mark").exists()


def test_code_in_what_is_no_tensor_is_not_run(tmp_path: Path) -> None:
    trained = new()
    weights, optimizer = get_state_dict(trained.model, trained.optimizer)
    optimizer["param_groups"][0]["lr"] = Hostile(tmp_path / "mark")
    dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=tmp_path / "state", no_dist=True)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        trained.load(tmp_path / "state")

    assert "\n" not in str(caught.value)
    assert not (tmp_path / "mark").exists()


JUNK = {
    "code": lambda mark: Hostile(mark),
    "nothing": lambda mark: {},
    "a list": lambda mark: [1],
    "no scheduler": lambda mark: {"scheduler": 3, "rng": {}},
    "no generator": lambda mark: {"scheduler": {}, "rng": {}},
    "a short generator": lambda mark: {"scheduler": {}, "rng": {"cpu": torch.zeros(3)}},
}


@pytest.mark.parametrize("kind", JUNK)
def test_what_a_rank_has_written(kind: str, state: Path, tmp_path: Path) -> None:
    torch.save(JUNK[kind](tmp_path / "mark"), state / "rank_00000.pt")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        new().load(state)

    assert "\n" not in str(caught.value)
    assert not (tmp_path / "mark").exists()


UNSAFE = {"pickle.load", "pickle.loads", "np.load", "numpy.load", "yaml.load", "dcp.load"}
ALLOWED = {
    "loader.py: pickle.loads",  # its own pickles
    "files.py: yaml.load",  # with a loader safer than SafeLoader
    "process_group.py: pickle.loads",  # after a check of the signature
    "template_process.py: pickle.loads",  # from its parent process
    "shards.py: dcp.load",  # with the reader and the planner tested here
}


def readers(file: Path) -> Iterator[str]:
    """Yield calls that may run code from a file: all of UNSAFE, and torch.load without weights_only=True."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            is_safe = any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
            if call in UNSAFE or (call == "torch.load" and not is_safe):
                yield f"{file.name}: {call}"


def test_nothing_else_unpickles() -> None:
    root = Path(nemo_opd.__file__).parents[1]
    files = [file for part in ("nemo_opd", "tools", "examples") for file in (root / part).rglob("*.py")]
    assert {reader for file in files for reader in readers(file)} == ALLOWED
