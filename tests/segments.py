"""Segments of shared memory under a name, by the processes that map them: other tests have some too."""

import os
from pathlib import Path

FOLDER = "/dev/shm"


def mapped_by(pid: int) -> set[int]:
    """Their inodes: the C library makes a semaphore under another name than it then has."""
    try:
        mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    return {int(line.split()[4]) for line in mappings if f"{FOLDER}/" in line}


def left_of(inodes: set[int]) -> list[str]:
    """Paths of those that are still there, but for the CUDA driver's own, which outlive a killed process."""
    entries = [entry for entry in os.scandir(FOLDER) if not entry.name.startswith("cuda.shm.")]
    return [entry.path for entry in entries if entry.inode() in inodes]
