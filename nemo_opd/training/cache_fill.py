"""Completion of a run's teacher caches before it starts (`on_missing: ask`)."""

from collections.abc import Mapping
from pathlib import Path

import torch

from nemo_opd.config.load import from_dict
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError
from nemo_opd.models.stored_output import lacks_head
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.training.cache_build import CacheForm, MissingSegments, build_cache
from nemo_opd.training.cached_teachers import settle_tokenizers
from nemo_opd.training.corpus import Corpus
from nemo_opd.training.plan import Plan
from nemo_opd.training.ranks import resolve_device


def fill_caches(plan: Plan) -> None:
    """Add the run's missing texts to each cache with `on_missing: ask`.

    A complete cache costs one pass over the texts and its contents, and no model is loaded. Raises an OPDError if the
    model that a cache was built from cannot be run or has changed.
    """
    for i, teacher in enumerate(plan.config.active_teachers):
        if teacher.cache is None or teacher.on_missing == "stop":
            continue
        assert isinstance(plan.data, Corpus), "a student that samples has no cached teachers"
        reader = CacheReader(teacher.cache)
        if lacks_head(reader) or next(iter(MissingSegments(plan.data, plan.config, i, reader)), None) is not None:
            manifest = reader.manifest
            if manifest.is_served:
                raise ConfigError(
                    f"teachers.{i}.on_missing=ask: {teacher.cache} lacks texts of this run, and it was built from "
                    f"servers of {manifest.teacher}, whose URLs it does not store; run nemo-opd cache build --urls"
                )
            config = asked_again(plan.config, i, {"model": manifest.teacher})
            build_cache(config, i, Path(teacher.cache), CacheForm.of(manifest))
            torch.cuda.empty_cache()  # for the run's processes


def asked_again(config: RunConfig, i: int, origin: Mapping[str, object]) -> RunConfig:
    """Replace the source of teacher i's output (usually a cache, whose tokenizer it keeps) in a run's settings.

    origin: new settings of the teacher, including `model`.
    """
    was_cached = config.active_teachers[i].cache is not None
    config = settle_tokenizers(config, resolve_device(config.cluster))
    settings = config.model_dump(mode="json")
    tokenizer = {"tokenizer": config.active_teachers[i].cache} if was_cached else {}
    settings["teachers"][i] |= {"cache": None, "served": None, "on_missing": "stop"} | tokenizer | dict(origin)
    return from_dict(settings)
