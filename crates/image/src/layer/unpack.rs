//! Unpacks the entries of an untrusted layer archive into a directory of the host.
//!
//! Whiteouts become the marks of overlayfs: a character device 0/0 for a name,
//! `trusted.overlay.opaque` on a directory. Other devices are skipped, since guests have their own
//! `/dev`. Set-user-id bits, capabilities and FIFOs are preserved, since no program of the layer
//! runs on the host.

use super::confined_dir::{ConfinedDir, LayerPath};
use super::limits::{UnpackBudget, UnpackLimits};
use super::stream::LayerStream;
use super::{EntryProblem, LayerError, UnpackedLayer};
use crate::erofs::EPOCH;
use crate::erofs::{LayerOfImageError, write_layer};
use jiffy_archive::{ArchiveEntry, ArchiveEntryKind, ArchiveReader, ReadLimits};
use rustix::fs::{
    self, AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, BufWriter, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::thread;

/// Name prefix of a whiteout: the rest of the name is deleted (OCI image specification, layer.md,
/// "Whiteouts").
const WHITEOUT: &[u8] = b".wh.";
/// Name of an entry that deletes all files of its directory in lower layers.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Name prefix of internal files of aufs.
const AUFS_PREFIX: &[u8] = b".wh..wh.";
pub(crate) const OVERLAY_OPAQUE: &str = "trusted.overlay.opaque";
const BUFFER_BYTES: usize = 1 << 18;

/// Unpacks the archive `packed` (tar, optionally compressed) into the empty directory `into`.
/// `on_bytes` receives the number of packed bytes read so far. After an error, the caller must
/// remove the directory.
pub fn unpack(
    packed: impl Read,
    into: &Path,
    limits: UnpackLimits,
    on_bytes: &mut dyn FnMut(u64),
) -> Result<UnpackedLayer, LayerError> {
    let mut sinks = UnpackSinks {
        on_bytes,
        on_unpacked: &mut |_| Ok(()),
    };
    unpack_with(packed, into, limits, &mut sinks, OverlayMarks::Set)
}

/// Callbacks that receive the progress of unpacking.
pub(super) struct UnpackSinks<'s> {
    /// Receives the number of packed bytes read so far.
    pub on_bytes: &'s mut dyn FnMut(u64),
    /// Called before a file is written that completes at least [`REPORT_BYTES`] since the last
    /// report. Receives the number of unpacked bytes up to the end of this file. An error stops the
    /// unpacking.
    pub on_unpacked: &'s mut dyn FnMut(u64) -> Result<(), LayerError>,
}

/// Minimum number of unpacked bytes between two reports.
pub(super) const REPORT_BYTES: u64 = 8 << 20;

/// Handling of overlayfs's opaque marks. Setting them requires `CAP_SYS_ADMIN`, which the unpacker
/// process lacks.
pub(super) enum OverlayMarks<'m> {
    Set,
    /// Collects the paths of the directories that need a mark, for the parent process.
    Collect(&'m mut Vec<Vec<u8>>),
}

/// Unpacks a layer below `into`. `marks` determines how opaque marks are set.
pub(super) fn unpack_with(
    packed: impl Read,
    into: &Path,
    limits: UnpackLimits,
    sinks: &mut UnpackSinks<'_>,
    marks: OverlayMarks<'_>,
) -> Result<UnpackedLayer, LayerError> {
    let opened = ConfinedDir::open(into);
    let place =
        opened.map_err(|e| LayerError::write("open", into.as_os_str().as_encoded_bytes(), e))?;
    let tolerance = ReadLimits {
        headers: limits.headers,
        no_end_mark: true,
    };
    let mut unpacker = Unpacker {
        archive: ArchiveReader::with_limits(LayerStream::open(packed, &limits)?, tolerance),
        budget: UnpackBudget::new(limits),
        place,
        // Default time of the root directory. An entry of the archive may replace it.
        directories: vec![(Vec::new(), (EPOCH.cast_signed(), 0))],
        done: UnpackedLayer::default(),
        buffer: vec![0; BUFFER_BYTES],
        marks,
        reported: 0,
    };
    // The umask of the process must not influence the image, so the mode is set explicitly.
    let root = unpacker.place.open_directory(b"");
    root.and_then(|fd| fs::fchmod(fd, Mode::from_raw_mode(0o755)))
        .map_err(|e| LayerError::write("set the mode of", b"/", e))?;
    while let Some(entry) = unpacker.next()? {
        unpacker.report(&entry, sinks)?;
        unpacker.unpack_entry(&entry)?;
        unpacker.record_implied_directories()?;
        (sinks.on_bytes)(unpacker.archive.input().packed());
    }
    unpacker.finish()
}

