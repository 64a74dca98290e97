"""Base class of all settings."""

from collections.abc import Hashable
from typing import Annotated, Never, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V", bound=Hashable)


class Settings(BaseModel):
    """Base of all settings: frozen, and an unknown key is an error. A field's docstring is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def no_value_is_empty(cls, value: object) -> object:
        if is_blank(value):  # `key=`, or a shell variable that is not set
            raise ValueError(EMPTY)
        # A lone line break is allowed, as a stop text of answers.
        if isinstance(value, tuple) and any(isinstance(element, str) and not element.strip(" ") for element in value):
            raise ValueError("an element is empty; write a value, or leave the element out")
        return value


YEAR_S = 365 * 86400.0
"""Longest time limit in seconds; functions that wait overflow on much larger numbers."""
EMPTY = "it is empty; write a value, or leave the key out"


def is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


class FrozenDict(dict[_K, _V]):
    """An immutable, hashable dict, which keeps settings that hold one frozen."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[_K, _V]]]:
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> Never:
        raise TypeError("settings are frozen")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


Frozen = Annotated[dict[_K, _V], AfterValidator(FrozenDict)]
"""Type of a field with arbitrary keys."""
