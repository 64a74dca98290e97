"""Where a run happens: device, ranks, batch grid, directory."""

import os
import tempfile
from datetime import datetime
from pathlib import Path

import torch

from nemo_opd.checkpoint.identity import newest_of_same_run
from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.cluster.virtual_cluster import num_cores
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.run import Run, RunConfig
from nemo_opd.errors import ConfigError


def resolve_device(cluster: Cluster) -> str:
    if cluster.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if cluster.device == "cuda" and not torch.cuda.is_available() and cluster.address is None:
        raise ConfigError(
            "cluster.device=cuda: PyTorch sees no GPU on this machine; write cluster.device=cpu, or cluster.address of "
            "a Ray cluster with GPUs"
        )
    return cluster.device


def resolve_ranks(cluster: Cluster, device: str) -> int:
    """Data-parallel ranks. Raises ConfigError where this machine has too few cores or GPUs."""
    if cluster.num_nodes > 1 and cluster.address is None:
        raise ConfigError(
            f"cluster.num_nodes={cluster.num_nodes}: several nodes need a running Ray cluster; start it with "
            "`ray start` on each node and write cluster.address=auto"
        )
    if device == "cpu":
        if cluster.address is None and cluster.cpu_ranks > num_cores():
            raise ConfigError(
                f"cluster.cpu_ranks={cluster.cpu_ranks}: this machine has {num_cores()} cores; write "
                f"cluster.cpu_ranks={num_cores()} or fewer"
            )
        return cluster.cpu_ranks
    visible = torch.cuda.device_count()
    if cluster.gpus_per_node is None and not visible:
        raise ConfigError(
            "cluster.gpus_per_node: this machine has no GPU to count; say how many each node of the Ray cluster has"
        )
    gpus = cluster.gpus_per_node or visible
    if cluster.address is None and gpus > visible:
        raise ConfigError(
            f"cluster.gpus_per_node={gpus}: this machine has {visible}; write cluster.gpus_per_node={visible} or fewer"
        )
    return cluster.num_nodes * gpus


def require_batch_divides(config: RunConfig, num_ranks: int) -> None:
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    unit = num_ranks * micro
    if size % unit:
        nearest = max(unit, size // unit * unit)
        raise ConfigError(
            f"train.global_batch_size={size} is no multiple of ranks × train.micro_batch_size = {num_ranks} × {micro}; "
            f"write train.global_batch_size={nearest}, or change the microbatch or the number of ranks"
        )


def resolve_output_dir(run: Run) -> Path:
    """The run's directory, not yet created. Raises ConfigError where it cannot be written."""
    folder = run.output_dir or default_output_dir(run.name)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigError(
            f"run.output_dir={folder}: {existing} is not writable ({reason}); name another directory, or change its "
            "permissions"
        ) from error
    return folder


def progress_to_resume(config: RunConfig, output_dir: Path) -> Progress | None:
    """Where the run continues; None where it starts anew.

    Raises ConfigError where the directory holds a run that is not to be continued, and CheckpointError where it is to
    be continued and cannot be.
    """
    checkpoints = CheckpointManager(output_dir / "checkpoints", config.train.keep_last)
    if config.run.resume == "auto":
        return newest_of_same_run(checkpoints, config)
    if steps := checkpoints.steps():
        raise ConfigError(
            f"run.output_dir={output_dir} holds a run with a checkpoint at step {steps[-1]}; write run.resume=auto to "
            "continue it, or another run.output_dir"
        )
    return None


def default_output_dir(name: str) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path("outputs") / name / stamp
    for number in range(1, 1000):
        if not folder.exists():
            break
        folder = folder.with_name(f"{stamp}_{number}")
    return folder
