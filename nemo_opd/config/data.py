"""Training and validation text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from nemo_opd.config.settings import Excludes, MayChange, Needs, OneOrMore, Settings
from nemo_opd.errors import ConfigError

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")

LearnedTurns = Literal["all", "last", "marked"]


class HubDataset(Settings):
    """A dataset of the Hugging Face Hub, or a folder that `datasets.load_dataset` reads."""

    path: str
    """Name on the hub, or path of a folder."""
    name: str | None = None
    """Configuration of the dataset; by default the only one or the dataset's default."""
    revision: str | None = None
    """Branch, tag or commit on the hub; by default the newest."""
    split: str = "train"
    """Split, or part of one such as `train[:10%]`."""


Files = OneOrMore[str]
PromptColumns = Annotated[OneOrMore[str], Excludes("messages_key")]


class Source(Settings):
    """Source of documents: files of one kind (paths or globs), or the hub."""

    arrow_files: Files = ()
    """Paths or globs of Arrow files, in stream or file format."""
    parquet_files: Files = ()
    """Paths or globs of Parquet files."""
    jsonl_files: Files = ()
    """Paths or globs of files with a JSON object per line, also compressed with gzip, zstd, bzip2 or xz."""
    text_files: Files = ()
    """Paths or globs of text files; each file is one document."""
    hub: HubDataset | None = None
    """A dataset instead of files."""

    @property
    def given(self) -> dict[str, tuple[str, ...] | HubDataset]:
        """The kinds of source that are set, by key."""
        return {key: value for key in Source.model_fields if (value := getattr(self, key))}

    @model_validator(mode="after")
    def one_kind_of_source(self) -> "Source":
        if len(self.given) > 1:
            both = " and ".join(f"{kind}={_first(value)}" for kind, value in self.given.items())
            raise ValueError(
                f"give one kind of source, not {both}; set the unused ones to null (as {next(iter(self.given))}=null)"
            )
        return self


def _first(value: tuple[str, ...] | HubDataset) -> str:
    """Format a source by its first file and the number of further ones."""
    if isinstance(value, HubDataset):
        return value.path
    return value[0] + (f" and {len(value) - 1} more" if len(value) > 1 else "")


def source_of(files: Sequence[str], *, key: str, otherwise: str) -> Source:
    """Return the source of these files. The suffix gives their kind, also for compressed files; `otherwise` if it is
    unknown.

    Raises ConfigError, naming `key`, for files of several kinds.
    """
    kinds = {_kind_of(file, otherwise) for file in files}
    if len(kinds) > 1:
        raise ConfigError(f"{key}: the files are of several kinds ({', '.join(sorted(kinds))}); give files of one kind")
    return Source.model_validate({kinds.pop(): tuple(files)})


