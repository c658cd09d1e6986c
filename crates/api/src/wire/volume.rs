//! Conversion of volumes and their entries to the bodies of the API.

use super::moment;
use jiffy_api_types::{Moment, Volume, VolumeEntry, VolumeEntryType, VolumeSnapshot};
use jiffy_fleet_core::MemberId;
use jiffy_volumes::{Entry, EntryKind};

/// Returns a volume as clients see it. `host` is the member of a fleet that has its files.
pub(crate) fn shown(volume: &jiffy_volumes::Volume, host: Option<MemberId>) -> Volume {
    Volume {
        volume_id: volume.id.clone(),
        name: volume.name.clone(),
        size_mb: volume.bytes >> 20,
        max_files: volume.files,
        created_at: moment(volume.created_ms),
        host: host.map(|host| host.to_string()),
    }
}

/// Returns a snapshot of a volume as clients see it.
pub(crate) fn shown_snapshot(snapshot: &jiffy_volumes::VolumeSnapshot) -> VolumeSnapshot {
    VolumeSnapshot {
        volume_snapshot_id: snapshot.id.clone(),
        volume_id: snapshot.volume.clone(),
        name: snapshot.name.clone(),
        size_mb: snapshot.size >> 20,
        max_files: snapshot.files,
        used_bytes: snapshot.bytes,
        created_at: moment(snapshot.created_ms),
    }
}

/// Returns an entry of a volume as clients see it.
pub(crate) fn entry(entry: &Entry) -> VolumeEntry {
    let attributes = &entry.attributes;
    VolumeEntry {
        name: entry.name().to_owned(),
        kind: match entry.kind() {
            EntryKind::File => VolumeEntryType::File,
            EntryKind::Directory => VolumeEntryType::Directory,
            EntryKind::Symlink => VolumeEntryType::Symlink,
            EntryKind::Other => VolumeEntryType::Unknown,
        },
        path: entry.path.clone(),
        size: attributes.size,
        mode: entry.permissions(),
        uid: attributes.uid,
        gid: attributes.gid,
        atime: time(attributes.accessed.0),
        mtime: time(attributes.modified.0),
        ctime: time(attributes.changed.0),
        target: entry.target.clone(),
    }
}

/// Formats nanoseconds since 1970 as RFC 3339 with microseconds, the precision of E2B's clients.
fn time(nanoseconds: i64) -> Moment {
    let time = jiff::Timestamp::from_microsecond(nanoseconds.div_euclid(1000));
    // All 64-bit numbers of nanoseconds are valid times.
    Moment(time.unwrap_or(jiff::Timestamp::UNIX_EPOCH).to_string())
}
