//! Writes root file systems as EROFS images with `mkfs.erofs`, and reads such images.

mod layer;
mod long_name;
mod read;

use crate::command::{CommandError, Tool};
use crate::jail;
use crate::lock::Lock;
use jiffy_confinement::{CapabilitySet, FsView};
use std::fs::File;
use std::os::unix::fs::{fchown, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

/// Fixed time of files that a build creates, in seconds since 1970. Files of packages retain their
/// times, which compiled Python modules record.
pub(crate) const EPOCH: u64 = 1_735_689_600;

pub use layer::LayerOfImageError;
pub(crate) use layer::write_layer;
pub use long_name::WriteImageError;
pub use read::ImageError;

/// Content of a new image.
pub(crate) enum ImageRoot {
    Directory(PathBuf),
    /// Directory with overlayfs's marks (whiteouts, `trusted.overlay.opaque`), which are stored in
    /// the image.
    Marked(PathBuf),
    /// Unpacked layers, lowest first, and an empty directory for short symbolic links to the layers
    /// and for the mount point of their overlay.
    Layers {
        layers: Vec<PathBuf>,
        work: PathBuf,
    },
}

/// Writes `root` as an EROFS image. `epoch` is the time of the image in seconds since 1970. The
/// options have these reasons:
///
/// - not compressed: the image has 1.6 times the size of an lz4 image, and a read takes half the
///   time (figures in `docs/templates.md`);
/// - no inlined tails: every file starts on a page boundary, so equal files have equal pages;
/// - files retain their times, since compiled Python modules are valid only for sources of the
///   recorded time.
pub(crate) fn write(
    root: &ImageRoot,
    image: &Path,
    uuid: &str,
    epoch: u64,
    lock: Option<&Lock>,
) -> Result<(), WriteImageError> {
    match long_name::find(root) {
        Some(error) => Err(error),
        None => Ok(make(root, image, uuid, epoch, lock)?),
    }
}

/// Runs `mkfs.erofs` on `root`, in a confined process unless the jail is off.
fn make(
    root: &ImageRoot,
    image: &Path,
    uuid: &str,
    epoch: u64,
    lock: Option<&Lock>,
) -> Result<(), CommandError> {
    let mut mkfs = Tool::new("mkfs.erofs", "erofs-utils");
    mkfs.deadline(MKFS_TIMEOUT);
    let failed = |source| CommandError::Run {
        program: "mkfs.erofs",
        source,
    };
    // Without `--preserve-mtime`, the fixed time of `-T` would apply to every file instead of only
    // the image.
    mkfs.args([
        "--quiet",
        "-Enoinline_data",
        &format!("-T{epoch}"),
        "--preserve-mtime",
        &format!("-U{uuid}"),
    ]);
    let tree = match root {
        ImageRoot::Directory(path) | ImageRoot::Marked(path) => path.clone(),
        ImageRoot::Layers { layers, work } => {
            let at = work.join("whole");
            let lower =
                link(layers, work, &at).and_then(|lower| mkfs.overlay(work, &lower, &at).map(drop));
            lower.map_err(failed)?;
            at
        }
    };
    if !jail::is_on() {
        mkfs.arg(image).arg(tree);
        return mkfs.run(lock, &mut |_| ());
    }
    let capabilities = match root {
        ImageRoot::Marked(_) => READ_MARKS_CAPABILITIES,
        ImageRoot::Directory(_) | ImageRoot::Layers { .. } => READ_CAPABILITIES,
    };
    // Root creates the file, because the program sees no directory in which it could create one.
    let file = File::create(image).map_err(failed)?;
    // The view of the program is mounted on this directory, which itself stays empty.
    let stage = tempfile::tempdir().map_err(failed)?;
    confine(&mut mkfs, stage.path(), &tree, capabilities, image).map_err(failed)?;
    let result = mkfs.run(lock, &mut |_| ());
    // The program's user owned the file while the program ran. The owner is restored even after a
    // failure.
    fchown(&file, Some(0), Some(0)).map_err(failed)?;
    result
}

/// Capability for reading the files of all owners.
const READ_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;
/// Reading attributes of the `trusted` namespace, such as overlayfs's marks, requires
/// CAP_SYS_ADMIN.
const READ_MARKS_CAPABILITIES: CapabilitySet = READ_CAPABILITIES.union(CapabilitySet::SYS_ADMIN);
/// Timeout for writing the largest image.
const MKFS_TIMEOUT: Duration = Duration::from_secs(3600);

/// Confines `mkfs.erofs`: it can read `tree`, write `image`, and start no other program.
fn confine(
    mkfs: &mut Tool,
    stage: &Path,
    tree: &Path,
    capabilities: CapabilitySet,
    image: &Path,
) -> io::Result<()> {
    let view = FsView::new(stage)?
        .programs()?
        .reading(tree, "tree")?
        .writing(image, "image")?;
    mkfs.args(["/image", "/tree"])
        .jailed(view, capabilities, image)?;
    Ok(())
}

/// Creates the mount point `at` and short names for the layers, uppermost first. Adds an empty
/// layer, since a read-only overlay needs at least two.
fn link(layers: &[PathBuf], work: &Path, at: &Path) -> io::Result<Vec<String>> {
    fs::create_dir(at)?;
    let mut names = Vec::new();
    for (i, layer) in layers.iter().enumerate().rev() {
        let name = i.to_string();
        // All options of a mount must fit into one page, so the layers have short names.
        symlink(layer, work.join(&name))?;
        names.push(name);
    }
    fs::create_dir(work.join("e"))?;
    names.push("e".to_owned());
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::long_name::MAX_NAME_BYTES;
    use super::*;

    const UUID: &str = "00000000-0000-4000-8000-000000000001";

    #[test]
    fn equal_directories_give_equal_images() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(root.join("etc/hostname"), "jiffy").unwrap();
        let make = |name: &str| {
            let image = dir.path().join(name);
            write(
                &ImageRoot::Directory(root.clone()),
                &image,
                UUID,
                1_735_689_600,
                None,
            )
            .unwrap();
            fs::read(image).unwrap()
        };
        let image = make("one");
        // EROFS super block: little-endian magic at byte 1024 (linux/fs/erofs/erofs_fs.h).
        assert_eq!(image[1024..1028], 0xe0f5_e1e2_u32.to_le_bytes());
        assert!(image.windows(5).any(|window| window == b"jiffy"));
        assert_eq!(make("two"), image);
    }

    #[test]
    fn a_name_that_is_too_long_for_images_is_reported_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let below = root.join("usr/share");
        fs::create_dir_all(&below).unwrap();
        let longest = "n".repeat(MAX_NAME_BYTES);
        fs::write(below.join(&longest), "").unwrap();
        let write = || {
            let tree = ImageRoot::Marked(root.clone());
            write(&tree, &dir.path().join("image"), UUID, 0, None)
        };
        write().unwrap();
        // The shortened name of this file is the name of the first file. `mkfs.erofs` alone would
        // therefore succeed and store the wrong file.
        fs::write(below.join(format!("{longest}n")), "").unwrap();
        let error = write().unwrap_err().to_string();
        assert!(error.contains("`/usr/share/nnnn"), "{error}");
        assert!(error.contains("255 bytes"), "{error}");
        assert!(error.contains("254"), "{error}");
    }
}
