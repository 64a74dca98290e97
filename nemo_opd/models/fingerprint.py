"""Hash of a model's weights."""

import hashlib
from pathlib import Path

from transformers.utils import cached_file

from nemo_opd.errors import ModelError
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.folder import reason
from nemo_opd.models.stored_weights import all_weight_files
from nemo_opd.progress import tracked


def weights_fingerprint(reference: str, *, key: str) -> str:
    """Return a hash of a model's weights and configuration. Downloads a hub model and reads all of its weight files.

    Raises ModelError naming `key`.
    """
    try:
        config = Path(str(cached_file(resolve(reference), "config.json")))
        digest = hashlib.sha256()
        for path in tracked([config, *all_weight_files(reference)], "hashing the weights", "files"):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}={reference}: its weights cannot be read ({reason(error)}); check the folder, or whether the hub "
            "can be reached"
        ) from error
    return digest.hexdigest()
