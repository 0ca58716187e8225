"""What every section is made of: strict, closed, immutable models and kinds of numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-5` (no dot) as text; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Real = Annotated[float, BeforeValidator(_number)]
PositiveReal = Annotated[Real, Field(gt=0)]
Fraction = Annotated[Real, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of every section: strict types, no unknown keys, immutable once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
