//! Archive of a step's files.

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
    /// SHA-256 over names, content, permissions and link targets, in lower-case hexadecimal.
    /// Independent of modification times, owners and compression.
    pub name: String,
    found: ContextEntries,
}

impl ContextArchive {
    pub(super) fn new(found: ContextEntries) -> Result<Self, ContextError> {
        let hasher = write(&found, false, HashWriter(Sha256::new()))?;
        let name = HEXLOWER.encode(&hasher.0.finalize());
        Ok(Self { name, found })
    }

    /// Number of files, directories and links.
    pub fn entries(&self) -> usize {
        self.found.len()
    }

    /// Writes the archive: a gzipped tar with names relative to the context, owned by root.
    pub fn write_to(&self, out: impl Write) -> Result<(), ContextError> {
        let packed = GzEncoder::new(out, Compression::fast());
        let packed = write(&self.found, true, packed)?;
        let ended = packed.finish().and_then(|mut out| out.flush());
        ended.map_err(ContextError::Send)
    }
}

/// Returns the name of the archive that [`ContextArchive::write_to`] wrote to `packed`.
///
/// # Errors
/// Fails if `packed` is no gzipped tar, or has more than 32 GiB.
pub fn archive_name(packed: impl Read) -> io::Result<String> {
    let unpacked = MultiGzDecoder::new(packed).take(MAX_UNPACKED_BYTES);
    let mut reader = ArchiveReader::new(unpacked);
    let mut writer = ArchiveWriter::new(HashWriter(Sha256::new()));
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Some(mut entry) = reader.next_entry().map_err(io::Error::other)? {
        // The name does not depend on times.
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

fn write<W: Write>(found: &ContextEntries, dated: bool, out: W) -> Result<W, ContextError> {
    let mut writer = ArchiveWriter::new(out);
    let mut buffer = vec![0; BUFFER_BYTES];
    for (name, path) in found {
        let read = |e| ContextError::read(path, e);
        let about = fs::symlink_metadata(path).map_err(read)?;
        let Some(kind) = kind_of(&about) else {
            continue;
        };
        let file = match kind {
            ArchiveEntryKind::File => Some(open(path).map_err(read)?),
            _ => None,
        };
        let about = match &file {
            Some(file) => file.metadata().map_err(read)?,
            None => about,
        };
        let mut entry = ArchiveEntry::new(kind, name.clone(), about.mode() & 0o7777);
        match kind {
            ArchiveEntryKind::File => entry = entry.with_size(about.len()),
            ArchiveEntryKind::Symlink => {
                entry.link = fs::read_link(path)
                    .map_err(read)?
                    .into_os_string()
                    .into_vec();
                // Permissions of links have no effect and differ between systems.
                entry.mode = 0o777;
            }
            _ => {}
        }
        if dated {
            entry.mtime = (about.mtime(), 0);
        }
        writer.begin(&entry).map_err(ContextError::Send)?;
        if let Some(mut file) = file {
            let mut left = about.len();
            while left > 0 {
                let most =
                    usize::try_from(left).map_or(BUFFER_BYTES, |left| left.min(BUFFER_BYTES));
                let n = file.read(&mut buffer[..most]).map_err(read)?;
                if n == 0 {
                    return Err(read(io::Error::other(
                        "it changes while it is read: try again",
                    )));
                }
                writer.write_all(&buffer[..n]).map_err(ContextError::Send)?;
                left -= n as u64;
            }
        }
        writer.end().map_err(ContextError::Send)?;
    }
    writer.finish().map_err(ContextError::Send)
}

/// Type of a file that can be copied; none for sockets, pipes and devices.
fn kind_of(about: &Metadata) -> Option<ArchiveEntryKind> {
    let kind = about.file_type();
    match kind {
        _ if kind.is_file() => Some(ArchiveEntryKind::File),
        _ if kind.is_dir() => Some(ArchiveEntryKind::Directory),
        _ if kind.is_symlink() => Some(ArchiveEntryKind::Symlink),
        _ => None,
    }
}

/// Opens a file without blocking, in case it was replaced by a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    File::options().read(true).custom_flags(flags).open(path)
}
