"""Build of a teacher cache from the texts of a run, by teachers here or on servers, and completion of a run's caches
(methods.md §9.1).
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import fingerprint
from nemo_opd.cluster.batch_grid import dp_leader_ranks
from nemo_opd.cluster.local import LocalCluster
from nemo_opd.cluster.placement import Placement, Processes
from nemo_opd.config.model import Parallelism
from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.config.teacher import Teacher, TeacherBase
from nemo_opd.data.loader import made_of_all
from nemo_opd.data.samples import Sample
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.files import settle, storage_errors
from nemo_opd.logits.head import Head
from nemo_opd.models.load import compute_dtype, load_config, load_tokenizer
from nemo_opd.models.stored_output import lacks_head, save_head, sparse_layout
from nemo_opd.models.stored_weights import weights_fingerprint
from nemo_opd.preflight.corpus import Corpus, load_corpus
from nemo_opd.preflight.model_info import ModelInfo, read_model_info
from nemo_opd.preflight.plan import Plan
from nemo_opd.preflight.ranks import resolve_device, resolve_layout
from nemo_opd.preflight.teachers import segment_ids, settle_tokenizers
from nemo_opd.progress import tracked
from nemo_opd.rotary import RotaryLimit
from nemo_opd.served.answers import EndpointAnswers
from nemo_opd.teacher_cache.reader import SHARD_BYTES, CacheReader, CacheWriter
from nemo_opd.teacher_cache.shard import Bytes, CacheManifest, has_manifest, key_of, write_manifest
from nemo_opd.types import Closing, TokenRows
from nemo_opd.workers.teacher_worker import CachingTeacher

_DEFAULT_BATCH_TOKENS = 8192
"""Tokens per forward pass if the teacher's settings do not specify them."""
_Ids = NDArray[np.int32]
Ask = Callable[[Sequence[Sequence[_Ids]]], Iterator[tuple[_Ids, Bytes]]]
"""Function from each data-parallel rank's segments to all segments, ids [N], with their stored bytes, uint8 [N, R]."""


class CacheTeacher(Closing):
    """A teacher in this process and the other processes of torchrun; data-parallel ranks read different segments."""

    def __init__(
        self,
        config: RunConfig,
        settings: TeacherBase,
        key: str,
        manifest: CacheManifest,
        layout: Layout,
        device: str,
        folder: Path,
    ) -> None:
        """Load the teacher. key: its model's key in errors. folder: the cache. Raises WorkerError and ClusterError."""
        self._layout, self._folder = layout, folder
        self._sparse = sparse_layout(manifest) if manifest.form == "top_k" else None
        offload = "layers" if settings.offload == "layers" else False  # the device is not shared
        arguments: dict[str, Any] = {
            "settings": settings.model_copy(update={"offload": offload}),
            "key": key,
            "vocab_size": manifest.vocab_size,
            "device": device,
            "transport": "shared_memory",
            "handoff": manifest.handoff,
            "shares_process": True,
        }
        placement = Placement.colocated(num_nodes=1, ranks_per_node=layout.size, num_teachers=1)
        local = config.cluster.model_copy(update={"launcher": "local"})
        with ExitStack() as stack:
            cluster = stack.enter_context(LocalCluster(local, device=device, placement=placement))
            name, places = f"teacher {settings.name}", placement.teachers[0]
            self._group = stack.enter_context(cluster.group(name, CachingTeacher, arguments, places))
            self._stack = stack.pop_all()

    def ask(self, rank_groups: Sequence[Sequence[_Ids]]) -> Iterator[tuple[_Ids, Bytes]]:
        """Yield each segment with its stored bytes.

        rank_groups: segments per data-parallel rank, read in one forward pass; at most one group per rank. Raises
        WorkerError and ClusterError.
        """
        # All ranks must join the all-gathers of weights, so ranks without a group repeat another rank's.
        dp_groups = [rank_groups[d % len(rank_groups)] for d in range(self._layout.dp)]
        all_groups = [dp_groups[self._layout.coordinates(rank)[0]] for rank in range(self._layout.size)]
        outputs = self._group.call("answers", [(*_padded(segments), self._sparse, False) for segments in all_groups])
        for segments, rank in zip(rank_groups, dp_leader_ranks(self._layout), strict=False):
            for ids, rows in zip(segments, outputs[rank][0], strict=True):
                yield ids, rows.numpy()

    def write_head(self) -> None:
        """Write the head of hidden states into the cache. Raises WorkerError, ClusterError and StorageError."""
        dummy = [np.zeros(2, np.int32)]
        outputs = self._group.call("answers", [(*_padded(dummy), None, True)] * self._layout.size)
        save_head(self._folder, _concatenated([head for _, head in outputs[: self._layout.tp]]))

    def close(self) -> None:
        self._stack.close()


