//! Search for file names that `mkfs.erofs` cannot store.
//!
//! The EROFS format allows names of 255 bytes, but `mkfs.erofs` 1.5 cuts off the last byte of such
//! a name. The program then fails without naming the file or, if a file with the shortened name
//! exists, stores the wrong file.

use super::ImageRoot;
use crate::command::CommandError;
use crate::layer::OVERLAY_OPAQUE;
use jiffy_archive::error::shown;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Maximum length of a file name in images, in bytes.
pub(super) const MAX_NAME_BYTES: usize = 254;
/// Maximum number of characters of a long name that the message shows.
const SHOWN_CHARS: usize = 80;

/// Error of writing an image.
#[derive(Debug, thiserror::Error)]
pub enum WriteImageError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(
        "cannot write the image: the name of the file `{path}…` has {length} bytes, and names in \
         images have at most {MAX_NAME_BYTES}; rename or remove the file"
    )]
    LongName {
        /// Path in the image. The last component is shortened.
        path: String,
        /// Length of its last component in bytes.
        length: usize,
    },
}

/// Returns an error for the first file of `root` with a name that is too long. Directories that
/// cannot be read are skipped.
pub(super) fn find(root: &ImageRoot) -> Option<WriteImageError> {
    match root {
        ImageRoot::Directory(path) | ImageRoot::Marked(path) => find_below(path, &[]),
        // Layers are ordered lowest first. A file that a layer above removes is not in the image.
        ImageRoot::Layers { layers, .. } => (0..layers.len())
            .rev()
            .find_map(|n| find_below(&layers[n], &layers[n + 1..])),
    }
}

/// Searches the files of `root` that no layer in `above` removes.
fn find_below(root: &Path, above: &[PathBuf]) -> Option<WriteImageError> {
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.len() > MAX_NAME_BYTES {
                let inside = directory.strip_prefix(root).unwrap_or(&directory);
                if is_removed(&inside.join(&name), above) {
                    continue;
                }
                let place = shown(inside.as_os_str().as_bytes());
                let start: String = shown(name.as_bytes()).chars().take(SHOWN_CHARS).collect();
                return Some(WriteImageError::LongName {
                    path: Path::new("/").join(place).join(start).display().to_string(),
                    length: name.len(),
                });
            }
            // Symbolic links are not followed.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                directories.push(entry.path());
            }
        }
    }
    None
}

/// Returns whether one of the layers hides the file at `path` of the layers below. A layer hides it
/// by overlayfs's mark for a deletion, or by an opaque directory or a file in place of a parent
/// directory. Every character device in a layer is a mark for a deletion, since the unpacker
/// skips other devices.
fn is_removed(path: &Path, layers: &[PathBuf]) -> bool {
    let is_deleted = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_char_device())
    };
    let hides_children = |path: &Path| match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => {
            rustix::fs::lgetxattr(path, OVERLAY_OPAQUE, &mut [0_u8; 8][..]).is_ok()
        }
        found => found.is_ok(),
    };
    layers.iter().any(|layer| {
        let parents = path.ancestors().skip(1);
        is_deleted(&layer.join(path)) || parents.into_iter().any(|p| hides_children(&layer.join(p)))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn long_names_below_hidden_directories_are_not_in_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let [lower, upper] = ["lower", "upper"].map(|name| dir.path().join(name));
        let long = "n".repeat(255);
        fs::create_dir_all(lower.join("a/b")).unwrap();
        fs::write(lower.join("a/b").join(&long), "").unwrap();
        fs::create_dir(&upper).unwrap();
        let layers = ImageRoot::Layers {
            layers: vec![lower, upper.clone()],
            work: dir.path().to_owned(),
        };
        assert!(find(&layers).is_some());
        fs::create_dir(upper.join("a")).unwrap();
        assert!(find(&layers).is_some());
        // Only root may set the mark.
        let flags = rustix::fs::XattrFlags::empty();
        if rustix::fs::setxattr(upper.join("a"), OVERLAY_OPAQUE, b"y", flags).is_ok() {
            assert!(find(&layers).is_none());
        }
        fs::remove_dir(upper.join("a")).unwrap();
        fs::write(upper.join("a"), "").unwrap();
        assert!(find(&layers).is_none());
    }
}
