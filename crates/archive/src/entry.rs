//! Entries of an archive: the metadata of files, independent of the format.

/// Type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArchiveEntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A hard link to an earlier file of the archive.
    HardLink,
    /// A named pipe.
    Fifo,
    /// A character device: major, minor.
    Character(u32, u32),
    /// A block device: major, minor.
    Block(u32, u32),
    /// A device whose number is missing or invalid.
    UnknownDevice,
}

/// Range of a file with content. All other ranges are holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentRange {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Entry of an archive. Its content follows it in the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveEntry {
    /// Type.
    pub kind: ArchiveEntryKind,
    /// Path in the archive.
    pub path: Vec<u8>,
    /// Target of a link.
    pub link: Vec<u8>,
    /// Permission bits, with setuid, setgid and sticky.
    pub mode: u32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Modification time: seconds since 1970, and nanoseconds.
    pub mtime: (i64, u32),
    /// Extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Size in bytes, including holes.
    pub size: u64,
    /// Ranges with content, in order and within `size`.
    pub runs: Vec<ContentRange>,
}

impl ArchiveEntry {
    /// Creates an entry without content, owned by root.
    pub fn new(kind: ArchiveEntryKind, path: impl Into<Vec<u8>>, mode: u32) -> Self {
        Self {
            kind,
            path: path.into(),
            link: Vec::new(),
            mode,
            uid: 0,
            gid: 0,
            mtime: (0, 0),
            xattrs: Vec::new(),
            size: 0,
            runs: Vec::new(),
        }
    }

    /// Sets the size of a file without holes.
    pub fn with_size(mut self, size: u64) -> Self {
        self.size = size;
        self.runs = whole(size);
        self
    }

    /// Returns true if the file has holes.
    pub fn is_sparse(&self) -> bool {
        self.runs != whole(self.size)
    }

    /// Returns the number of bytes of content without holes.
    pub fn stored(&self) -> u64 {
        self.runs.iter().map(|run| run.length).sum()
    }
}

/// Returns a single range over a file of `size` bytes.
pub fn whole(size: u64) -> Vec<ContentRange> {
    match size {
        0 => Vec::new(),
        length => vec![ContentRange { offset: 0, length }],
    }
}
