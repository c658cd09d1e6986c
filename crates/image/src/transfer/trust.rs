//! Digests that decide whether an exported template may have the name of a stock template.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *recipe* is the source of a
//! stock template: a directory with its packages, files and settings.
//!
//! The recipe hash in a file is an unverified statement of its author. A file is trusted if its
//! SHA-256 is in the list of the installed package, or if the caller specifies its SHA-256.

use crate::import::ImportError;
use crate::template_model::{Recipe, Reference, TemplateManifest};
use data_encoding::HEXLOWER;
use jiffy_installation::Installation;
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;

/// Maximum length of a list of digests in bytes.
const MAX_LIST_BYTES: u64 = 64 << 10;

/// Trust of the caller in a template file.
#[derive(Debug, Clone, Default)]
pub struct FileTrust {
    /// Digest that the file must have, as 64 hexadecimal digits.
    pub sha256: Option<String>,
    /// Digests of the template files of this version of Jiffy.
    pub known: KnownDigests,
    /// Accepts an unknown digest and a different recipe under the name of a stock template.
    pub force: bool,
    /// Rejects an unknown digest even if the template is not a stock template, and even with
    /// `force`. Set for files from a network, and for files that the search for a stock template
    /// finds.
    pub must_be_known: bool,
}

/// Digests of the template files of one version of Jiffy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownDigests(BTreeSet<String>);

impl KnownDigests {
    /// Reads the list of the installation that this program belongs to. The list is empty if the
    /// file does not exist, or if a user other than root and the effective user can change it.
    pub fn of_installation() -> Self {
        let path = Installation::current().map(|i| i.template_checksums());
        path.and_then(|path| Self::read(&path)).unwrap_or_default()
    }

    /// Reads the list at `path`. The list is empty if other users can change the file.
    fn read(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if !is_protected(&file)? {
            return Ok(Self::default());
        }
        let mut text = String::new();
        file.take(MAX_LIST_BYTES).read_to_string(&mut text)?;
        Ok(Self::parse(&text))
    }

    /// Parses the output of `sha256sum`. Invalid lines are skipped.
    pub(super) fn parse(text: &str) -> Self {
        let digests = text.lines().filter_map(|line| {
            let (digest, _) = line.split_once(' ')?;
            parse_digest(digest)
        });
        Self(digests.collect())
    }
}

/// Returns whether only root and the effective user can change the content of the file.
fn is_protected(file: &File) -> io::Result<bool> {
    // The open file is examined, so that another file cannot take its place afterwards.
    let metadata = file.metadata()?;
    let uid = nix::unistd::Uid::effective().as_raw();
    let is_owned = metadata.uid() == 0 || metadata.uid() == uid;
    Ok(metadata.is_file() && is_owned && metadata.mode() & 0o022 == 0)
}

/// Parses a SHA-256 as 64 hexadecimal digits. Returns it in lower case.
fn parse_digest(text: &str) -> Option<String> {
    let is_digest = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    is_digest.then(|| text.to_ascii_lowercase())
}

impl FileTrust {
    /// Checks the format of the digest that the caller specified.
    pub(super) fn check(&self) -> Result<(), ImportError> {
        match &self.sha256 {
            Some(text) if parse_digest(text).is_none() => Err(ImportError::Choice(format!(
                "`{}` is not a SHA-256 digest: write 64 hexadecimal digits",
                crate::layer::shown(text.as_bytes())
            ))),
            _ => Ok(()),
        }
    }

    /// Checks that a file for the stock template `reference` states the recipe of this program. All
    /// other references pass. Called before images are read.
    pub(super) fn check_recipe(
        &self,
        reference: &Reference,
        manifest: &TemplateManifest,
    ) -> Result<(), ImportError> {
        if !reference.is_stock() || self.force {
            return Ok(());
        }
        let is_same = reference.owner().is_none()
            && Recipe::built_in(reference.name())
                .is_ok_and(|recipe| recipe.hash() == manifest.recipe_sha256);
        if is_same {
            Ok(())
        } else {
            Err(ImportError::OtherRecipe {
                name: reference.to_string(),
            })
        }
    }

    /// Checks the digest of the whole file before the template is published. `digest` computes it
    /// and is called only if the result depends on it.
    pub(super) fn check_digest(
        &self,
        reference: &Reference,
        digest: impl FnOnce() -> Result<String, ImportError>,
    ) -> Result<(), ImportError> {
        if let Some(expected) = self.sha256.as_deref().and_then(parse_digest) {
            // The caller vouches for the digest, so no list is needed.
            let digest = digest()?;
            return if digest == expected {
                Ok(())
            } else {
                Err(ImportError::Digest {
                    what: "the template file".to_owned(),
                    found: digest,
                })
            };
        }
        let needs_trust = reference.is_stock() && !self.force;
        if !needs_trust && !self.must_be_known {
            // Hashing the rest of a large file is avoided if the digest does not matter.
            return Ok(());
        }
        let digest = digest()?;
        if self.known.0.contains(&digest) {
            return Ok(());
        }
        if self.must_be_known {
            Err(ImportError::UnknownDownload { digest })
        } else {
            Err(ImportError::UnknownFile {
                name: reference.to_string(),
                digest,
            })
        }
    }
}

/// Reader of a file that computes the SHA-256 of all bytes that it returns. Clones share one
/// position.
pub(super) struct HashedReader<R>(Rc<RefCell<HashState<R>>>);

/// Reader with the hash of the bytes so far.
struct HashState<R> {
    inner: R,
    sha256: Sha256,
}

impl<R: Read> HashedReader<R> {
    pub(super) fn new(inner: R) -> Self {
        let sha256 = Sha256::new();
        Self(Rc::new(RefCell::new(HashState { inner, sha256 })))
    }

    /// Reads the rest of the file, at most `limit` bytes. The rest consists of images that exist
    /// already and the end of the archive. Returns the SHA-256 of the whole file in lower-case
    /// hexadecimal.
    pub(super) fn finish(&mut self, limit: u64) -> io::Result<String> {
        // One more byte than allowed distinguishes a file of exactly `limit` bytes from a longer
        // one.
        let mut rest = self.clone().take(limit.saturating_add(1));
        if io::copy(&mut rest, &mut io::sink())? > limit {
            return Err(io::Error::other(format!(
                "the file has more than {limit} bytes"
            )));
        }
        Ok(HEXLOWER.encode(&self.0.borrow().sha256.clone().finalize()))
    }
}

impl<R> Clone for HashedReader<R> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<R: Read> Read for HashedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut state = self.0.borrow_mut();
        let n = state.inner.read(buffer)?;
        state.sha256.update(buffer.get(..n).unwrap_or_default());
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_list_that_others_can_change_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("templates.sha256");
        let digest = "aB".repeat(32);
        fs::write(
            &path,
            format!("# list\n{digest}  base.tpl\nabc  node.tpl\n"),
        )
        .unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let known = KnownDigests::read(&path).unwrap();
        assert_eq!(known.0.iter().collect::<Vec<_>>(), [&"ab".repeat(32)]);
        for mode in [0o664, 0o646] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(KnownDigests::read(&path).unwrap(), KnownDigests::default());
        }
    }
}
