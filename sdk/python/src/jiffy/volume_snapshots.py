"""Snapshots of volumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jiffy.models import time_of


@dataclass(frozen=True)
class VolumeSnapshot:
    """Snapshot of a volume in the store of the daemon."""

    snapshot_id: str
    volume_id: str
    """Volume, which may have been removed."""
    name: str
    """Name of the volume at the time of the snapshot."""
    size_mb: int
    max_files: int
    used_bytes: int
    created_at: datetime

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> VolumeSnapshot:
        return cls(
            snapshot_id=data["volumeSnapshotID"],
            volume_id=data["volumeID"],
            name=data["name"],
            size_mb=data["sizeMB"],
            max_files=data["maxFiles"],
            used_bytes=data["usedBytes"],
            created_at=time_of(data["createdAt"]),
        )
