//! Converts an EROFS image back to the layer from which it was built: a tar archive with OCI
//! whiteouts, the entries that mark files of the layers below as deleted.

use super::read::{ErofsImage, ImageError, Inode};
use jiffy_archive::{ArchiveEntry, ArchiveEntryKind, ArchiveError, ArchiveWriter};
use rustix::fs::FileType;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};

/// Maximum depth of directories. The unpacker's limit is lower.
const MAX_DEPTH: usize = 300;
/// Size of the buffer for the content of files.
const BUFFER_BYTES: usize = 1 << 18;
/// Extended attribute of a directory that hides the directory of the same name in lower layers.
const OPAQUE: &[u8] = b"trusted.overlay.opaque";

/// Error of the conversion.
#[derive(Debug, thiserror::Error)]
pub enum LayerOfImageError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("cannot write the content of the image: {0}")]
    Write(#[from] io::Error),
}

impl From<ArchiveError> for LayerOfImageError {
    fn from(error: ArchiveError) -> Self {
        Self::Write(io::Error::other(error))
    }
}

/// Writes `image` as a layer to `out`.
pub(crate) fn write_layer(image: &File, out: impl Write) -> Result<(), LayerOfImageError> {
    let image = ErofsImage::open(image)?;
    let root = image.inode(image.root)?;
    if kind(&root) != FileType::Directory {
        return Err(ImageError::Damaged("its root is not a directory").into());
    }
    let mut work = LayerConverter {
        image,
        writer: ArchiveWriter::new(out),
        named: HashMap::new(),
        buffer: vec![0; BUFFER_BYTES],
    };
    work.directory(&root, Vec::new(), 0)?;
    work.writer.finish()?;
    Ok(())
}

/// Conversion of an image to a tar archive.
struct LayerConverter<'a, W> {
    image: ErofsImage<'a>,
    writer: ArchiveWriter<W>,
    /// First path of each file with several hard links, by inode number.
    named: HashMap<u64, Vec<u8>>,
    buffer: Vec<u8>,
}

fn kind(inode: &Inode) -> FileType {
    FileType::from_raw_mode(inode.mode)
}

impl<W: Write> LayerConverter<'_, W> {
    /// Writes a directory and its entries to the archive, recursively.
    fn directory(
        &mut self,
        inode: &Inode,
        path: Vec<u8>,
        depth: usize,
    ) -> Result<(), LayerOfImageError> {
        // Bounds the recursion: a hostile image may contain a directory in itself.
        if depth > MAX_DEPTH {
            return Err(ImageError::Damaged("its directories are nested too deeply").into());
        }
        let shown = [&path[..], b"/"].concat();
        let mut entry = self.entry(inode, ArchiveEntryKind::Directory, &shown)?;
        let opaque = entry
            .xattrs
            .iter()
            .any(|(name, value)| name == OPAQUE && value == b"y");
        // The root has an entry as well, so that its attributes are preserved.
        if path.is_empty() {
            entry.path = b"./".to_vec();
        }
        self.writer.add(&entry, b"")?;
        // Overlayfs's mark on a directory becomes the OCI entry `.wh..wh..opq`, to which `whiteout`
        // contributes the first `.wh.`.
        if opaque {
            self.whiteout(&shown, b".wh..opq")?;
        }
        let mut offset = 0;
        while offset < inode.size {
            for (name, number) in self.image.names(inode, offset)? {
                let found = self.image.inode(number)?;
                let path = if path.is_empty() {
                    name
                } else {
                    [&shown[..], &name].concat()
                };
                match kind(&found) {
                    FileType::Directory => self.directory(&found, path, depth + 1)?,
                    _ => self.non_directory(&found, path)?,
                }
            }
            // Names never cross a block, so each block is read separately.
            offset += self.image.block();
        }
        Ok(())
    }

    /// Writes an entry for a file that is not a directory.
    fn non_directory(&mut self, inode: &Inode, path: Vec<u8>) -> Result<(), LayerOfImageError> {
        let kind = match kind(inode) {
            FileType::RegularFile => ArchiveEntryKind::File,
            FileType::Symlink => ArchiveEntryKind::Symlink,
            FileType::Fifo => ArchiveEntryKind::Fifo,
            // A character device 0/0 is overlayfs's whiteout.
            FileType::CharacterDevice if inode.word == 0 => {
                let name = path
                    .iter()
                    .rposition(|b| *b == b'/')
                    .map_or(0, |slash| slash + 1);
                return self.whiteout(&path[..name], &path[name..]);
            }
            // Devices and sockets are not part of layers.
            _ => return Ok(()),
        };
        if inode.links > 1 {
            if let Some(first) = self.named.get(&inode.number) {
                let mut entry = ArchiveEntry::new(ArchiveEntryKind::HardLink, path, 0o644);
                entry.link.clone_from(first);
                return Ok(self.writer.add(&entry, b"")?);
            }
            self.named.insert(inode.number, path.clone());
        }
        let mut entry = self.entry(inode, kind, &path)?;
        match kind {
            ArchiveEntryKind::Symlink => entry.link = self.image.target(inode)?,
            ArchiveEntryKind::File => return self.file(inode, entry.with_size(inode.size)),
            _ => {}
        }
        Ok(self.writer.add(&entry, b"")?)
    }

    /// Writes a regular file with its content.
    fn file(&mut self, inode: &Inode, entry: ArchiveEntry) -> Result<(), LayerOfImageError> {
        self.writer.begin(&entry)?;
        let mut offset = 0;
        while offset < inode.size {
            let n = self.image.read(inode, offset, &mut self.buffer)?;
            self.writer.write_all(&self.buffer[..n])?;
            offset += n as u64;
        }
        Ok(self.writer.end()?)
    }

    /// Writes the whiteout of `name` in the directory `above`: an empty file `.wh.NAME`. `above`
    /// ends with a slash unless it is the root.
    fn whiteout(&mut self, above: &[u8], name: &[u8]) -> Result<(), LayerOfImageError> {
        let above = if above == b"/" { b"" } else { above };
        let path = [above, b".wh.", name].concat();
        Ok(self
            .writer
            .add(&ArchiveEntry::new(ArchiveEntryKind::File, path, 0o644), b"")?)
    }

    /// Returns the entry of a file with the metadata of its inode.
    fn entry(
        &self,
        inode: &Inode,
        kind: ArchiveEntryKind,
        path: &[u8],
    ) -> Result<ArchiveEntry, LayerOfImageError> {
        let mut entry = ArchiveEntry::new(kind, path, inode.mode & 0o7777);
        (entry.uid, entry.gid) = (inode.uid, inode.gid);
        entry.mtime = inode.mtime;
        entry.xattrs = self.image.attributes(inode)?;
        Ok(entry)
    }
}
