"""The contract on a real `transformers serve`, extended by token ids."""

import importlib.util
from collections.abc import Iterator

import pytest

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.rollout.base import EngineSpec
from nemo_opd.rollout.server.engine import ServerEngine
from tests.rollout.contract import ServerContract, Subject, save_folders

NEEDED = ("fastapi", "uvicorn", "openai")

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="`transformers serve` needs transformers[serving]",
    ),
]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("transformers")
    folders = save_folders(folder, extra_rows=5)
    with ServerEngine(
        ServerRollout(program="transformers", environment={"OMP_NUM_THREADS": "1"}),
        EngineSpec(folders.vocab_size, folders.end_ids, "float32", folder),
        folders.first,
    ) as engine:
        yield Subject(engine, folders)


class TestTransformers(ServerContract):
    pass
