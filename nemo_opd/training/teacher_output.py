"""Width of a teacher's output."""

from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.models.load import compute_dtype
from nemo_opd.models.stored_output import sparse_layout
from nemo_opd.served.answers import served_layout
from nemo_opd.teacher_cache.manifest import read_manifest
from nemo_opd.training.model_size import ModelSize


def output_columns(config: RunConfig, settings: Teacher, size: ModelSize, device: str) -> tuple[int | None, int]:
    """Return the width of the teacher's output (None: the vocabulary size) and its bytes per element."""
    itemsize = compute_dtype(settings.dtype, device).itemsize
    if settings.served is not None:
        return served_layout(settings.served, size.vocab_size).handed_bytes, 1
    if settings.cache is None:
        return None if config.handoff.type == "logits" else size.hidden_size, itemsize
    manifest = read_manifest(settings.cache)
    if manifest.form == "top_k":
        return sparse_layout(manifest).handed_bytes, 1
    return manifest.hidden_size, itemsize
