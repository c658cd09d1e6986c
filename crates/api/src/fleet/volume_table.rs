//! [`VolumeTable`]: volumes of all members of a fleet, a table that each member holds in memory.
//!
//! A *member* is a host of the fleet. The *home* of a volume is the member that has its files.

use crate::error::ApiError;
use async_trait::async_trait;
use jiffy_fleet::tables::{Action, TableError, Tables};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::{RowKey, Table, UnknownFields, VolumeRow};
use jiffy_volumes::{MAX_VOLUMES, Volume, VolumeError};

/// Volume with its home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HomedVolume {
    /// Volume.
    pub volume: Volume,
    /// Member that has the files.
    pub home: MemberId,
}

/// Failure of a change of the table.
#[derive(Debug, thiserror::Error)]
pub enum VolumeTableError {
    /// The owner has a volume with this name, on any member.
    #[error(transparent)]
    Exists(VolumeError),
    /// The volumes of the owner have the maximum number or size.
    #[error(transparent)]
    Full(VolumeError),
    /// The change was not made, or its outcome is unknown.
    #[error("{reason}")]
    Unavailable {
        /// Reason.
        reason: String,
        /// The same call may succeed later.
        is_temporary: bool,
    },
}

impl From<VolumeTableError> for ApiError {
    fn from(error: VolumeTableError) -> Self {
        match error {
            VolumeTableError::Exists(error) => Self::conflict("name_taken", error.to_string()),
            VolumeTableError::Full(error) => Self::conflict("max_volumes", error.to_string()),
            VolumeTableError::Unavailable {
                reason,
                is_temporary: true,
            } => Self::fleet_unavailable(reason),
            VolumeTableError::Unavailable { reason, .. } => Self::internal(reason),
        }
    }
}

/// Volumes of all members. The owner of a volume is the id of an API key, or empty for the owner of
/// the fleet.
#[async_trait]
pub trait VolumeTable: Send + Sync {
    /// Returns whether this member has read the table.
    fn is_loaded(&self) -> bool;

    /// Returns the volumes of all owners, in no particular order.
    fn all(&self) -> Vec<HomedVolume>;

    /// Returns the volume with this id, of any owner.
    fn by_id(&self, id: &str) -> Option<HomedVolume>;

    /// Adds a volume.
    ///
    /// # Errors
    /// [`VolumeTableError`] if the owner has such a volume or too many, or the table cannot be
    /// changed.
    async fn add(&self, added: HomedVolume) -> Result<(), VolumeTableError>;

    /// Removes the volumes with these ids that exist.
    ///
    /// # Errors
    /// [`VolumeTableError::Unavailable`] if the table cannot be changed.
    async fn remove(&self, ids: Vec<String>) -> Result<(), VolumeTableError>;
}

#[async_trait]
impl VolumeTable for Tables {
    fn is_loaded(&self) -> bool {
        self.number() > 0
    }

    fn all(&self) -> Vec<HomedVolume> {
        let rows = self.rows(Table::Volumes);
        let volumes = rows.iter().filter_map(|row| row.as_volume());
        volumes.map(homed).collect()
    }

    fn by_id(&self, id: &str) -> Option<HomedVolume> {
        let row = self.row(&RowKey::Volume(id.to_owned()))?;
        row.as_volume().map(homed)
    }

    async fn add(&self, added: HomedVolume) -> Result<(), VolumeTableError> {
        let Volume { name, owner, .. } = added.volume.clone();
        let changed = self.change(Action::CreateVolume(row_of(added))).await;
        changed.map(drop).map_err(|error| match error {
            TableError::Exists(_) => VolumeTableError::Exists(VolumeError::Exists(name)),
            TableError::Full(_) => {
                let all = VolumeTable::all(self);
                let count = all.iter().filter(|one| one.volume.owner == owner).count();
                VolumeTableError::Full(if count >= MAX_VOLUMES {
                    VolumeError::Full
                } else {
                    VolumeError::Total
                })
            }
            error => unavailable(&error),
        })
    }

    async fn remove(&self, ids: Vec<String>) -> Result<(), VolumeTableError> {
        match self.change(Action::RemoveVolumes(ids)).await {
            // An earlier attempt has removed the volumes.
            Ok(_) | Err(TableError::Unknown(_)) => Ok(()),
            Err(error) => Err(unavailable(&error)),
        }
    }
}

fn unavailable(error: &TableError) -> VolumeTableError {
    VolumeTableError::Unavailable {
        reason: error.to_string(),
        is_temporary: error.is_temporary(),
    }
}

fn homed(row: &VolumeRow) -> HomedVolume {
    HomedVolume {
        volume: Volume {
            id: row.id.clone(),
            owner: row.owner.clone().unwrap_or_default(),
            name: row.name.clone(),
            bytes: row.bytes,
            files: row.files,
            created_ms: row.created_ms,
        },
        home: row.home,
    }
}

fn row_of(homed: HomedVolume) -> VolumeRow {
    let HomedVolume { volume, home } = homed;
    VolumeRow {
        id: volume.id,
        owner: Some(volume.owner).filter(|owner| !owner.is_empty()),
        name: volume.name,
        home,
        bytes: volume.bytes,
        files: volume.files,
        created_ms: volume.created_ms,
        unknown: UnknownFields::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::tests::fleet::Fleet;
    use jiffy_fleet_core::record::{
        MAX_OWNER_VOLUME_BYTES, MAX_OWNER_VOLUME_FILES, MAX_OWNER_VOLUMES,
    };
    use jiffy_volumes::{MAX_KEY_BYTES, MAX_KEY_FILES};

    fn new(id: &str, name: &str) -> HomedVolume {
        HomedVolume {
            volume: Volume {
                id: id.to_owned(),
                owner: "a".to_owned(),
                name: name.to_owned(),
                bytes: 1 << 20,
                files: 10,
                created_ms: 5,
            },
            home: MemberId(2),
        }
    }

    #[test]
    fn a_volume_of_one_member_is_known_to_all_until_one_removes_it() {
        let fleet = Fleet::start();
        let [one, two] = fleet.tables();
        let made = new("vol-1", "data");
        fleet.block_on(two.add(made.clone())).unwrap();
        for tables in [&one, &two] {
            assert_eq!(VolumeTable::all(tables), std::slice::from_ref(&made));
            assert_eq!(tables.by_id("vol-1"), Some(made.clone()));
            assert_eq!(tables.by_id("data"), None);
        }
        let twice = fleet.block_on(one.add(new("vol-2", "data"))).unwrap_err();
        let twice: ApiError = twice.into();
        assert_eq!(twice.error_code, "name_taken");
        fleet
            .block_on(one.remove(vec!["vol-1".to_owned()]))
            .unwrap();
        assert!(VolumeTable::all(&two).is_empty());
        // A repeated removal succeeds.
        fleet
            .block_on(two.remove(vec!["vol-1".to_owned()]))
            .unwrap();
    }

    #[test]
    fn hosts_and_fleets_have_the_same_limits() {
        assert_eq!(MAX_OWNER_VOLUMES, MAX_VOLUMES);
        assert_eq!(MAX_OWNER_VOLUME_BYTES, MAX_KEY_BYTES);
        assert_eq!(MAX_OWNER_VOLUME_FILES, MAX_KEY_FILES);
    }
}
