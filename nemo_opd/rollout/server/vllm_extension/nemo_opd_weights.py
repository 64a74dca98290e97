"""Code for vLLM's workers, in vLLM's own environment; on its PYTHONPATH, without imports from this package.

vLLM imports it for `--worker-extension-cls`, before it creates the engine of `--weight-transfer-config`.
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
    """An empty class, as vLLM requires one in this module."""


@dataclass
class Files(WeightTransferInitInfo, WeightTransferUpdateInfo):
    files: list[str]
    """Safetensors files of a complete checkpoint, on disk or in a process's memory (/proc/PID/fd/NUMBER)."""


class _FilesEngine(WeightTransferEngine):
    """A transfer engine that reads safetensors files, on any device. Every worker must be able to open the files."""

    init_info_cls = update_info_cls = Files
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Files) -> None:
        """Open all files. Raises if one cannot be read here; the old weights stay."""
        for file in init_info.files:
            with safe_open(file, framework="pt"):
                pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Files) -> None:
        self.model.load_weights(_load_tensors(update_info.files))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Do nothing, since the engine holds no resources."""


def _load_tensors(files: list[str]) -> Iterator[tuple[str, Any]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it has no __iter__
                yield name, tensors.get_tensor(name)


def _pack_tied_heads(model: Any) -> None:
    """Repack heads that are tied to the embeddings.

    On CPUs, vLLM keeps a packed copy of the head, which it renews only when it loads the head's own tensor. A tied head
    has no such tensor, so its packed copy would keep the old weights.
    """
    modules = list(model.modules())
    embeddings = {id(module.weight) for module in modules if type(module).__name__ == "VocabParallelEmbedding"}
    for head in (module for module in modules if type(module).__name__ == "ParallelLMHead"):
        if id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)


WeightTransferEngineFactory.register_engine("nemo_opd", _FilesEngine)
