"""The base of all settings."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, and an unknown key is an error. A field's docstring is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
