//! Grants for the fetcher, the process that downloads missing memory for VMMs. A grant is a file
//! that permits one VMM to read the layers of its snapshot. The file is next to the socket on which
//! the VMM waits for the fetcher ([`jiffy_proto::fetch`]).
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. The *root* of a snapshot or layer is the hash that identifies it in the
//! store. In the store, a snapshot consists of *parts*, one for each of its layers and other files.
//! Its *manifest* lists the parts.

use crate::host::RemoteError;
use crate::{FormatError, Hash};
use data_encoding::HEXLOWER;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Directory of the grants in the runtime directory (`<home>/run`).
pub const GRANTS_DIRECTORY: &str = "fetch";

/// Maximum size in bytes of a grant: far more than the layers of any restore need.
const MAX_GRANT_BYTES: u64 = 1 << 20;
/// End of the name of a grant.
const GRANT_SUFFIX: &str = ".grant";
/// End of the name of the socket that belongs to a grant.
const SOCKET_SUFFIX: &str = ".sock";
/// End of the name of a grant that is being written.
const NEW_SUFFIX: &str = ".new";
/// Backlog of the listening socket, larger than the number of connections that occur.
const BACKLOG: i32 = 8;

/// Location of a layer in the store and in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerOrigin {
    /// Name of the tenant.
    pub tenant: String,
    /// Root of the snapshot.
    #[serde(with = "hash")]
    pub snapshot: Hash,
    /// Index of the part in the manifest.
    pub part: usize,
    /// Root of the part, which names it in the cache.
    #[serde(with = "hash")]
    pub layer: Hash,
}

/// Layers of which one VMM may request chunks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchGrant {
    /// Incomplete layers, by their numbers in the restore.
    pub layers: Vec<GrantedLayer>,
    /// True if all layers are fetched completely without requests of the VMM.
    #[serde(default)]
    pub prefetch: bool,
}

/// Layer of a grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrantedLayer {
    /// Index of the layer in `RestoreConfig::memory` of the VMM, whose layers are ordered oldest
    /// first.
    pub number: u32,
    /// The layer.
    pub origin: LayerOrigin,
}

