"""Objects between ranks, signed with a key of the run.

PyTorch's collectives for objects, which checkpoints use too, unpickle what they receive, and whoever can connect to a
rank's port can send something. So a message without a valid signature is refused before it is unpickled.
"""

import hmac
import os
import pickle
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nemo_opd.errors import ClusterError

_DIGEST = "sha256"
_DIGEST_BYTES = 32
_FILE = "nemo_opd_key"
_FOLDER, _READ = "folder", "read_by_{}"
"""Keys of the store: the folder with the key, and whether a rank has read it."""


def new_key() -> bytes:
    return secrets.token_bytes(_DIGEST_BYTES)


def sign_objects(key: bytes) -> None:
    """Sign the objects that this process sends in collectives, and accept only objects signed with the same key."""

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self.file = file

        def dump(self, value: Any) -> None:
            message = pickle.dumps(value)
            self.file.write(hmac.digest(key, message, _DIGEST) + message)

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self.file = file

        def load(self) -> Any:
            digest, message = self.file.read(_DIGEST_BYTES), self.file.read()
            if not hmac.compare_digest(digest, hmac.digest(key, message, _DIGEST)):
                raise ClusterError("a rank received an object without the signature of this run; it was not read")
            return pickle.loads(message)

    names = vars(distributed_c10d)
    if not {"_pickler", "_unpickler"} <= names.keys():
        raise ClusterError(f"objects between ranks cannot be signed with PyTorch {torch.__version__}; install 2.14")
    names.update(_pickler=Pickler, _unpickler=Unpickler)


def share_key(store: dist.Store, rank: int, world_size: int) -> bytes:
    """Return the same new key on all ranks of one machine. Collective.

    The store is not trusted: it names a folder, and the key is in a file there, which only this user can have written.
    Raises ClusterError for a folder of another user.
    """
    if rank > 0:
        folder = Path(store.get(_FOLDER).decode())
        _require_private(folder)
        key = (folder / _FILE).read_bytes()
        store.set(_READ.format(rank), "")
        return key
    folder, key = Path(tempfile.mkdtemp(prefix="nemo_opd_")), new_key()
    try:
        (folder / _FILE).write_bytes(key)
        store.set(_FOLDER, str(folder))
        store.wait([_READ.format(other) for other in range(1, world_size)])
    finally:
        shutil.rmtree(folder)
    return key


def _require_private(folder: Path) -> None:
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ClusterError(f"{folder}: it was named as the folder of the run's key, but others may have written it")
