"""Options of a build, as a projection's file records them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from nemo_opd.alignment.roles import RoleOverrides
from nemo_opd.errors import ProjectionError

Roles = tuple[tuple[str, tuple[str, ...]], ...]
_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class BuilderOptions:
    """Passes of methods.md §2 that built a matrix, and their settings, which are None if the pass did not run."""

    passes: tuple[str, ...] = ()
    """Names of the passes in the order they ran; empty for a matrix made from arrays."""
    roles: Roles = ()
    """(token content, its roles), ordered by content: the overrides used to pair special tokens."""
    width: _Count | None = None
    """Entries per row of the multi-token pass."""
    decay: _Positive | None = None
    """Weight of a piece relative to the previous one."""
    reverse: bool = False
    """Whether the multi-token pass also re-tokenized the teacher's tokens with the student."""
    embedding_weight: _Positive | None = None
    embedding_temperature: _Positive | None = None
    embedding_width: _Count | None = None
    embedding_anchors: _Count | None = None
    """Number of exact pairs on which the embedding spaces were aligned."""
    top_k: _Count | None = None
    """Entries per row after the cut."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def after(self, name: str, **changes: Any) -> BuilderOptions:
        """Return these options after another pass; a pass that runs again is listed again."""
        return replace(self, passes=(*self.passes, name), **changes)

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> BuilderOptions:
        """Read the output of `to_json`. Raises ProjectionError for anything else."""
        try:
            return _ADAPTER.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "builder options"
            raise ProjectionError(f"its builder options are damaged: {place}: {first['msg']}") from None


_ADAPTER = TypeAdapter(BuilderOptions)


def frozen_roles(roles: RoleOverrides | None) -> Roles:
    """Return the overrides in canonical form: sorted by token, roles as tuples."""
    return tuple(
        sorted((token, (names,) if isinstance(names, str) else tuple(names)) for token, names in (roles or {}).items())
    )
