"""Answers that several resources share.

The resources of the REST interface have their models beside them, in `api/`.
"""

from __future__ import annotations

from pydantic import BaseModel, Field


class Status(BaseModel):
    """Answers a probe."""

    status: str = Field(description="`ok`, or the problem")


class DeviceView(BaseModel):
    """A device of a member."""

    type: str = Field(description="CPU, GPU or TPU")
    index: int = Field(description="index among the member's devices of that type")
    description: str = Field(description="name that the hardware reports")
