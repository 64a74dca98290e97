"""Resolution of `parallelism.replicas: auto`: one replica of a model per node if memory allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from nemo_opd.cluster.placement import Placement, Places
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.training.memory import MemoryInputs, estimate

_STUDENT = 0
"""Index of the student among the models, before the teachers."""


def resolve_replicas(
    config: RunConfig, situation: MemoryInputs, placement: Placement
) -> tuple[RunConfig, MemoryInputs]:
    """Resolve every `replicas: auto` in settings and layouts.

    As many models as fit easily without more offloading get a replica on every node. If not all fit, teachers lose
    theirs first, the largest first. One replica on CPU and if GPU memory is unknown.
    """
    setups = (situation.student, *situation.teachers)
    replicable = _replicable(config, [setup.layout for setup in setups], placement)
    order = sorted(replicable, key=lambda i: (i == _STUDENT, -setups[i].size.parameters))
    is_known = situation.machine.device_bytes is not None
    for num_dropped in range(len(order) if is_known else 0):
        replicas = {i: replicable[i] for i in order[num_dropped:]}
        layouts = {i: replace(setups[i].layout, replicas=number) for i, number in replicas.items()}
        replicated = situation.with_layouts(layouts, config)
        if estimate(config, replicated).fits_easily:
            return _with_replicas(config, replicas), replicated
    return _with_replicas(config, {}), situation


def _replicable(config: RunConfig, layouts: list[Layout], placement: Placement) -> dict[int, int]:
    """Return the number of nodes of each model with `auto` that can have a replica on every node, keyed by model.

    A teacher with the student's weights shares the student's replicas.
    """
    models = (config.student, *config.active_teachers)
    nodes = [1 if i - 1 in placement.inside else _equal_nodes(places) for i, places in enumerate(placement.groups)]
    return {
        i: nodes[i]
        for i, (model, layout) in enumerate(zip(models, layouts, strict=True))
        if model.parallelism.replicas == "auto" and nodes[i] > 1 and layout.dp % nodes[i] == 0
    }


def _equal_nodes(places: Places) -> int:
    """Return the number of nodes of a group; 1 if its ranks are spread unevenly."""
    counts = Counter(place.node for place in places)
    return len(counts) if len(set(counts.values())) == 1 else 1


def _with_replicas(config: RunConfig, replicas: Mapping[int, int]) -> RunConfig:
    """Replace `auto` in the settings by these numbers of replicas, or 1."""
    student, *teachers = (
        model.with_parallelism(replicas=replicas.get(i, 1)) if model.parallelism.replicas == "auto" else model
        for i, model in enumerate((config.student, *config.teachers))
    )
    return config.model_copy(update={"student": student, "teachers": tuple(teachers)})
