"""The base of all settings."""

from collections.abc import Hashable
from typing import Annotated, Never, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V", bound=Hashable)


class Settings(BaseModel):
    """Frozen, and an unknown key is an error. A field's docstring is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def no_value_is_empty(cls, value: object) -> object:
        if is_blank(value):  # `key=`, or a shell variable that is not set
            raise ValueError(EMPTY)
        # A line break may be meant, as a text at which answers end.
        if isinstance(value, tuple) and any(isinstance(each, str) and not each.strip(" ") for each in value):
            raise ValueError("an element is empty; write a value, or leave the element out")
        return value


YEAR_S = 365 * 86400.0
"""The longest limit in seconds: what waits takes no number that has no date."""
EMPTY = "it is empty; write a value, or leave the key out"


def is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


class FrozenDict(dict[_K, _V]):
    """A dict that stays as it is, so that settings which hold one do."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[_K, _V]]]:
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> Never:
        raise TypeError("settings are frozen")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


Frozen = Annotated[dict[_K, _V], AfterValidator(FrozenDict)]
"""Type of a field with free keys."""
