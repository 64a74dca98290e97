"""Training and validation text."""

from pydantic import Field, field_validator, model_validator

from nemo_opd.config.base import Settings


class HubDataset(Settings):
    """A dataset of the Hugging Face hub, or a folder `datasets.load_dataset` reads."""

    path: str
    name: str | None = None
    split: str = "train"


class Source(Settings):
    """Where documents come from: one kind of file (paths or globs), or the hub."""

    arrow_files: tuple[str, ...] = ()
    parquet_files: tuple[str, ...] = ()
    jsonl_files: tuple[str, ...] = ()
    text_files: tuple[str, ...] = ()
    """Each file is one document."""
    hub: HubDataset | None = None

    @field_validator("arrow_files", "parquet_files", "jsonl_files", "text_files", mode="before")
    @classmethod
    def one_path_is_a_list_of_one(cls, value: object) -> object:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @property
    def given(self) -> dict[str, tuple[str, ...] | HubDataset]:
        """The kinds that name something, by key."""
        return {key: value for key in Source.model_fields if (value := getattr(self, key))}

    @model_validator(mode="after")
    def one_kind_of_source(self) -> "Source":
        if len(self.given) > 1:
            raise ValueError(f"give one kind of source, not {' and '.join(self.given)}; set the others to null")
        return self


class ValidationSource(Source):
    max_samples: int | None = Field(None, ge=1)
    """Use the first so many documents only."""


class Data(Settings):
    train: Source = Field(default_factory=Source)
    validation: ValidationSource = Field(default_factory=ValidationSource)
    """Without a source nothing is validated."""
    text_key: str = "text"
    """The column that holds a document's text."""
    append_eos: bool = True
    """End each document that is not cut with the end-of-sequence token, on every side."""
    shuffle: bool = True
    """A new order each epoch, drawn from `run.seed`."""
    num_workers: int = Field(0, ge=0)
    """Processes that tokenize and align ahead; 0: the driver does it between steps."""
