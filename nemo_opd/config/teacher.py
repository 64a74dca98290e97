"""Teachers: frozen models with their own tokenizers and weights, or self-teachers with the student's weights, and
the contexts that they read.
"""

from collections.abc import Iterable, Iterator
from string import Formatter
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from nemo_opd.config.loss import LossTerm, SameTokenizerTerm
from nemo_opd.config.model import Model, Student
from nemo_opd.config.settings import Excludes, Frozen, MayChange, Name, Needs, OneOrMore, Settings

EqualHistory = Literal["none", "text", "bytes"]

_OF_THE_STUDENT = ("model", "tokenizer", "parallelism", "attn_implementation", "fused_layers", "compile", "dtype")
"""Settings that a self-teacher takes from the student, as it runs in the student's processes."""
_TEMPLATE = ("chat_template", "chat_template_kwargs")
_OF_WEIGHTS = (
    *("parallelism", "attn_implementation", "compile", "fused_layers", "dtype", "offload", "micro_batch_tokens"),
    *("ema_decay", "adapters"),
)
_OF_A_MODEL = ("model", "tokenizer", "chat_template", "chat_template_kwargs", *_OF_WEIGHTS)


def _is_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        is_whole = False
    if not is_whole:
        raise ValueError("it is not an address of a server; write one such as http://localhost:8000")
    return url


Address = Annotated[str, AfterValidator(_is_address)]
"""Address of a server."""


class Endpoint(Settings):
    """Servers of one model. Each can score any text."""

    urls: MayChange[OneOrMore[Address]] = Field(min_length=1)
    """Addresses of running servers, without /v1. A server that fails gets no requests until it answers again."""
    program: Literal["vllm", "sglang", "openai"] = "vllm"
    """Program of the servers. openai: completions with echo=true and logprobs, with tokens as token_id:NUMBER (vLLM's
    return_tokens_as_token_ids).
    """
    logprobs: int = Field(20, ge=1)
    """Likeliest tokens requested at each position, besides the observed token. vLLM allows up to its --max-logprobs, by
    default 20.
    """
    api_key: MayChange[str | None] = None
    """Key for the servers, sent as a bearer token; `${oc.env:NAME}` reads it from the environment."""
    request_timeout_s: MayChange[float] = Field(300, gt=0)
    """Seconds for the answer to one sequence."""
    retries: MayChange[int] = Field(3, ge=0)
    """Number of times that a failed or unusable request is repeated."""
    concurrency: MayChange[int] = Field(32, ge=1)
    """A rank's requests in flight, over all addresses."""

    @field_validator("urls")
    @classmethod
    def urls_differ_and_have_no_path_of_requests(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for i, url in enumerate(urls):
            if urlsplit(url).path.strip("/").split("/")[-1] == "v1":
                raise ValueError(f"element {i}, {url!r}: the path of each request is added to it; leave /v1 out")
            if url in urls[:i]:
                raise ValueError(f"{url} is listed twice; name each server once")
        return urls

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


PROMPT = "prompt"
"""Name of the student's prompt in a template: the text, or the user's last message."""


def _can_be_read(template: str) -> str:
    field_names(template)
    return template


Template = Annotated[str, AfterValidator(_can_be_read)]
"""Text with names in braces."""


class Context(Settings):
    """A teacher's own prompt before the response that is compared. The student never reads it."""

    system_prompt: Template | None = None
    """With conversations: the system message that the teacher reads instead. May name columns as `template` does."""
    template: Template | None = None
    r"""Text that the teacher reads instead of the prompt or, in a conversation, of the user's last message. `{prompt}`
    stands for the replaced text, any other name in braces for a column, as in `{prompt}\n\nA solution: {solution}`;
    `{{` and `}}` are braces.
    """
    key: Annotated[str | None, Excludes("template")] = None
    """The column with the whole prompt that the teacher reads: a text, or messages without the response."""
    gap_every: MayChange[int | None] = Field(None, ge=1)
    """Steps between measurements of the privilege gap (methods.md §13.1), for which the teacher reads the step's
    responses twice more. null: not measured.
    """
    contrast: Annotated[MayChange[bool], Needs("gap_every")] = False
    """Also measure the gap with the context of another record: a third reading."""

    @field_validator("template")
    @classmethod
    def templates_name_something(cls, value: str | None) -> str | None:
        if value is not None and not field_names(value):
            raise ValueError(
                f"{value[:60]!r} names nothing, so the teacher would read the same text before every response; name "
                "columns of the record, such as {solution}, or {prompt}, the student's own"
            )
        return value

    @model_validator(mode="after")
    def something_is_added(self) -> "Context":
        if self.system_prompt is None and self.template is None and self.key is None:
            raise ValueError(
                "it does not say what the teacher reads; set template, key or system_prompt, or leave context out"
            )
        return self

    @model_validator(mode="after")
    def contrast_needs_a_field(self) -> "Context":
        if self.contrast and not self.fields:
            raise ValueError(
                "contrast=true: the context names no field of the record, so it is the same for another record; name "
                "one in template, such as {solution}, or write contrast=false"
            )
        return self

    @property
    def replaces_question(self) -> bool:
        """Whether the teacher reads another question than the student, not only another system message."""
        return self.template is not None or self.key is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the record's fields that the context uses."""
        templates = [template for template in (self.system_prompt, self.template) if template is not None]
        names = [name for template in templates for name in field_names(template)]
        keys = [] if self.key is None else [self.key]
        return tuple(dict.fromkeys(name for name in (*keys, *names) if name != PROMPT))

    def named_in(self, field: str) -> str:
        """Return the setting that uses a field."""
        if field == self.key:
            return "key"
        return "template" if self.template is not None and field in field_names(self.template) else "system_prompt"


def field_names(template: str) -> list[str]:
    """Return the names in braces, in order. Raises ValueError for an invalid template."""
    return [name for _, name, *_ in _parts(template) if name is not None]


def filled(template: str, values: dict[str, str]) -> str:
    """Fill in the value of each name. Values may contain braces."""
    return "".join(literal + ("" if name is None else values[name]) for literal, name in _parts(template))


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Yield literal text and the name that follows it; the name is None after the last text."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error} in {template[:60]!r}; write {{{{ and }}}} for braces that are text") from error
    for literal, name, form, conversion in parts:
        if name is not None and (not name.strip() or form or conversion):
            raise ValueError(
                f"{{{name}}} in {template[:60]!r} is not a field's name; write the name alone, as {{solution}}, and "
                "{{ and }} for braces that are text"
            )
        yield literal, name