def _padded(segments: Sequence[_Ids]) -> tuple[TokenRows, tuple[slice, ...]]:
    """Return segments as padded rows in a single microbatch."""
    ids = pad_sequence([torch.from_numpy(segment.astype(np.int64)) for segment in segments], batch_first=True)
    zeros = torch.zeros(ids.shape, dtype=torch.int32)
    tokens = TokenRows(ids, torch.tensor([len(segment) for segment in segments]), zeros.bool(), zeros)
    return tokens, (slice(0, len(segments)),)


def _concatenated(parts: Sequence[Head]) -> Head:
    """Concatenate the tensor-parallel ranks' parts of a head."""
    first = parts[0]
    biases = [part.bias for part in parts if part.bias is not None]
    weight = torch.cat([part.weight for part in parts])
    return Head(weight, torch.cat(biases) if biases else None, first.scale, first.soft_cap)


def server_answers(settings: TeacherBase, key: str, manifest: CacheManifest) -> Ask:
    """Return a function that queries a teacher's servers. key: the teacher's key, for messages."""
    assert settings.served is not None
    answers = EndpointAnswers(settings.served, settings.reference, sparse_layout(manifest), key=key)

    def ask(groups: Sequence[Sequence[_Ids]]) -> Iterator[tuple[_Ids, Bytes]]:
        for segments in groups:
            for ids, answer in zip(segments, answers.segments(segments), strict=True):
                yield ids, answer.rows

    return ask


@dataclass(frozen=True, slots=True)
class CacheForm:
    """Form of the data stored per position."""

    top_k: int | None
    """Number of likeliest tokens, or None to store hidden states."""
    value_bytes: int = 3
    """Bytes per log-probability: 4, or 3 with a relative error of up to 2⁻¹⁶."""
    handoff: str | None = None
    """`handoff.type` used to compute the likeliest tokens, or None for the run's."""

    @classmethod
    def of(cls, manifest: CacheManifest) -> CacheForm:
        """Return the form of an existing cache."""
        if manifest.form == "hidden_states":
            return cls(None)
        return cls(manifest.top_k, manifest.value_bytes, manifest.handoff)


@dataclass(frozen=True, slots=True)
class CacheShard:
    """Work shard `index` of `number`, selected by segment key."""

    index: int = 0
    number: int = 1

    def has(self, key: bytes) -> bool:
        return int.from_bytes(key[:8], "little") % self.number == self.index


@dataclass(frozen=True, slots=True)
class _CacheBuilt:
    """Result of one build worker."""

    segments: int
    tokens: int
    there: int
    """Number of segments of its part that the cache already had."""


def build_cache(
    config: RunConfig,
    i: int,
    folder: Path,
    form: CacheForm,
    *,
    part: CacheShard = CacheShard(),
    shard_bytes: int = SHARD_BYTES,
) -> _CacheBuilt:
    """Compute and store active teacher i's output for all texts of a run that the cache in `folder` lacks.

    A missing or damaged head of hidden states is rewritten. A killed worker loses only segments that were not in a
    shard yet; a later build adds them. Raises an OPDError if the teacher cannot be run or the folder holds another
    cache.
    """
    if config.rollout is not None:
        raise ConfigError(
            f"rollout.type={config.rollout.type}: the student of this run samples its texts, so they cannot be cached "
            "beforehand; give the settings of an off-policy run"
        )
    device = resolve_device(config.cluster)
    parallelism = _parallelism(config, i)
    layout = resolve_layout(f"teachers.{i}.parallelism", Processes.started().size, parallelism)
    config = _requesting_form(settle_tokenizers(_unsharded(config), device), i, form)
    settings = config.active_teachers[i].model_copy(update={"parallelism": parallelism})
    if settings.cache is not None:
        raise ConfigError(f"teachers.{i} ({settings.name}) is itself a cache; name the teacher's model")
    if settings.is_student:
        raise ConfigError(
            f"teachers.{i}.weights={settings.weights}: its output changes with the student; cache a teacher with "
            "weights: frozen"
        )
    active = [settings if index == i else teacher for index, teacher in enumerate(config.active_teachers)]
    teachers = [read_model_info(teacher, f"teachers.{index}", device) for index, teacher in enumerate(active)]
    # Without a run, the teacher stands in for the student; a served teacher has no local folder to read.
    is_same = settings.served is not None and config.student.model == settings.model
    student = teachers[i] if is_same else read_model_info(config.student, "student", device)
    manifest = _manifest(config, i, student, teachers[i], form, device)
    corpus = load_corpus(config, student, teachers)
    _describe(folder, manifest, config, i, student, teachers[i])
    reader = CacheReader(folder)
    missing, tokens = _MissingSegments(corpus, config, i, reader, part), 0
    groups = _group_segments(missing, _batch_tokens(settings), reader.rotary)
    needs_head = lacks_head(reader)
    first = next(groups, None)
    if first is None and not needs_head:
        return _CacheBuilt(0, 0, missing.num_present)
    groups = chain([first] if first else [], groups)
    with CacheWriter(folder, manifest.vocab_size, shard_bytes) as writer, ExitStack() as stack:
        ask: Ask
        if settings.served is not None:
            ask = server_answers(settings, f"teachers.{i}", manifest)
        else:
            asker = CacheTeacher(config, settings, f"teachers.{i}.model", manifest, layout, device, folder)
            ask = stack.enter_context(asker).ask
            if needs_head:
                asker.write_head()
        while rank_groups := list(islice(groups, layout.dp)):
            for ids, rows in ask(rank_groups):
                tokens += len(ids)
                writer.add(ids, rows)
    return _CacheBuilt(missing.number, tokens, missing.num_present)


