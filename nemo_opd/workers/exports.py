"""Exports of the student's weights to other processes: as a folder, or in memory."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from nemo_opd.config.model import Student
from nemo_opd.disk import storage_errors
from nemo_opd.files import settle
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.models.export import save_adapted, save_pretrained, whole_state
from nemo_opd.models.load import stored_dtype, tokenizer_of
from nemo_opd.models.lora import Adapters
from nemo_opd.rollout.weight_sync import HeldWeights


class Exports:
    """Exporter of a model. All ranks call each method with the model on the device; only rank 0 writes and holds.

    Communicates an all-gather of the trained weights to rank 0.
    """

    def __init__(self, settings: Student, model: PreTrainedModel, adapters: Adapters | None) -> None:
        self._settings, self._model, self._adapters = settings, model, adapters
        self._weights: HeldWeights | None = None

    def write(self, folder: Path, served_as: str | None) -> None:
        """Write model and tokenizer in Hugging Face format, in the initial model's dtype.

        With adapters, `student.lora.export` selects the form. served_as: name of a dtype; the full model is then
        written in it, for a server. Raises StorageError, on rank 0 only, if the disk fails.
        """
        tokenizer = tokenizer_of(self._settings, key="student")
        dtype = (
            stored_dtype(self._settings.model, key="student.model") if served_as is None else getattr(torch, served_as)
        )
        needed = dtype.itemsize * sum(parameter.numel() for parameter in self._model.parameters())
        advice = "move the run's directory, and continue with run.resume=auto"
        with storage_errors(folder, needed=needed, instead=advice):
            if self._adapters is None:
                save_pretrained(self._model, tokenizer, folder, dtype)
            else:
                form = "merged" if served_as is not None else self._adapters.settings.export
                save_adapted(self._model, self._adapters, tokenizer, folder, dtype, form)
            # A server loads its folder right away, so it need not be flushed to disk.
            if served_as is None and dist.get_rank() == 0:
                settle(folder)

    def hold(self, served_as: str) -> FileDescriptor | None:
        """Keep a copy of the exported weights in rank 0's memory; return its file on rank 0, None on other ranks."""
        state = whole_state(self._model, self._adapters, getattr(torch, served_as))
        self._weights = HeldWeights(state) if dist.get_rank() == 0 else None
        return None if self._weights is None else self._weights.file

    def release(self) -> None:
        if self._weights is not None:
            self._weights.close()
