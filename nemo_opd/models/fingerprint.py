"""Which weights a model has, by their bytes."""

import hashlib
from pathlib import Path

from transformers.utils import cached_file

from nemo_opd.errors import ModelError
from nemo_opd.models.folder import reason, resolve, safetensors_files
from nemo_opd.progress import tracked


def weights_fingerprint(reference: str, *, key: str) -> str:
    """Return a hash of a model's weights and configuration. Reads all of its files. Raises ModelError naming `key`."""
    try:
        folder = Path(str(cached_file(resolve(reference), "config.json"))).parent
        weights = safetensors_files(folder) or sorted(folder.glob("*.bin"))
        digest = hashlib.sha256()
        for path in tracked([folder / "config.json", *weights], "hashing the weights", "files"):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ModelError(
            f"{key}={reference}: its weights cannot be read ({reason(error)}); check the folder"
        ) from error
    return digest.hexdigest()
