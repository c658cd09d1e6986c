"""Volumes of the daemon. Have all methods of `e2b.Volume` and `e2b.AsyncVolume`."""

from __future__ import annotations

import os
from typing import Any, Self, Unpack, cast

import e2b
from e2b.connection_config import ApiParams
from e2b.volume.connection_config import VolumeApiParams, VolumeConnectionConfig

from jiffy.connection import Connected


class _Addressed(Connected):
    """Base class of volumes, whose files have the address of the daemon."""

    _api_url: str | None = None

    def _at(self, params: ApiParams) -> Self:
        """Selects the address of the files. `E2B_VOLUME_API_URL` has precedence."""
        self._api_url = os.environ.get("E2B_VOLUME_API_URL") or params.get("api_url")
        return self

    def _volume_opts(self, opts: VolumeApiParams) -> Any:
        """Adds the address of the daemon to the options of a call, unless they have one."""
        if opts.get("api_url") or opts.get("domain") or opts.get("debug") or not self._api_url:
            return opts
        return {**opts, "api_url": self._api_url}


class Volume(_Addressed, e2b.Volume):
    """Volumes. Has all methods of `e2b.Volume`."""

    @classmethod
    def create(cls, name: str, **opts: Unpack[ApiParams]) -> Self:
        """Creates a volume."""
        resolved = cls._resolve_api_params(**opts)
        return super().create(name, **resolved)._at(resolved)

    @classmethod
    def connect(cls, volume_id: str, **opts: Unpack[ApiParams]) -> Self:
        """Returns a volume by id or name."""
        resolved = cls._resolve_api_params(**opts)
        return super().connect(volume_id, **resolved)._at(resolved)

    def _get_volume_config(self, **opts: Unpack[VolumeApiParams]) -> VolumeConnectionConfig:
        return super()._get_volume_config(**cast(Any, self._volume_opts(opts)))


class AsyncVolume(_Addressed, e2b.AsyncVolume):
    """Volumes. Has all methods of `e2b.AsyncVolume`."""

    @classmethod
    async def create(cls, name: str, **opts: Unpack[ApiParams]) -> Self:
        """Creates a volume."""
        resolved = cls._resolve_api_params(**opts)
        return (await super().create(name, **resolved))._at(resolved)

    @classmethod
    async def connect(cls, volume_id: str, **opts: Unpack[ApiParams]) -> Self:
        """Returns a volume by id or name."""
        resolved = cls._resolve_api_params(**opts)
        return (await super().connect(volume_id, **resolved))._at(resolved)

    def _get_volume_config(self, **opts: Unpack[VolumeApiParams]) -> VolumeConnectionConfig:
        return super()._get_volume_config(**cast(Any, self._volume_opts(opts)))