/// Unpacks the untrusted EROFS image of a template into the empty directory `into`. The result
/// equals the layer from which the image was built.
pub fn unpack_image(image: &File, into: &Path, limits: UnpackLimits) -> Result<(), LayerError> {
    unpack_image_with(image, into, limits, OverlayMarks::Set)
}

/// Unpacks an image below `into`. A thread converts it to an archive, which is read from a pipe.
pub(super) fn unpack_image_with(
    image: &File,
    into: &Path,
    limits: UnpackLimits,
    marks: OverlayMarks<'_>,
) -> Result<(), LayerError> {
    let (reader, writer) = io::pipe().map_err(LayerError::Read)?;
    let (written, unpacked) = thread::scope(|scope| {
        let written =
            scope.spawn(|| write_layer(image, BufWriter::with_capacity(BUFFER_BYTES, writer)));
        let mut sinks = UnpackSinks {
            on_bytes: &mut |_| (),
            on_unpacked: &mut |_| Ok(()),
        };
        // `unpack_with` drops the reader when it returns. If it failed, the writer thread then gets
        // EPIPE instead of blocking on a full pipe.
        let unpacked = unpack_with(reader, into, limits, &mut sinks, marks);
        (written.join(), unpacked)
    });
    // A damaged image also ends the archive early, so its error is the cause and is reported first.
    // A write error is only the consequence of a failed `unpack_with`.
    if let Ok(Err(damaged @ LayerOfImageError::Image(_))) = written {
        return Err(damaged.into());
    }
    // A complete archive of `write_layer` has an end mark. Without the mark, the writer thread
    // failed.
    if unpacked?.end_mark {
        Ok(())
    } else {
        Err(LayerError::Truncated)
    }
}

struct Unpacker<'a> {
    archive: ArchiveReader<LayerStream<'a>>,
    budget: UnpackBudget,
    place: ConfinedDir,
    /// Directories with their modification times. The times are set last, because creating an entry
    /// in a directory changes the times of the directory.
    directories: Vec<(Vec<u8>, (i64, u32))>,
    done: UnpackedLayer,
    buffer: Vec<u8>,
    marks: OverlayMarks<'a>,
    /// Number of unpacked bytes in the last report.
    reported: u64,
}

