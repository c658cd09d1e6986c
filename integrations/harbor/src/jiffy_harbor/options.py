"""Options of the environment, passed with `--environment-kwarg NAME=VALUE`."""

from __future__ import annotations

from harbor.environments.options import EnvironmentOptions
from pydantic import Field


class JiffyOptions(EnvironmentOptions):
    template: str | None = Field(default=None, description="Template or snapshot that replaces the image of all tasks.")
    images: dict[str, str] = Field(
        default_factory=dict, description="Templates of the host by the name of the image that they replace."
    )
    setup: str | None = Field(
        default=None, description="Shell command that root executes once per task, before the snapshot is taken."
    )
    setup_timeout_sec: int = Field(default=1800, gt=0, description="Maximum duration of `setup` in seconds.")
    sandbox_timeout_sec: int = Field(
        default=24 * 3600, gt=0, description="Lifetime of a sandbox in seconds, for trials whose harness was killed."
    )
    max_output: int = Field(
        default=10_000_000, gt=1, description="Maximum number of characters of each output stream of a command."
    )
