//! Archive of the files that one step copies. Its name is a hash of its content, so that an archive
//! is uploaded only once.

use super::ContextError;
use super::files::ContextEntries;
use data_encoding::HEXLOWER;
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use jiffy_archive::{ArchiveEntry, ArchiveEntryKind, ArchiveReader, ArchiveWriter};
use sha2::{Digest, Sha256};
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

const BUFFER_BYTES: usize = 128 << 10;
/// Maximum size in bytes of an unpacked archive whose name is computed.
const MAX_UNPACKED_BYTES: u64 = 32 << 30;

/// Files of a context that are uploaded as one archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextArchive {
    /// SHA-256 over names, content, permissions and targets of symbolic links, in lower-case
    /// hexadecimal. It does not depend on modification times, owners and compression.
    pub name: String,
    files: ContextEntries,
}

impl ContextArchive {
    pub(super) fn new(files: ContextEntries) -> Result<Self, ContextError> {
        // The name is the hash of the tar without times and compression, so that equal files have
        // equal names on every client.
        let hasher = write(&files, false, HashWriter(Sha256::new()))?;
        let name = HEXLOWER.encode(&hasher.0.finalize());
        Ok(Self { name, files })
    }

    /// Returns the number of files, directories and symbolic links.
    pub fn entries(&self) -> usize {
        self.files.len()
    }

    /// Writes the archive: a gzipped tar with names relative to the context, in which root owns all
    /// files.
    pub fn write_to(&self, out: impl Write) -> Result<(), ContextError> {
        // The archive is used once, so a better compression costs more time than it saves.
        let packed = GzEncoder::new(out, Compression::fast());
        let packed = write(&self.files, true, packed)?;
        let result = packed.finish().and_then(|mut out| out.flush());
        result.map_err(ContextError::Send)
    }
}

/// Returns the name of the archive that [`ContextArchive::write_to`] wrote to `packed`.
///
/// # Errors
/// `packed` is not a gzipped tar, or its content exceeds 32 GiB.
pub fn archive_name(packed: impl Read) -> io::Result<String> {
    // A small archive may unpack to a large one.
    let unpacked = MultiGzDecoder::new(packed).take(MAX_UNPACKED_BYTES);
    let mut reader = ArchiveReader::new(unpacked);
    let mut writer = ArchiveWriter::new(HashWriter(Sha256::new()));
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Some(mut entry) = reader.next_entry().map_err(io::Error::other)? {
        // The name must not depend on times.
        entry.mtime = (0, 0);
        writer.begin(&entry)?;
        loop {
            let n = reader.read_content(&mut buffer).map_err(io::Error::other)?;
            if n == 0 {
                break;
            }
            writer.write_all(&buffer[..n])?;
        }
        writer.end()?;
    }
    Ok(HEXLOWER.encode(&writer.finish()?.0.finalize()))
}

/// Writer that hashes its bytes.
struct HashWriter(Sha256);

impl Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a tar of `files` to `out`. If `with_times` is true, the entries have the modification
/// times of the files, otherwise a constant time. Skips sockets, pipes and devices.
fn write<W: Write>(files: &ContextEntries, with_times: bool, out: W) -> Result<W, ContextError> {
    let mut writer = ArchiveWriter::new(out);
    let mut buffer = vec![0; BUFFER_BYTES];
    for (name, path) in files {
        let read = |e| ContextError::read(path, e);
        let metadata = fs::symlink_metadata(path).map_err(read)?;
        let Some(kind) = kind_of(&metadata) else {
            continue;
        };
        let file = match kind {
            ArchiveEntryKind::File => Some(open(path).map_err(read)?),
            _ => None,
        };
        // The open file is authoritative: the path may refer to another file by now.
        let metadata = match &file {
            Some(file) => file.metadata().map_err(read)?,
            None => metadata,
        };
        let mut entry = ArchiveEntry::new(kind, name.clone(), metadata.mode() & 0o7777);
        match kind {
            ArchiveEntryKind::File => entry = entry.with_size(metadata.len()),
            ArchiveEntryKind::Symlink => {
                entry.link = fs::read_link(path)
                    .map_err(read)?
                    .into_os_string()
                    .into_vec();
                // Permissions of symbolic links have no effect, and differ between systems.
                entry.mode = 0o777;
            }
            _ => {}
        }
        // Times are transferred, but are not part of the name.
        if with_times {
            entry.mtime = (metadata.mtime(), 0);
        }
        writer.begin(&entry).map_err(ContextError::Send)?;
        if let Some(mut file) = file {
            // The header contains this size: bytes that are appended meanwhile are not part of the
            // archive.
            let mut remaining = metadata.len();
            while remaining > 0 {
                let length = usize::try_from(remaining)
                    .map_or(BUFFER_BYTES, |remaining| remaining.min(BUFFER_BYTES));
                let n = file.read(&mut buffer[..length]).map_err(read)?;
                if n == 0 {
                    return Err(read(io::Error::other(
                        "the file changed while it was being read: try again",
                    )));
                }
                writer.write_all(&buffer[..n]).map_err(ContextError::Send)?;
                remaining -= n as u64;
            }
        }
        writer.end().map_err(ContextError::Send)?;
    }
    writer.finish().map_err(ContextError::Send)
}

/// Returns the type of a file, or `None` for sockets, pipes and devices, which cannot be copied.
fn kind_of(metadata: &Metadata) -> Option<ArchiveEntryKind> {
    let kind = metadata.file_type();
    match kind {
        _ if kind.is_file() => Some(ArchiveEntryKind::File),
        _ if kind.is_dir() => Some(ArchiveEntryKind::Directory),
        _ if kind.is_symlink() => Some(ArchiveEntryKind::Symlink),
        _ => None,
    }
}

/// Opens a file without blocking, because it may have been replaced by a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    File::options().read(true).custom_flags(flags).open(path)
}
