"""How a projection was built, as its file records it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from nemo_opd.alignment.roles import RoleOverrides
from nemo_opd.errors import ProjectionError

Roles = tuple[tuple[str, tuple[str, ...]], ...]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class BuilderOptions:
    """The passes of methods.md §2 that made a matrix, and what they were told. None: that pass did not run."""

    passes: tuple[str, ...] = ()
    """In the order in which they ran; empty for a matrix made from arrays."""
    roles: Roles = ()
    """(token content, its roles), by content: the overrides with which special tokens were paired."""
    width: Count | None = None
    """Entries a row of the multi-token pass."""
    decay: Positive | None = None
    """Weight of a piece relative to the one before."""
    reverse: bool = False
    """The multi-token pass also re-tokenized the teacher's tokens with the student."""
    embedding_weight: Positive | None = None
    embedding_temperature: Positive | None = None
    embedding_width: Count | None = None
    embedding_anchors: Count | None = None
    """Exact pairs by which the two embedding spaces were brought together."""
    top_k: Count | None = None
    """Entries a row after the cut."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def after(self, name: str, **changes: Any) -> BuilderOptions:
        """These options and one more pass; a pass that runs again is listed again."""
        return replace(self, passes=(*self.passes, name), **changes)

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> BuilderOptions:
        """Raises ProjectionError for what `to_json` did not write."""
        try:
            return _ADAPTER.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "builder options"
            raise ProjectionError(f"its builder options are damaged: {place}: {first['msg']}") from None


_ADAPTER = TypeAdapter(BuilderOptions)


def frozen_roles(roles: RoleOverrides | None) -> Roles:
    """Overrides in one form, whichever way they were written."""
    return tuple(
        sorted((token, (names,) if isinstance(names, str) else tuple(names)) for token, names in (roles or {}).items())
    )
