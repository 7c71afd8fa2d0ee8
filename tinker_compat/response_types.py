"""Responses that only some versions of Tinker have a class for: theirs where the installed one has it, else ours."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypeVar

import tinker
from pydantic import BaseModel, ConfigDict
from tinker import types

from tinker_compat.errors import refuse


class _Response(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CheckpointArchiveUrlResponse(_Response):
    """Until 0.37."""

    url: str
    expires: datetime


class ExternalWeightsUrlsResponse(_Response):
    """Newer than 0.23. urls: by the files' names."""

    urls: dict[str, str]
    expires: datetime


class SaveWeightsExternalResponse(_Response):
    """Newer than 0.23."""

    path: str
    type: Literal["save_weights_external"] | None = None


class WhoamiResponse(_Response):
    """Newer than 0.23."""

    user_urn: str
    org_urn: str
    email: str | None = None


R = TypeVar("R", bound=_Response)


def respond(own: type[R], **fields: Any) -> R:
    """An object of Tinker's class of that name, else of our own."""
    return getattr(types, own.__name__, own)(**fields)


def require_type(name: str, call: str) -> Any:
    """Tinker's class. Raises BadRequestError where the installed version has none."""
    found = getattr(types, name, None)
    if found is None:
        refuse(
            f"{call} needs tinker.types.{name}, which tinker {tinker.__version__} does not have: install a newer "
            "tinker package."
        )
    return found