class TeacherBase(Model):
    model: str | None = None
    """A Hugging Face folder, a folder with an adapter (PEFT), a hub name (`NAME@REVISION`), or `demo:teacher_same`; not
    set if `weights` are the student's.
    """
    name: Name
    """Short unique name, used in metrics."""
    weight: float = Field(1.0, ge=0)
    """Weight in the sum or mean over teachers; no effect if each text has one teacher."""
    weights: Literal["frozen", "student", "ema"] = "frozen"
    """Source of the weights. frozen: `model`. student: the student's current weights. ema: their exponential moving
    average.
    """
    ema_decay: Annotated[float, Needs("weights", ("ema",))] = Field(0.99, ge=0, lt=1)
    """weights=ema: the average becomes decay · average + (1 − decay) · student at each update of the student."""
    adapters: Annotated[bool, Needs("weights", ("student",))] = True
    """weights=student with student.lora: use the student's adapters; false: only its base model."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the weights and of the forward pass. auto: bfloat16 on GPU, float32 on CPU."""
    micro_batch_tokens: MayChange[int | None] = Field(None, ge=2)
    """Tokens of this teacher in one forward pass of a rank; by default as the student's, scaled by this teacher's
    longest sequence.
    """
    offload: MayChange[Literal[True, False, "auto", "layers"]] = "auto"
    """Move the parameters to host memory while other models use the device. auto: if the run does not fit otherwise,
    the largest teacher first. layers: keep decoder layers in host memory, two at a time on the device.
    """
    cache: str | None = None
    """Folder with the teacher's stored output (nemo-opd cache build), read instead of a forward pass. Usually written
    as type: cached, which detects the tokenizer.
    """
    on_missing: Annotated[MayChange[Literal["stop", "ask"]], Needs("cache")] = "stop"
    """Texts that the cache does not contain, or contains differently. stop: end the run and name the text. ask: before
    the first step, ask the model that the cache was built from, and add its answers to the cache.
    """
    served: Endpoint | None = None
    """Servers that are queried instead of a forward pass. Usually written as type: served, which detects the tokenizer.
    """
    context: Context | None = None
    """Another prompt, such as one with a worked solution, that this teacher reads before the response; by default the
    student's.
    """

    @property
    def is_student(self) -> bool:
        """Whether the teacher runs in the student's processes, with the student's weights or their average."""
        return self.weights != "frozen"

    @property
    def is_computed(self) -> bool:
        """Whether the run computes this teacher's output, instead of reading a cache or querying a server."""
        return self.cache is None and self.served is None

    def with_model_of(self, student: Student) -> Self:
        """Return a self-teacher with the student's model settings; its own chat template takes precedence."""
        inherited = {name: getattr(student, name) for name in _OF_THE_STUDENT}
        template = {name: getattr(self, name) or getattr(student, name) for name in _TEMPLATE}
        return self.model_copy(update=inherited | template)

    def with_parallelism(self, **changes: object) -> Self:
        """Return a copy with other values of `parallelism`; a self-teacher has the student's and is unchanged."""
        return self if self.is_student else super().with_parallelism(**changes)

    @model_validator(mode="after")
    def streamed_layers_are_frozen_and_come_and_go(self) -> Self:
        reasons = {
            f"weights={self.weights}": self.is_student,
            "compile=true": self.compile,
            "parallelism.reshard_after_forward=false": not self.parallelism.frees_gathered,
        }
        if self.offload == "layers" and (wrong := next((name for name, holds in reasons.items() if holds), None)):
            raise ValueError(
                f"offload=layers: with {wrong}, layers cannot be moved one by one; leave {wrong.partition('=')[0]} "
                "out, or write offload: true"
            )
        return self

    @model_validator(mode="after")
    def only_frozen_teachers_name_a_model(self) -> Self:
        if self.is_student and self.model is not None and self.cache is None:
            raise ValueError(
                f"model={self.model}: weights={self.weights} uses the student's weights and no other model; leave "
                "model out, or write weights: frozen"
            )
        if not self.is_student and self.model is None:
            raise ValueError(
                "model: required, but not given; name the teacher's, or write weights: student or weights: ema for a "
                "teacher with the student's weights"
            )
        return self

    @model_validator(mode="after")
    def answers_have_one_origin(self) -> Self:
        if self.served is not None and (self.cache is not None or self.is_student):
            name = f"cache={self.cache}" if self.cache is not None else f"weights={self.weights}"
            raise ValueError(f"{name}: the servers in served answer for this teacher; leave one of the two out")
        if self.cache is not None and self.is_student:
            raise ValueError(
                f"weights={self.weights}: the answers in cache={self.cache} are a frozen teacher's; leave it out, or "
                "leave cache out for a teacher that is computed in the run"
            )
        if self.cache is not None and self.context is not None and self.context.gap_every is not None:
            raise ValueError(
                f"context.gap_every={self.context.gap_every}: cache={self.cache} has answers with the context, and the "
                "gap also needs answers without it; leave it out"
            )
        return self


