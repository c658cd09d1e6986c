//! Blank disks: formatted, empty file systems. A sandbox stores all its changes in such a disk. The
//! blank disk itself is shared and read-only; the changes are in a private overlay file.

use crate::command::{CommandError, Tool};
use crate::file::{FileError, OnPath, create};
use crate::home::Home;
use crate::verified::{FileCheck, VerifiedFile, VerifyError};
use std::fs::File;
use std::path::Path;

/// Minimum size of a disk in MiB. Smaller disks would hold little more than the metadata of the
/// file system.
pub const MIN_DISK_MIB: u64 = 64;
/// Maximum size of a disk in MiB (1 TiB).
pub const MAX_DISK_MIB: u64 = 1 << 20;

/// Disk of a sandbox: a shared, read-only, blank file system, and a private copy-on-write file for
/// changes.
#[derive(Clone, Copy, Debug)]
pub struct BlankDisk {
    mib: u64,
}

/// Error of a blank disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error(
        "disk size {mib} MiB is out of range: choose between {MIN_DISK_MIB} MiB and {MAX_DISK_MIB} MiB (1 TiB)"
    )]
    Size { mib: u64 },
    #[error("cannot format a blank disk")]
    Format(#[from] CommandError),
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("cannot create a disk")]
    File(#[from] FileError),
}

/// Options of `mkfs.ext4`. The disk is the upper layer of an overlay and is deleted with its
/// sandbox:
/// - no journal: a journal would double the writes of metadata, and protects only against a power
///   loss in which the guest's memory is lost as well. A snapshot contains memory and disk of the
///   same moment, so the mounted file system continues and never needs recovery;
/// - no checksums and no lazy initialisation: ext4 writes nothing in the background after the first
///   mount, and every block that is never written stays shared;
/// - metadata packed together at the start: the first writes touch fewer units of the file with the
///   changes;
/// - no reserved blocks and fixed identifiers: the same size gives the same bytes on every host.
// mkfs.ext4 normally adds the features of its configuration file. `none` prevents this.
const FEATURES: &str = "none,dir_index,extent,ext_attr,filetype,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize";
const EXTENDED: &str = "lazy_itable_init=0,packed_meta_blocks=1,root_owner=0:0,hash_seed=6a696666-7900-4000-8000-000000000002";
const UUID: &str = "6a696666-7900-4000-8000-000000000001";
const LABEL: &str = "jiffy-disk";
/// Fixed time of the file system, in seconds since 1970 (2025-01-01).
const EPOCH: &str = "1735689600";

impl BlankDisk {
    /// Creates a disk of `mib` MiB, from [`MIN_DISK_MIB`] to [`MAX_DISK_MIB`].
    pub fn new(mib: u64) -> Result<Self, DiskError> {
        match mib {
            MIN_DISK_MIB..=MAX_DISK_MIB => Ok(Self { mib }),
            _ => Err(DiskError::Size { mib }),
        }
    }

    /// Size in MiB.
    pub fn mib(&self) -> u64 {
        self.mib
    }

    /// Opens the blank ext4 image of this size, read-only. Formats the image on first use.
    ///
    /// The file is sparse: a blank disk of 10 GiB uses less than 1 MiB.
    pub fn blank_ext4(&self, home: &Home) -> Result<VerifiedFile, DiskError> {
        let name = format!("ext4-{}.img", self.mib);
        let path = home.disks().join(&name);
        // The shift cannot overflow: the size is at most 1 TiB.
        let size = self.mib << 20;
        let check = FileCheck {
            what: "blank disk",
            sha256: None,
            size: Some(size),
            sparse: true,
            remedy: "remove it together with its .stamp file and run again",
        };
        check.open_or_make(&path, home, "disks", || {
            create(&home.disks(), &name, |file| {
                file.as_file().set_len(size).on("set the size of", &path)?;
                format(file.path())
            })?;
            Ok(())
        })
    }

    /// Creates an unlinked file for the changed blocks of one sandbox.
    pub fn overlay_file(home: &Home) -> Result<File, DiskError> {
        Ok(tempfile::tempfile_in(home.run()).on("create a file in", &home.run())?)
    }
}

/// Creates an ext4 file system. Its content is reproducible: the UUID and all times are fixed.
fn format(path: &Path) -> Result<(), DiskError> {
    let mut mkfs = Tool::new("mkfs.ext4", "e2fsprogs");
    mkfs.args([
        "-q", "-F", "-m", "0", "-b", "4096", "-I", "256", "-i", "16384", "-L", LABEL, "-U", UUID,
    ]);
    mkfs.args(["-O", FEATURES, "-E", EXTENDED]).arg(path);
    // Both variables fix the times in the file system. Versions of e2fsprogs differ in which one
    // they read.
    mkfs.env("E2FSPROGS_FAKE_TIME", EPOCH)
        .env("SOURCE_DATE_EPOCH", EPOCH);
    Ok(mkfs.run(None, &mut |_| ())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom, Write};
    use std::os::unix::fs::{FileExt, MetadataExt};

    fn home() -> (tempfile::TempDir, Home) {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path().join("home")).unwrap();
        (dir, home)
    }

    #[test]
    fn a_blank_disk_is_sparse_formatted_and_the_same_everywhere() {
        let ((_a, one), (_b, other)) = (home(), home());
        let disk = BlankDisk::new(10 * 1024).unwrap();
        let image = disk.blank_ext4(&one).unwrap();
        assert_eq!(image.size, 10 << 30);
        assert_eq!((&image.file).stream_position().unwrap(), 0);
        assert!(image.file.metadata().unwrap().blocks() * 512 < 2 << 20);
        let mut magic = [0; 2];
        image.file.read_exact_at(&mut magic, 1024 + 0x38).unwrap();
        assert_eq!(magic, [0x53, 0xef]);
        assert_eq!(disk.blank_ext4(&other).unwrap().sha256, image.sha256);
    }

    #[test]
    fn sizes_out_of_range_are_rejected() {
        for mib in [0, 63, (1 << 20) + 1, u64::MAX] {
            assert!(matches!(BlankDisk::new(mib), Err(DiskError::Size { .. })));
        }
        assert_eq!(BlankDisk::new(64).unwrap().mib(), 64);
    }

    #[test]
    fn a_corrupted_blank_disk_is_rejected_with_its_path() {
        let (_dir, home) = home();
        let disk = BlankDisk::new(64).unwrap();
        let path = disk.blank_ext4(&home).unwrap().path;
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(b"x", 40 << 20)
            .unwrap();
        let message = disk.blank_ext4(&home).unwrap_err().to_string();
        assert!(message.contains("ext4-64.img is corrupted"), "{message}");
    }

    #[test]
    fn concurrent_threads_share_one_blank_disk() {
        let (_dir, home) = home();
        let disk = BlankDisk::new(64).unwrap();
        let inodes: Vec<u64> = std::thread::scope(|scope| {
            let open = || {
                disk.blank_ext4(&home)
                    .unwrap()
                    .file
                    .metadata()
                    .unwrap()
                    .ino()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(inodes.iter().all(|inode| *inode == inodes[0]));
        assert_eq!(
            std::fs::read_dir(home.disks()).unwrap().count(),
            2,
            "the image and its stamp"
        );
    }

    #[test]
    fn an_overlay_file_is_writable_and_has_no_name() {
        let (_dir, home) = home();
        let mut file = BlankDisk::overlay_file(&home).unwrap();
        file.write_all(b"data").unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "data");
        assert_eq!(std::fs::read_dir(home.run()).unwrap().count(), 0);
    }
}