def _parallelism(config: RunConfig, i: int) -> Parallelism:
    """Return the teacher's parallelism: unsharded in one process, otherwise as in the run without replicas."""
    if Processes.started().size == 1:
        return Parallelism()
    return config.active_teachers[i].parallelism.model_copy(update={"replicas": 1})


def _requesting_form(config: RunConfig, i: int, form: CacheForm) -> RunConfig:
    """Make a served teacher return as many log-probabilities as the cache stores."""
    endpoint = config.active_teachers[i].served
    if endpoint is None:
        return config
    if form.top_k is None:
        raise ConfigError(
            f"--hidden-states: the servers of teachers.{i} ({config.active_teachers[i].name}) return only "
            "log-probabilities; use --top-k"
        )
    update = {"served": endpoint.model_copy(update={"logprobs": form.top_k})}
    teachers = (teacher.model_copy(update=update) if j == i else teacher for j, teacher in enumerate(config.teachers))
    return config.model_copy(update={"teachers": tuple(teachers)})


def _batch_tokens(settings: Teacher) -> int:
    if settings.served is not None:
        return _DEFAULT_BATCH_TOKENS * settings.served.concurrency
    return settings.micro_batch_tokens or _DEFAULT_BATCH_TOKENS


def _unsharded(config: RunConfig) -> RunConfig:
    """Remove all parallelism from the settings, which does not affect a run's texts."""
    update = {"parallelism": Parallelism()}
    teachers = tuple(teacher.model_copy(update=update) for teacher in config.teachers)
    return config.model_copy(update={"student": config.student.model_copy(update=update), "teachers": teachers})


def _manifest(
    config: RunConfig, i: int, student: ModelInfo, teacher: ModelInfo, form: CacheForm, device: str
) -> CacheManifest:
    settings = config.active_teachers[i]
    tokenizer, kwargs = _template(config, i, student, teacher)
    template = json.dumps([tokenizer.chat_template, kwargs], sort_keys=True)
    form_fields: dict[str, Any] = {"form": "hidden_states", "hidden_size": teacher.size.hidden_size}
    if form.top_k is not None:
        form_fields = {"form": "top_k", "top_k": min(form.top_k, teacher.vocab_size), "value_bytes": form.value_bytes}
        form_fields |= {"handoff": form.handoff or config.handoff.type} if settings.served is None else {}
    if settings.served is None:
        weights = weights_fingerprint(settings.reference, key=f"teachers.{i}.model")
    else:
        weights = hashlib.sha256(f"served as {settings.reference}".encode()).hexdigest()
        form_fields |= {"is_served": True, "positions": teacher.positions}
    return CacheManifest(
        teacher=settings.reference,
        weights=weights,
        tokenizer=fingerprint(teacher.tokenizer),
        template=hashlib.sha256(template.encode()).hexdigest(),
        vocab_size=teacher.vocab_size,
        dtype=str(compute_dtype(settings.dtype, device)).removeprefix("torch."),
        chat_template_kwargs=kwargs,
        **form_fields,
    )


