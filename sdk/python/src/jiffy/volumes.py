"""Volumes of the daemon. Have all methods of `e2b.Volume` and `e2b.AsyncVolume`."""

from __future__ import annotations

import os
from typing import Any, Self, Unpack, cast

import e2b
from e2b.connection_config import ApiParams, merge_api_params
from e2b.volume.connection_config import VolumeApiParams, VolumeConnectionConfig

from jiffy import calls
from jiffy.connection import Connected
from jiffy.transport import send, send_async
from jiffy.volume_snapshots import VolumeSnapshot


class _Addressed(Connected):
    """Base class of volumes, whose files have the address of the daemon."""

    _api_url: str | None = None
    _own_params: ApiParams = {}

    def _at(self, params: ApiParams) -> Self:
        """Selects the daemon of the volume. For its files, `E2B_VOLUME_API_URL` has precedence."""
        self._own_params = params
        self._api_url = os.environ.get("E2B_VOLUME_API_URL") or params.get("api_url")
        return self

    def _params(self, opts: ApiParams) -> ApiParams:
        """Returns the connection options of a call on this volume."""
        return merge_api_params(self._own_params, opts)

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

    def snapshot(self, **opts: Unpack[ApiParams]) -> VolumeSnapshot:
        """Stores a snapshot of the volume. Requires a daemon with a store."""
        return send(self._config(**self._params(opts)), calls.snapshot_volume(self.volume_id))

    @classmethod
    def snapshots(cls, **opts: Unpack[ApiParams]) -> list[VolumeSnapshot]:
        """Returns the snapshots of all volumes of the key, also of removed volumes."""
        config, found, token = cls._config(**opts), list[VolumeSnapshot](), None
        while True:
            page, token = send(config, calls.list_volume_snapshots(token))
            found += page
            if token is None:
                return found

    @classmethod
    def restore(cls, snapshot: str | VolumeSnapshot, name: str, **opts: Unpack[ApiParams]) -> Self:
        """Creates a volume with the files of a snapshot.

        :param snapshot: Snapshot, or its id.
        :param name: Name of the new volume.
        """
        volume_id = send(cls._config(**opts), calls.restore_volume(snapshot, name))
        return cls.connect(volume_id, **opts)

    @classmethod
    def delete_snapshot(cls, snapshot: str | VolumeSnapshot, **opts: Unpack[ApiParams]) -> bool:
        """Deletes a snapshot. Returns false if it does not exist.

        :param snapshot: Snapshot, or its id.
        """
        return send(cls._config(**opts), calls.delete_volume_snapshot(snapshot))

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

    async def snapshot(self, **opts: Unpack[ApiParams]) -> VolumeSnapshot:
        """Stores a snapshot of the volume. Requires a daemon with a store."""
        return await send_async(self._config(**self._params(opts)), calls.snapshot_volume(self.volume_id))

    @classmethod
    async def snapshots(cls, **opts: Unpack[ApiParams]) -> list[VolumeSnapshot]:
        """Returns the snapshots of all volumes of the key, also of removed volumes."""
        config, found, token = cls._config(**opts), list[VolumeSnapshot](), None
        while True:
            page, token = await send_async(config, calls.list_volume_snapshots(token))
            found += page
            if token is None:
                return found

    @classmethod
    async def restore(cls, snapshot: str | VolumeSnapshot, name: str, **opts: Unpack[ApiParams]) -> Self:
        """Creates a volume with the files of a snapshot.

        :param snapshot: Snapshot, or its id.
        :param name: Name of the new volume.
        """
        volume_id = await send_async(cls._config(**opts), calls.restore_volume(snapshot, name))
        return await cls.connect(volume_id, **opts)

    @classmethod
    async def delete_snapshot(cls, snapshot: str | VolumeSnapshot, **opts: Unpack[ApiParams]) -> bool:
        """Deletes a snapshot. Returns false if it does not exist.

        :param snapshot: Snapshot, or its id.
        """
        return await send_async(cls._config(**opts), calls.delete_volume_snapshot(snapshot))

    def _get_volume_config(self, **opts: Unpack[VolumeApiParams]) -> VolumeConnectionConfig:
        return super()._get_volume_config(**cast(Any, self._volume_opts(opts)))
