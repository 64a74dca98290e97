"""Named shared memory segments of given processes; other tests may have segments at the same time."""

import os
from pathlib import Path

FOLDER = "/dev/shm"


def mapped_by(pid: int) -> set[int]:
    """Return the inodes of a process's segments. Not names: the C library renames a semaphore after it is created."""
    try:
        mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    return {int(line.split()[4]) for line in mappings if f"{FOLDER}/" in line}


def left_of(inodes: set[int]) -> list[str]:
    """Return the paths of segments that still exist, except the CUDA driver's, which outlive a killed process."""
    entries = [entry for entry in os.scandir(FOLDER) if not entry.name.startswith("cuda.shm.")]
    return [entry.path for entry in entries if entry.inode() in inodes]
