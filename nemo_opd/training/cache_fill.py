"""Texts of a run that its caches do not have, asked about before the run (`on_missing: ask`)."""

from collections.abc import Mapping
from pathlib import Path

import torch

from nemo_opd.config.load import from_dict
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError
from nemo_opd.models.stored_output import lacks_head
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.training.cache_build import CacheForm, Missing, build_cache
from nemo_opd.training.corpus import Corpus
from nemo_opd.training.plan import Plan
from nemo_opd.training.ranks import resolve_device
from nemo_opd.training.teachers_without_model import settle_tokenizers


def fill_caches(plan: Plan) -> None:
    """Add to each cache that is to be filled what it lacks of the run's texts.

    A cache that has all of them costs one reading of the texts and of its answers, and no model is loaded. Raises an
    OPDError where the model that it was built from cannot be asked, or is another by now.
    """
    for i, teacher in enumerate(plan.config.active_teachers):
        if teacher.cache is None or teacher.on_missing == "stop":
            continue
        assert isinstance(plan.data, Corpus), "a student that samples has no cached teachers"
        reader = CacheReader(teacher.cache)
        if lacks_head(reader) or next(iter(Missing(plan.data, plan.config, i, reader)), None) is not None:
            manifest = reader.manifest
            if manifest.is_served:
                raise ConfigError(
                    f"teachers.{i}.on_missing=ask: {teacher.cache} lacks texts of this run, and its answers are those "
                    f"of servers of {manifest.teacher}, which are not known here; run nemo-opd cache build --urls"
                )
            asked = asked_again(plan.config, i, {"model": manifest.teacher})
            build_cache(asked, i, Path(teacher.cache), CacheForm.of(manifest))
            torch.cuda.empty_cache()  # which other processes need next


def asked_again(config: RunConfig, i: int, origin: Mapping[str, object]) -> RunConfig:
    """Return the settings of a run with another origin of teacher i's answers, in the place of a cache, whose tokenizer
    it keeps. origin: settings of the teacher, `model` among them.
    """
    was_cached = config.active_teachers[i].cache is not None
    config = settle_tokenizers(config, resolve_device(config.cluster))
    settings = config.model_dump(mode="json")
    tokenizer = {"tokenizer": config.active_teachers[i].cache} if was_cached else {}
    settings["teachers"][i] |= {"cache": None, "served": None, "on_missing": "stop"} | tokenizer | dict(origin)
    return from_dict(settings)
