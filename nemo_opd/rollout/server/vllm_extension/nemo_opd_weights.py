"""Code of vLLM's workers, in vLLM's own environment: found by PYTHONPATH, it imports nothing of this package.

vLLM imports it for `--worker-extension-cls`, before it makes the engine that `--weight-transfer-config` names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


class Extension:
    """Empty class, which vLLM requires of the module that it imports."""


@dataclass
class Files(WeightTransferInitInfo, WeightTransferUpdateInfo):
    files: list[str]
    """Paths of safetensors files, on a disk or in a process's memory (/proc/PID/fd/NUMBER), of a whole checkpoint."""


class _FilesEngine(WeightTransferEngine):
    """Weights from safetensors files that every worker can open, on any device."""

    init_info_cls = update_info_cls = Files
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Files) -> None:
        """Open all files. Raises where one cannot be read here; the weights stay as they are."""
        for file in init_info.files:
            with safe_open(file, framework="pt"):
                pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Files) -> None:
        self.model.load_weights(_tensors_in(update_info.files))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""


def _tensors_in(files: list[str]) -> Iterator[tuple[str, Any]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it has no __iter__
                yield name, tensors.get_tensor(name)


def _pack_tied_heads(model: Any) -> None:
    """Pack heads that are tied to the embeddings anew.

    On CPUs vLLM keeps the head in a packed form, which it renews only when it loads the head's own tensor. A tied head
    has none, and would keep the old weights.
    """
    modules = list(model.modules())
    embeddings = {id(each.weight) for each in modules if type(each).__name__ == "VocabParallelEmbedding"}
    for head in (each for each in modules if type(each).__name__ == "ParallelLMHead"):
        if id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)


WeightTransferEngineFactory.register_engine("nemo_opd", _FilesEngine)
