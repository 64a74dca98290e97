"""A new checkpoint is read back before an older one is removed."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from nemo_opd.checkpoint.shards import require_whole, require_whole_export
from nemo_opd.errors import CheckpointError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "step_000001"
    weights = {"first": torch.rand(40, 5), "second": torch.rand(7)}
    dcp.save({"model": weights}, checkpoint_id=folder / "state", no_dist=True)
    torch.save({"rng": torch.zeros(50)}, folder / "state" / "rank_00000.pt")
    (folder / "student").mkdir()
    save_file(weights, folder / "student" / "model.safetensors")
    return folder


def test_what_is_whole_passes(checkpoint: Path) -> None:
    require_whole(checkpoint, 1)
    require_whole_export(checkpoint / "student")


def cut(name: str) -> Callable[[Path], None]:
    """Truncate the file, as a full file system may do without an error."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 40)


def absent(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


SHARD, RANK, MODEL = "state/__0_0.distcp", "state/rank_00000.pt", "student/model.safetensors"
DAMAGES = {
    f"{SHARD} is cut": (cut(SHARD), r"state/__0_0\.distcp has [\d,]+ of [\d,]+ bytes"),
    f"{SHARD} is absent": (absent(SHARD), r"state/__0_0\.distcp has 0 of [\d,]+ bytes"),
    ".metadata is absent": (absent("state/.metadata"), r"state/\.metadata cannot be read"),
    f"{RANK} is cut": (cut(RANK), r"state/rank_00000\.pt is truncated"),
    f"{RANK} is absent": (absent(RANK), "state has no rank_00000.pt"),
    f"{MODEL} is cut": (cut(MODEL), r"student/model\.safetensors is missing or damaged"),
    f"{MODEL} is absent": (absent(MODEL), "student has no weights"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_is_named(checkpoint: Path, damage: str, tmp_path: Path) -> None:
    """Bug: the newest checkpoint is damaged, and the previous one was removed to make room."""
    folder = shutil.copytree(checkpoint, tmp_path / "step_000001")
    spoil, message = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(folder))} was not written correctly: {message}"):
        require_whole(folder, 1)


def test_a_checkpoint_without_the_files_of_a_rank_is_not_whole(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state has no rank_00001\.pt"):
        require_whole(checkpoint, 2)


def test_a_model_without_one_of_its_shards_is_not_whole(tmp_path: Path) -> None:
    """Bug: a missing file of an export in several files is not noticed."""
    save_file({"first": torch.rand(2)}, tmp_path / "model-1-of-2.safetensors")
    shards = {"first": "model-1-of-2.safetensors", "second": "model-2-of-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match=r"model-2-of-2\.safetensors is missing or damaged"):
        require_whole_export(tmp_path)
