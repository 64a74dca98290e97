"""A rank whose process is gone: what Ray knows about it, and what to do."""

import re

import ray

from nemo_opd.cluster.failure import CONTINUE

MEMORY = "host memory may have run out: lower train.micro_batch_size or train.max_length, or use more nodes"


def obituary(error: Exception) -> str:
    """Why, in parentheses, and what to do."""
    text = " ".join(str(error).split())
    address = re.search(r"\bip: ([0-9a-f.:]+)", text)
    where = f" on {address[1]}" if address else ""
    if "node has died" in text:
        return f"(its Ray node{where} is gone); start the node again, or lower cluster.num_nodes; {CONTINUE}"
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "low on memory" in text:
        return f"(Ray ended its process{where}, as the memory of the node was nearly full); {MEMORY}; {CONTINUE}"
    if "process has died" in text:
        return f"(its process{where} was killed or crashed); {MEMORY}; {CONTINUE}"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return f"(its process{where} cannot be reached any more); {CONTINUE}"
    return f"({text.partition('. ')[0].rstrip('.')}); {CONTINUE}"