/// Hashes as hexadecimal digits.
pub(crate) mod hash {
    use crate::Hash;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(hash: &Hash, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(hash)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Directory of grants. One daemon writes the grants, and one fetcher reads them.
#[derive(Debug, Clone)]
pub struct GrantDirectory(PathBuf);

/// Listening socket for a VMM whose grant is not written yet.
#[derive(Debug)]
pub struct GrantSocket {
    id: String,
    /// The listening socket, for the VMM. The grant expires when the last copy is closed.
    pub listener: OwnedFd,
}

impl GrantDirectory {
    /// Opens the directory in `run`, creating it if necessary.
    pub fn open(run: &Path) -> Result<Self, RemoteError> {
        let path = run.join(GRANTS_DIRECTORY);
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        created.map_err(RemoteError::io(&path))?;
        Ok(Self(path))
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn file(&self, id: &str, suffix: &str) -> PathBuf {
        self.0.join(format!("{id}{suffix}"))
    }

    /// Creates a listening socket for a VMM.
    pub fn listen(&self) -> Result<GrantSocket, RemoteError> {
        let id = random_id().map_err(RemoteError::io(&self.0))?;
        let path = self.file(&id, SOCKET_SUFFIX);
        let create = || -> io::Result<OwnedFd> {
            let listener = seqpacket()?;
            bind(listener.as_raw_fd(), &UnixAddr::new(&path)?)?;
            fs::set_permissions(&path, Permissions::from_mode(0o600))?;
            listen(&listener, Backlog::new(BACKLOG)?)?;
            Ok(listener)
        };
        let listener = create().map_err(RemoteError::io(&path))?;
        Ok(GrantSocket { id, listener })
    }

    /// Writes the grant of layers to the VMM at `socket`.
    pub fn write(&self, socket: &GrantSocket, grant: &FetchGrant) -> Result<(), RemoteError> {
        let path = self.file(&socket.id, GRANT_SUFFIX);
        let new = self.file(&socket.id, NEW_SUFFIX);
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec(grant)?;
            let mut options = File::options();
            let mut file = options
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&new)?;
            io::Write::write_all(&mut file, &text)?;
            // The rename makes the complete grant visible and triggers the fetcher's inotify watch.
            fs::rename(&new, &path)
        };
        write().map_err(RemoteError::io(&path))
    }

    /// Returns the ids of all grants.
    pub fn ids(&self) -> Result<Vec<String>, RemoteError> {
        let names = self.names()?;
        let ids = names
            .iter()
            .filter_map(|name| name.strip_suffix(GRANT_SUFFIX));
        Ok(ids.map(str::to_owned).collect())
    }

    /// Reads a grant.
    pub fn read(&self, id: &str) -> Result<FetchGrant, RemoteError> {
        let path = self.file(id, GRANT_SUFFIX);
        let read = || -> io::Result<FetchGrant> {
            let mut text = Vec::new();
            let file = File::open(&path)?;
            file.take(MAX_GRANT_BYTES).read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        read().map_err(RemoteError::io(&path))
    }

    /// Connects to the VMM of a grant. `None` if the VMM no longer listens.
    pub fn connect(&self, id: &str) -> io::Result<Option<OwnedFd>> {
        let link = seqpacket()?;
        let path = self.file(id, SOCKET_SUFFIX);
        match connect(link.as_raw_fd(), &UnixAddr::new(&path)?) {
            Ok(()) => Ok(Some(link)),
            Err(Errno::ECONNREFUSED | Errno::ENOENT) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Removes a grant and its socket.
    pub fn remove(&self, id: &str) {
        // Remove the grant last. If this process is killed in between, the next fetcher finds the
        // grant and removes it. A socket without a grant would remain until a daemon starts.
        let _ = fs::remove_file(self.file(id, SOCKET_SUFFIX));
        let _ = fs::remove_file(self.file(id, GRANT_SUFFIX));
    }

    /// Removes incomplete files that a killed daemon left. Only the daemon may call this.
    pub fn remove_unfinished(&self) -> Result<(), RemoteError> {
        for name in self.names()? {
            let socket = name.strip_suffix(SOCKET_SUFFIX);
            let orphan = socket.is_some_and(|id| !self.file(id, GRANT_SUFFIX).exists());
            if orphan || name.ends_with(NEW_SUFFIX) {
                // Ignore the error: the next daemon removes a remaining file.
                let _ = fs::remove_file(self.0.join(name));
            }
        }
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>, RemoteError> {
        let entries = fs::read_dir(&self.0).map_err(RemoteError::io(&self.0))?;
        let names = entries.flatten().map(|entry| entry.file_name());
        Ok(names.filter_map(|name| name.into_string().ok()).collect())
    }
}

impl LayerOrigin {
    /// Decodes the output of [`Self::encode`].
    pub fn decode(text: &str) -> Result<Self, FormatError> {
        let damaged = |_| FormatError::Damaged("it is not the origin of a layer");
        serde_json::from_str(text).map_err(damaged)
    }

    /// Encodes the origin as one line of text.
    pub fn encode(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

fn seqpacket() -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
}

fn random_id() -> io::Result<String> {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(HEXLOWER.encode(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant() -> FetchGrant {
        let origin = LayerOrigin {
            tenant: "host".to_owned(),
            snapshot: Hash([1; 32]),
            part: 3,
            layer: Hash([2; 32]),
        };
        assert_eq!(LayerOrigin::decode(&origin.encode()), Ok(origin.clone()));
        FetchGrant {
            layers: vec![GrantedLayer { number: 1, origin }],
            prefetch: true,
        }
    }

    #[test]
    fn a_grant_lasts_as_long_as_its_vmm_listens() {
        let run = tempfile::tempdir().unwrap();
        let grants = GrantDirectory::open(run.path()).unwrap();
        let socket = grants.listen().unwrap();
        assert!(grants.ids().unwrap().is_empty());
        grants.write(&socket, &grant()).unwrap();
        let [id] = &grants.ids().unwrap()[..] else {
            panic!()
        };
        assert_eq!(grants.read(id).unwrap(), grant());
        assert!(grants.connect(id).unwrap().is_some());
        drop(socket);
        assert!(grants.connect(id).unwrap().is_none());
        grants.remove(id);
        assert_eq!(fs::read_dir(grants.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_killed_daemon_left_is_removed_and_grants_stay() {
        let run = tempfile::tempdir().unwrap();
        let grants = GrantDirectory::open(run.path()).unwrap();
        let (granted, _orphan) = (grants.listen().unwrap(), grants.listen().unwrap());
        grants.write(&granted, &grant()).unwrap();
        fs::write(grants.path().join("a.new"), "{").unwrap();
        grants.remove_unfinished().unwrap();
        assert_eq!(fs::read_dir(grants.path()).unwrap().count(), 2);
        assert!(grants.connect(&granted.id).unwrap().is_some());
    }
}