def source_kind(name: str) -> str | None:
    """Return the kind of files that a path or glob names; None for a folder or a data set on the hub."""
    path = Path(name)
    suffix = (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix
    return "jsonl_files" if suffix == ".json" else _kind_of(name, "") or None


def _kind_of(file: str, otherwise: str) -> str:
    if file.startswith("demo:"):
        return "arrow_files"
    path = Path(file)
    suffix = (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix
    kind = "text_files" if suffix == ".txt" else f"{suffix.removeprefix('.')}_files"
    return kind if kind in Source.model_fields else otherwise


class ValidationSource(Source):
    """Source of documents, optionally limited to the first ones."""

    max_samples: int | None = Field(None, ge=1)
    """Number of documents to use, from the first, or all if null."""


class ValidationTexts(ValidationSource):
    """Source of validation documents, which may be texts if training is on conversations."""

    text_key: str | None = None
    """The column with a text to validate on; by default validation documents are read as the training documents."""


_TextsOrNone = Annotated[
    ValidationTexts,
    BeforeValidator(lambda value: {} if value is None else value, json_schema_input_type=ValidationTexts | None),
]


class Data(Settings):
    """Texts or prompts, and how they are read."""

    train: Source = Field(default_factory=Source)
    """Texts to learn from; on-policy, prompts."""
    validation: MayChange[_TextsOrNone] = Field(default_factory=ValidationTexts)
    """Validation documents; null: no validation. text_files are texts, if the run does not sample."""
    text_key: str = "text"
    """The column with a document's text. If no setting names a column of documents, the names of the first training
    file's columns tell (docs/data.md).
    """
    messages_key: str | None = None
    """The column with a conversation: a list of messages with `role` and `content`, or `from` and `value`
    (ShareGPT), or the list as JSON. If set, `text_key` is unused, each model's chat template renders the conversation,
    and only the assistant's messages are learned.
    """
    prompt_key: PromptColumns = ()
    """Instead of `messages_key`: the column with a prompt, which is the user's message or a list of messages. The texts
    of several columns, such as [instruction, input], are joined by an empty line.
    """
    completion_key: Annotated[str | None, Needs("prompt_key")] = None
    """With `prompt_key`: the column with the answer, which is the assistant's message or a list of messages."""
    tools_key: str | None = None
    """The column with the tools that a conversation may call, as a list or as JSON."""
    learned_turns: LearnedTurns = "all"
    """Assistant messages that are learned, off-policy. all: all except those marked 0. last: of these, the ones after
    the user's last message. marked: only those marked 1. The mark is a message's `weight`, `train`, `training` or
    `loss_mask`.
    """
    response_key: str | None = None
    """On-policy, with `text_key`: the column with the dataset's continuation of the prompt. In a conversation it is the
    last assistant message.
    """
    domain_key: MayChange[str | None] = None
    """The column with a validation text's domain; validation figures are also shown per domain."""
    append_eos: bool = True
    """End each text that is not cut with the end-of-sequence token of each tokenizer."""
    special_tokens: Literal["read", "text"] = "read"
    """Text that spells a special token, such as `<s>` in HTML, is read as the special token (read) or as ordinary text
    (text). For plain texts off-policy.
    """
    shuffle: bool = True
    """Shuffle the documents anew each epoch, seeded by `run.seed`."""
    packing: bool = True
    """Off-policy, for plain texts: cut long documents into windows, and fill rows of `train.max_length` tokens with
    windows of several documents, which models see alone. false: every document is one sequence, cut at
    `train.max_length`.
    """
    num_workers: MayChange[int] = Field(0, ge=0)
    """Processes that tokenize and align in advance; 0: a thread of the driver, which suffices while perf/data_wait_s is
    small.
    """
    cache: MayChange[bool] = True
    """Tokenize and align each document once, and keep the result in `$NEMO_OPD_CACHE`."""

    @model_validator(mode="after")
    def domain_key_needs_validation_columns(self) -> "Data":
        if self.domain_key is None or (self.validation.given and not self.validation.text_files):
            return self
        reason = "text_files have no columns" if self.validation.text_files else "there is no data.validation"
        raise ValueError(
            f"domain_key={self.domain_key}: {reason}; name data.validation as arrow_files, parquet_files, jsonl_files "
            "or hub, or leave it out"
        )

    @model_validator(mode="after")
    def tools_and_messages_need_columns(self) -> "Data":
        if self.tools_key is not None and not self.is_chat:
            raise ValueError(f"tools_key={self.tools_key} without messages_key; set data.messages_key, or drop it")
        if self.is_chat and self.train.text_files:
            setting, column = self.document_columns[0]
            raise ValueError(
                f"{setting}={column} needs columns, which text_files do not have; give arrow_files, parquet_files, "
                "jsonl_files or hub"
            )
        return self

    @property
    def is_chat(self) -> bool:
        """Whether training documents are conversations."""
        return self.messages_key is not None or bool(self.prompt_key)

    @property
    def has_chat_validation(self) -> bool:
        """Whether validation documents are conversations."""
        return self.is_chat and self.validation.text_key is None and not self.validation.text_files

    @property
    def document_columns(self) -> list[tuple[str, str]]:
        """Pairs of a setting and a column that it names, for the columns that training documents are read from."""
        if not self.is_chat:
            return [("text_key", self.text_key)]
        named = [("messages_key", self.messages_key), *(("prompt_key", name) for name in self.prompt_key)]
        named += [("completion_key", self.completion_key), ("tools_key", self.tools_key)]
        return [(setting, name) for setting, name in named if name is not None]