class SameTokenizerTeacher(TeacherBase):
    """A teacher whose tokenizer maps the same text to the same ids as the student's."""

    type: Literal["same_tokenizer"]
    loss: SameTokenizerTerm | None = None
    """This teacher's own loss term instead of the one that `loss` gives it."""


class OwnIdsTeacher(TeacherBase):
    """Settings of teachers with another tokenizer."""

    projection: str = "auto"
    """A projection file, or auto: built once for the pair and cached."""
    top_k: Annotated[int, Needs("projection", ("auto",))] = Field(4, ge=1)
    """projection=auto: entries kept per row."""
    projection_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the projection's weights, trained on the student's schedule, or null to fix them. For
    loss.type=p_kl or h_kl.
    """
    roles: Frozen[str, tuple[str, ...]] = Field(default_factory=dict)
    """Role → the special tokens of either side that have it, if it is not detected: `{end_of_turn: ["<|stop|>",
    "<|eot_id|>"]}`. Tokens with the same role are compared; the inspect tool shows the detected roles.
    """
    max_length: int | None = Field(None, ge=2)
    """Longest sequence in the teacher's tokens; by default the positions of its model. The student learns nothing from
    this teacher beyond it.
    """
    equal_history: EqualHistory = "text"
    """Texts that both sides must have read alike before a compared chunk. text: up to white space and Unicode form;
    bytes: byte for byte; none: no agreement.
    """
    loss: LossTerm | None = None
    """This teacher's own loss term instead of the one that `loss` gives it."""

    @property
    def roles_by_token(self) -> dict[str, tuple[str, ...]]:
        """Roles of each token."""
        tokens = dict.fromkeys(token for tokens in self.roles.values() for token in tokens)
        return {token: tuple(role for role, having in self.roles.items() if token in having) for token in tokens}