def _template(
    config: RunConfig, i: int, student: ModelInfo, teacher: ModelInfo
) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
    """Return the tokenizer whose chat template renders the teacher's texts, and the template's arguments."""
    settings = config.active_teachers[i]
    if settings.type == "same_tokenizer" and settings.context is None:
        return student.tokenizer, dict(config.student.chat_template_kwargs)
    return teacher.tokenizer, dict(settings.chat_template_kwargs)


def _describe(
    folder: Path, manifest: CacheManifest, config: RunConfig, i: int, student: ModelInfo, teacher: ModelInfo
) -> None:
    """Write the teacher's configuration, tokenizer and manifest into a new cache, or check an existing cache."""
    if not has_manifest(folder):
        settings = config.active_teachers[i]
        temporary = folder / f".{uuid.uuid4().hex}"
        with storage_errors(folder, instead="choose another --output"):
            temporary.mkdir(parents=True)
            try:
                if settings.served is None:
                    load_config(settings.reference, key=f"teachers.{i}.model").save_pretrained(temporary)
                tokenizer = load_tokenizer(settings.tokenizer_source[1], key=f"teachers.{i}")
                tokenizer.chat_template = _template(config, i, student, teacher)[0].chat_template
                tokenizer.save_pretrained(temporary)
                settle(temporary)
                _require_no_other_files(folder, temporary)
                for path in sorted(temporary.iterdir()):
                    os.replace(path, folder / path.name)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    write_manifest(folder, manifest)
    if (stored := fingerprint(load_tokenizer(str(folder), key="--output"))) != manifest.tokenizer:
        raise ConfigError(
            f"{folder}: its tokenizer has the fingerprint {stored[:12]}…, but the teacher's is "
            f"{manifest.tokenizer[:12]}…; name another folder"
        )


def _require_no_other_files(folder: Path, described: Path) -> None:
    """Raise ConfigError if a folder that is not a cache holds visible files that differ from `described`."""
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    same, _, _ = filecmp.cmpfiles(folder, described, present, shallow=False)
    if (foreign := sorted(present - set(same))) and not has_manifest(folder):
        raise ConfigError(
            f"--output={folder}: it is not a cache and holds other files, such as {foreign[0]}, that might be "
            "replaced; name a new folder"
        )


class _MissingSegments:
    """Distinct segments of a run's texts that a cache lacks or holds damaged."""

    def __init__(
        self, corpus: Corpus, config: RunConfig, i: int, reader: CacheReader, part: CacheShard = CacheShard()
    ) -> None:
        self._corpus, self._config, self._i, self._reader, self._part = corpus, config, i, reader, part
        self.number = self.num_present = 0

    def __iter__(self) -> Iterator[_Ids]:
        seen: set[bytes] = set()
        for sample in self._samples():
            ids = segment_ids(sample, self._i)
            if ids is None or (key := key_of(ids)) in seen or not self._part.has(key):
                continue
            seen.add(key)
            if self._reader.has(ids):
                self.num_present += 1
            else:
                self.number += 1
                yield ids

    def _samples(self) -> Iterator[Sample]:
        corpus, workers = self._corpus, self._config.data.num_workers
        if corpus.make_windows is None:
            yield from tracked(
                made_of_all(corpus.train, corpus.make_sample, workers), "asking", "texts", len(corpus.train)
            )
        else:
            windows = made_of_all(corpus.train, corpus.make_windows, workers)
            yield from chain.from_iterable(tracked(windows, "asking", "texts", len(corpus.train)))
        if corpus.validation is not None:
            texts = made_of_all(corpus.validation, corpus.make_validation_sample, workers)
            yield from tracked(texts, "asking about validation", "texts", len(corpus.validation))


def _group_segments(
    segments: Iterator[_Ids] | _MissingSegments, budget: int, rotary: RotaryLimit | None
) -> Iterator[list[_Ids]]:
    """Group consecutive segments up to `budget` tokens (or one longer segment), all on the same side of the limit."""
    group: list[_Ids] = []
    for ids in segments:
        crosses = group and rotary is not None and rotary.is_beyond(len(ids)) != rotary.is_beyond(len(group[0]))
        if crosses or (group and sum(map(len, group)) + len(ids) > budget):
            yield group
            group = []
        group.append(ids)
    if group:
        yield group


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
        if lacks_head(reader) or next(iter(_MissingSegments(plan.data, plan.config, i, reader)), None) is not None:
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
