"""Copies of the models on several nodes: where `parallelism.replicas: auto` gives each node one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from nemo_opd.cluster.placement import Placement, Places
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.training.memory import Situation, estimate

_STUDENT = 0
"""Index of the student among the models; teachers follow."""


def settle_copies(config: RunConfig, situation: Situation, placement: Placement) -> tuple[RunConfig, Situation]:
    """Return settings and layouts with every `replicas: auto` decided.

    A copy on every node for as many models as fit easily without more offloading: all, or else without teachers, the
    largest first. One copy on CPU, and where the GPU's memory is unknown.
    """
    setups = (situation.student, *situation.teachers)
    possible = _possible(config, [setup.layout for setup in setups], placement)
    order = sorted(possible, key=lambda i: (i == _STUDENT, -setups[i].size.parameters))
    is_known = situation.machine.device_bytes is not None
    for left_out in range(len(order) if is_known else 0):
        chosen = {i: possible[i] for i in order[left_out:]}
        layouts = {i: replace(setups[i].layout, replicas=number) for i, number in chosen.items()}
        laid_out = situation.with_layouts(layouts, config)
        if estimate(config, laid_out).fits_easily:
            return _settled(config, chosen), laid_out
    return _settled(config, {}), situation


def _possible(config: RunConfig, layouts: list[Layout], placement: Placement) -> dict[int, int]:
    """Return the number of nodes of each undecided model of which every node can hold a copy.

    A teacher with the student's weights has the student's copies.
    """
    models = (config.student, *config.active_teachers)
    nodes = [1 if i - 1 in placement.inside else _equal_nodes(places) for i, places in enumerate(placement.groups)]
    return {
        i: nodes[i]
        for i, (model, layout) in enumerate(zip(models, layouts, strict=True))
        if model.parallelism.replicas == "auto" and nodes[i] > 1 and layout.dp % nodes[i] == 0
    }


def _equal_nodes(places: Places) -> int:
    """Return the number of nodes of a group; 1 where they have different numbers of its ranks."""
    counts = Counter(place.node for place in places)
    return len(counts) if len(set(counts.values())) == 1 else 1


def _settled(config: RunConfig, chosen: Mapping[int, int]) -> RunConfig:
    """Write the numbers of copies into settings; 1 for every other `auto`."""
    student, *teachers = (
        model.with_parallelism(replicas=chosen.get(i, 1)) if model.parallelism.replicas == "auto" else model
        for i, model in enumerate((config.student, *config.teachers))
    )
    return config.model_copy(update={"student": student, "teachers": tuple(teachers)})