class AutoTeacher(OwnIdsTeacher):
    """A teacher that the run loads. It becomes same_tokenizer or cross_tokenizer, as config.yaml shows."""

    type: Literal["auto"]


class CrossTokenizerTeacher(OwnIdsTeacher):
    """A teacher with another tokenizer."""

    type: Literal["cross_tokenizer"]


class CachedTeacher(OwnIdsTeacher):
    """A teacher whose answers were stored in a folder; no model is loaded. It becomes same_tokenizer or
    cross_tokenizer, as config.yaml shows.
    """

    type: Literal["cached"]
    cache: str = Field(min_length=1)
    """Folder with the teacher's stored output (nemo-opd cache build)."""
    model: str = "none"
    """Not set: no model is loaded."""

    @model_validator(mode="after")
    def cached_teachers_have_no_model(self) -> "CachedTeacher":
        if name := first_changed(self, _OF_A_MODEL):
            raise ValueError(
                f"{name} is for a model that is loaded, and the answers in {self.cache} are stored already; leave it "
                "out, or write type: same_tokenizer or cross_tokenizer for a teacher that the run loads"
            )
        return self


class ServedTeacher(Endpoint, OwnIdsTeacher):
    """A teacher on servers, which return the log-probabilities of each position's likeliest tokens; no model is loaded.
    It becomes same_tokenizer or cross_tokenizer, as config.yaml shows.
    """

    type: Literal["served"]
    model: str
    """Name under which the servers serve the model; if it is not a folder or hub name, `tokenizer` is needed."""

    @property
    def is_computed(self) -> bool:
        return False

    @model_validator(mode="after")
    def served_teachers_have_no_weights(self) -> "ServedTeacher":
        if name := first_changed(self, (*_OF_WEIGHTS, "weights", "cache", "served")):
            raise ValueError(
                f"{name} has no effect: {self.model} is computed by the servers in urls; leave it out, or write type: "
                "same_tokenizer or cross_tokenizer for a teacher that the run loads"
            )
        return self


Teacher = Annotated[
    AutoTeacher | SameTokenizerTeacher | CrossTokenizerTeacher | CachedTeacher | ServedTeacher,
    Field(discriminator="type"),
]
UnresolvedTeacher = AutoTeacher | CachedTeacher | ServedTeacher
"""Teachers whose tokenizers tell whether they become same_tokenizer or cross_tokenizer."""


def first_changed(teacher: TeacherBase, names: Iterable[str]) -> str | None:
    """Return the first of these settings whose value is not its default; None if all are."""
    fields = type(teacher).model_fields
    changed = (name for name in names if getattr(teacher, name) != fields[name].get_default(call_default_factory=True))
    return next(changed, None)