impl Unpacker<'_> {
    fn next(&mut self) -> Result<Option<ArchiveEntry>, LayerError> {
        let mut count = || self.budget.entry().map_err(io::Error::other);
        Ok(self.archive.next_counted(&mut count)?)
    }

    /// Reports the bytes up to the end of a file. Must be called before the file is written.
    fn report(&mut self, entry: &ArchiveEntry, to: &mut UnpackSinks<'_>) -> Result<(), LayerError> {
        let bytes = self.done.bytes.saturating_add(match entry.kind {
            ArchiveEntryKind::File => entry.size,
            _ => 0,
        });
        if bytes.saturating_sub(self.reported) < REPORT_BYTES {
            return Ok(());
        }
        self.reported = bytes;
        (to.on_unpacked)(bytes)
    }

    fn unpack_entry(&mut self, entry: &ArchiveEntry) -> Result<(), LayerError> {
        let path = LayerPath::of(&entry.path, &self.budget.limits)
            .map_err(|problem| LayerError::entry(&entry.path, problem))?;
        self.done.entries += 1;
        if path.is_root() {
            return match entry.kind {
                ArchiveEntryKind::Directory => self.set_directory_attributes(entry, &path),
                _ => Err(LayerError::entry(
                    &entry.path,
                    EntryProblem::ReplacesDirectory,
                )),
            };
        }
        // Whiteouts are recognised by name. The type of the entry does not matter.
        let name = path.split().1;
        if name == OPAQUE {
            return self.opaque(&path);
        }
        if name.starts_with(AUFS_PREFIX) {
            return Ok(());
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            return self.whiteout(&path, hidden);
        }
        match entry.kind {
            ArchiveEntryKind::Directory => self.directory(entry, &path),
            ArchiveEntryKind::File => self.file(entry, &path),
            ArchiveEntryKind::Symlink => self.symlink(entry, &path),
            ArchiveEntryKind::HardLink => self.hard_link(entry, &path),
            ArchiveEntryKind::Fifo => self.fifo(entry, &path),
            ArchiveEntryKind::Character(..)
            | ArchiveEntryKind::Block(..)
            | ArchiveEntryKind::UnknownDevice => {
                self.done.devices_left_out += 1;
                Ok(())
            }
        }
    }

    /// Records the fixed time [`EPOCH`] for parent directories without an entry in the archive, so
    /// that the image is reproducible.
    fn record_implied_directories(&mut self) -> Result<(), LayerError> {
        for path in std::mem::take(&mut self.place.implied) {
            self.budget.name(&path)?;
            self.directories.push((path, (EPOCH.cast_signed(), 0)));
        }
        Ok(())
    }

    /// Removes the file that an earlier entry created under this name. The file is unlinked and not
    /// overwritten, because it may have other hard links. Returns an error if the name is a
    /// directory.
    fn remove_earlier(&mut self, path: &LayerPath) -> Result<(), LayerError> {
        let (parent, name) = self.place.parent(path)?;
        let failed = |errno| LayerError::write("replace", path.bytes(), errno);
        match ConfinedDir::kind(parent, name).map_err(failed)? {
            None => Ok(()),
            Some(FileType::Directory) => {
                let problem = EntryProblem::ReplacesDirectory;
                Err(LayerError::entry(path.bytes(), problem))
            }
            Some(_) => fs::unlinkat(parent, name, AtFlags::empty()).map_err(failed),
        }
    }

    /// Creates a directory, or changes an existing one.
    fn directory(&mut self, entry: &ArchiveEntry, path: &LayerPath) -> Result<(), LayerError> {
        let (parent, name) = self.place.parent(path)?;
        let failed = |errno| LayerError::write("create", path.bytes(), errno);
        let mut deleted = false;
        match ConfinedDir::kind(parent, name).map_err(failed)? {
            Some(FileType::Directory) => return self.set_directory_attributes(entry, path),
            Some(found) => {
                // Device entries are skipped, so a character device is a whiteout of this layer.
                deleted = found == FileType::CharacterDevice;
                fs::unlinkat(parent, name, AtFlags::empty()).map_err(failed)?;
            }
            None => {}
        }
        // Only root has access until `set_directory_attributes` sets the mode of the entry.
        fs::mkdirat(parent, name, Mode::from_raw_mode(0o700)).map_err(failed)?;
        if deleted {
            // The contents of the directory in lower layers stay deleted.
            self.mark_opaque(path.bytes())?;
        }
        self.set_directory_attributes(entry, path)
    }

    fn set_directory_attributes(
        &mut self,
        entry: &ArchiveEntry,
        path: &LayerPath,
    ) -> Result<(), LayerError> {
        let opened = self.place.open_directory(path.bytes());
        let fd = opened.map_err(|errno| LayerError::write("open", path.bytes(), errno))?;
        set_attributes(fd.as_fd(), entry, path)?;
        self.budget.name(path.bytes())?;
        self.directories.push((path.bytes().to_vec(), entry.mtime));
        Ok(())
    }

    fn file(&mut self, entry: &ArchiveEntry, path: &LayerPath) -> Result<(), LayerError> {
        self.budget.file(entry.size)?;
        self.remove_earlier(path)?;
        let (parent, name) = self.place.parent(path)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let created = fs::openat(parent, name, flags, Mode::from_raw_mode(0o600));
        let fd = created.map_err(|errno| LayerError::write("create", path.bytes(), errno))?;
        // Holes between the runs are not written, so the file stays sparse.
        for run in &entry.runs {
            self.write(fd.as_fd(), run.offset, run.length, path)?;
        }
        // A hole at the end is not covered by any run: extend the file to its full size.
        if entry.runs.last().map_or(0, |run| run.offset + run.length) < entry.size {
            let longer = fs::ftruncate(&fd, entry.size);
            longer.map_err(|errno| LayerError::write("write", path.bytes(), errno))?;
        }
        // The sum cannot overflow: the budget limits the sum of all sizes.
        self.done.bytes += entry.size;
        set_attributes(fd.as_fd(), entry, path)?;
        let dated = fs::futimens(&fd, &times(entry.mtime));
        dated.map_err(|errno| LayerError::write("set the times of", path.bytes(), errno))
    }

    /// Copies `length` bytes of the archive to a file at `offset`.
    fn write(
        &mut self,
        fd: BorrowedFd<'_>,
        mut offset: u64,
        mut length: u64,
        path: &LayerPath,
    ) -> Result<(), LayerError> {
        let failed = |errno| LayerError::write("write", path.bytes(), errno);
        while length > 0 {
            self.budget.in_time()?;
            let chunk_bytes = usize::try_from(length).map_or(BUFFER_BYTES, |l| l.min(BUFFER_BYTES));
            let n = self.archive.read_content(&mut self.buffer[..chunk_bytes])?;
            let mut bytes = &self.buffer[..n];
            if bytes.is_empty() {
                return Err(LayerError::Truncated);
            }
            length -= n as u64;
            while !bytes.is_empty() {
                let written = rustix::io::pwrite(fd, bytes, offset).map_err(failed)?;
                offset += written as u64;
                bytes = &bytes[written..];
            }
        }
        Ok(())
    }

    fn symlink(&mut self, entry: &ArchiveEntry, path: &LayerPath) -> Result<(), LayerError> {
        if entry.link.is_empty() || entry.link.len() > self.budget.limits.path {
            return Err(LayerError::entry(path.bytes(), EntryProblem::Path));
        }
        self.remove_earlier(path)?;
        let (parent, name) = self.place.parent(path)?;
        let failed = |errno| LayerError::write("create", path.bytes(), errno);
        // The target is only stored. It is not followed on this host.
        fs::symlinkat(entry.link.as_slice(), parent, name).map_err(failed)?;
        self.set_owner_and_times(entry, path)
    }

    fn hard_link(&mut self, entry: &ArchiveEntry, path: &LayerPath) -> Result<(), LayerError> {
        let problem = || EntryProblem::LinkTarget(super::shown(&entry.link));
        let bad = || LayerError::entry(path.bytes(), problem());
        let target = LayerPath::of(&entry.link, &self.budget.limits)
            .map_err(|problem| LayerError::entry(path.bytes(), problem))?;
        if target.is_root() || target == *path {
            return Err(bad());
        }
        let (above, from) = target.split();
        let above = self.place.directory(above).map_err(|_| bad())?;
        match ConfinedDir::kind(above.as_fd(), from) {
            Ok(Some(FileType::RegularFile | FileType::Symlink | FileType::Fifo)) => {}
            _ => return Err(bad()),
        }
        self.remove_earlier(path)?;
        let (parent, name) = self.place.parent(path)?;
        let linked = fs::linkat(above.as_fd(), from, parent, name, AtFlags::empty());
        linked.map_err(|errno| LayerError::write("link", path.bytes(), errno))
    }

    fn fifo(&mut self, entry: &ArchiveEntry, path: &LayerPath) -> Result<(), LayerError> {
        self.remove_earlier(path)?;
        let (parent, name) = self.place.parent(path)?;
        let mode = Mode::from_raw_mode(entry.mode & 0o777);
        let failed = |errno| LayerError::write("create", path.bytes(), errno);
        fs::mknodat(parent, name, FileType::Fifo, mode, 0).map_err(failed)?;
        // `mknodat` applies the umask, so the mode is set again.
        fs::chmodat(parent, name, mode, AtFlags::empty()).map_err(failed)?;
        self.set_owner_and_times(entry, path)
    }

    /// Sets the owner and times of a symbolic link or FIFO, which cannot be opened.
    fn set_owner_and_times(
        &mut self,
        entry: &ArchiveEntry,
        path: &LayerPath,
    ) -> Result<(), LayerError> {
        let (parent, name) = self.place.parent(path)?;
        let failed = |errno| LayerError::write("set the owner of", path.bytes(), errno);
        let (uid, gid) = owner(entry);
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        fs::chownat(parent, name, uid, gid, flags).map_err(failed)?;
        fs::utimensat(parent, name, &times(entry.mtime), flags).map_err(failed)
    }

    fn whiteout(&mut self, path: &LayerPath, hidden: &[u8]) -> Result<(), LayerError> {
        if hidden.is_empty() || hidden == b"." || hidden == b".." {
            return Err(LayerError::entry(path.bytes(), EntryProblem::Outside));
        }
        let (parent, _) = self.place.parent(path)?;
        let failed = |errno| LayerError::write("mark as deleted", path.bytes(), errno);
        match ConfinedDir::kind(parent, hidden).map_err(failed)? {
            None => fs::mknodat(parent, hidden, FileType::CharacterDevice, Mode::empty(), 0)
                .map_err(failed),
            // The directory of this layer replaces the lower directory, independent of the order of
            // entries.
            Some(FileType::Directory) => {
                let above = path.split().0;
                let whole = [above, hidden].join(&b'/');
                self.mark_opaque(whole.strip_prefix(b"/").unwrap_or(&whole))
            }
            // The file of this layer hides the lower file.
            Some(_) => Ok(()),
        }
    }

    fn opaque(&mut self, path: &LayerPath) -> Result<(), LayerError> {
        let (above, _) = path.split();
        self.place.parent(path)?;
        if above.is_empty() {
            // overlayfs ignores the mark on the root of a layer, hence the flag.
            self.done.opaque = true;
            return Ok(());
        }
        self.mark_opaque(above)
    }

    fn mark_opaque(&mut self, path: &[u8]) -> Result<(), LayerError> {
        if let OverlayMarks::Collect(marked) = &mut self.marks {
            self.budget.name(path)?;
            marked.push(path.to_vec());
            return Ok(());
        }
        let marked = self
            .place
            .open_directory(path)
            .and_then(|fd| fs::fsetxattr(fd, OVERLAY_OPAQUE, b"y", XattrFlags::empty()));
        marked.map_err(|errno| LayerError::write("hide the lower layers of", path, errno))
    }

    fn finish(mut self) -> Result<UnpackedLayer, LayerError> {
        // If an archive has several entries for a directory, the last entry applies. Otherwise the
        // order does not matter, since these changes do not affect the times of the parents.
        for (path, mtime) in &self.directories {
            let dated =
                (self.place.open_directory(path)).and_then(|fd| fs::futimens(fd, &times(*mtime)));
            dated.map_err(|errno| LayerError::write("set the times of", path, errno))?;
        }
        self.done.end_mark = self.archive.has_end_mark();
        // Reads the stream to its end, so that the checksum covers the padding after the end mark.
        self.done.diff_id = self.archive.into_input().finish()?;
        // The layer is complete on disk before the caller records that it exists.
        let synced = self.place.sync();
        synced.map_err(|errno| LayerError::write("flush", b"/", errno))?;
        Ok(self.done)
    }
}

