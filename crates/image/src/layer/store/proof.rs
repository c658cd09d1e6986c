//! Proofs that a registry has a layer.
//!
//! The store shares unpacked layers between all imports, by content. A manifest alone must not give
//! access to a layer, since anyone can write a manifest with the diff id of a private layer. An
//! import may use a layer of the store only if its registry has proved, during this import, that it
//! has the bytes of the layer. There are two kinds of proof:
//!
//! - The registry served the blob to the *puller*, an unprivileged process. The process that
//!   started the puller computed the digest of the blob. If the store has a record that a blob with
//!   this digest unpacks to the layer, the blob is not unpacked again. Otherwise the blob is
//!   unpacked, and its diff id is compared.
//! - The registry answered `HEAD` for the blob with the right size, and a record states that *this*
//!   registry and repository once served these bytes to this host over TLS. Without the record, the
//!   response would prove nothing, since a registry can answer 200 to every request. With the
//!   record, the response shows that the caller may still read the blob: the request has the
//!   credentials of this import, and TLS authenticates the registry.
//!
//! The records of a layer are in the directory of the layer. They are written under the lock of the
//! layer store, and are removed with the layer.

use super::LayerStore;
use crate::file::{self, FileError, OnPath};
use crate::home::Home;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::Path;

const PROOFS_FILE: &str = "blobs.json";
/// Maximum number of recorded blobs and repositories of a layer, together. Blobs without a record
/// are downloaded again.
const MAX_PROOFS: usize = 64;

/// Repository that served a blob over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Repository {
    pub registry: String,
    pub repository: String,
}

/// A blob that unpacks to a layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct BlobRecord {
    sha256: String,
    served_by: Vec<Repository>,
}

/// Blobs that unpack to one layer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct BlobProofs(Vec<BlobRecord>);

impl BlobProofs {
    /// Reads the proofs of a layer without a lock. Another process may add or remove the layer
    /// meanwhile.
    pub(crate) fn peek(home: &Home, diff_id: &str) -> Self {
        Self::read(&LayerStore::place_in(&home.layers(), diff_id))
    }

    fn read(place: &Path) -> Self {
        // A missing or damaged file means that there are no proofs: the blob is downloaded again.
        let text = fs::read(place.join(PROOFS_FILE)).ok();
        let proofs = text.and_then(|text| serde_json::from_slice(&text).ok());
        proofs.unwrap_or_default()
    }

    /// Returns whether there is a record that the blob unpacks to the layer.
    pub(crate) fn knows(&self, sha256: &str) -> bool {
        self.0.iter().any(|blob| blob.sha256 == sha256)
    }

    /// Returns whether there is a record that this repository has served the blob over TLS.
    pub(crate) fn served(&self, sha256: &str, by: &Repository) -> bool {
        let mut blobs = self.0.iter().filter(|blob| blob.sha256 == sha256);
        blobs.any(|blob| blob.served_by.contains(by))
    }

    /// Adds a proof. Returns whether the proofs changed: a known proof is not added again, and no
    /// proof is added beyond [`MAX_PROOFS`].
    fn add(&mut self, sha256: &str, by: Option<&Repository>) -> bool {
        let count: usize = self.0.iter().map(|b| 1 + b.served_by.len()).sum();
        // One call adds at most a blob and a repository.
        if count + 2 > MAX_PROOFS {
            return false;
        }
        let at = self.0.iter().position(|blob| blob.sha256 == sha256);
        let known = at.is_some();
        let at = at.unwrap_or_else(|| {
            self.0.push(BlobRecord {
                sha256: sha256.to_owned(),
                served_by: Vec::new(),
            });
            self.0.len() - 1
        });
        let Some(blob) = self.0.get_mut(at) else {
            return false;
        };
        match by {
            Some(by) if !blob.served_by.contains(by) => {
                blob.served_by.push(by.clone());
                true
            }
            _ => !known,
        }
    }
}

impl LayerStore {
    /// Returns whether there is a record that the blob unpacks to the layer.
    pub(crate) fn knows(&self, diff_id: &str, sha256: &str) -> bool {
        BlobProofs::read(&self.place(diff_id)).knows(sha256)
    }

    /// Records that the blob unpacks to the layer. Also records the repository, if it served the
    /// blob over TLS.
    pub(crate) fn record(
        &self,
        diff_id: &str,
        sha256: &str,
        by: Option<&Repository>,
    ) -> Result<(), FileError> {
        let place = self.place(diff_id);
        let mut proofs = BlobProofs::read(&place);
        if !proofs.add(sha256, by) {
            return Ok(());
        }
        let text = serde_json::to_vec(&proofs)
            .map_err(io::Error::other)
            .on("write", &place)?;
        // A crash may lose this file: without the record, the blob is downloaded again.
        file::write(&place, PROOFS_FILE, &text).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_repository_that_served_a_blob_has_a_proof() {
        let by = |registry: &str, repository: &str| Repository {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
        };
        let mut proofs = BlobProofs::default();
        assert!(proofs.add("b", Some(&by("r.example", "alice/app"))));
        assert!(!proofs.add("b", Some(&by("r.example", "alice/app"))));
        assert!(proofs.add("c", None) && proofs.knows("c"));
        assert!(proofs.served("b", &by("r.example", "alice/app")));
        for (sha256, registry, repository) in [
            ("b", "r.example", "mallory/app"),
            ("b", "mallory.example", "alice/app"),
            ("c", "r.example", "alice/app"),
            ("d", "r.example", "alice/app"),
        ] {
            assert!(!proofs.served(sha256, &by(registry, repository)));
        }
        for n in 0..1000 {
            proofs.add(&n.to_string(), Some(&by("r.example", "x")));
        }
        assert!(serde_json::to_vec(&proofs).unwrap().len() < 16 << 10);
    }
}