fn owner(entry: &ArchiveEntry) -> (Option<Uid>, Option<Gid>) {
    (
        Some(Uid::from_raw(entry.uid)),
        Some(Gid::from_raw(entry.gid)),
    )
}

/// Sets owner, mode and extended attributes. The owner is set first, because a change of owner
/// clears set-user-id bits and capabilities.
fn set_attributes(
    fd: BorrowedFd<'_>,
    entry: &ArchiveEntry,
    path: &LayerPath,
) -> Result<(), LayerError> {
    let failed = |action| move |errno: Errno| LayerError::write(action, path.bytes(), errno);
    let (uid, gid) = owner(entry);
    fs::fchown(fd, uid, gid).map_err(failed("set the owner of"))?;
    fs::fchmod(fd, Mode::from_raw_mode(entry.mode)).map_err(failed("set the mode of"))?;
    for (name, value) in entry
        .xattrs
        .iter()
        .filter(|(name, _)| is_allowed_attribute(name))
    {
        fs::fsetxattr(fd, name.as_slice(), value, XattrFlags::empty())
            .map_err(failed("set an attribute of"))?;
    }
    Ok(())
}

/// Returns whether a layer may set an attribute. Other attributes have a meaning on the host
/// (`trusted.overlay.*`, access control lists, labels).
pub(super) fn is_allowed_attribute(name: &[u8]) -> bool {
    name == b"security.capability" || name.starts_with(b"user.")
}

fn times((seconds, ns): (i64, u32)) -> Timestamps {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: i64::from(ns),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}
