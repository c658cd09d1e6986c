//! What an archive says about one file.

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// Another name of a file that the archive brought before.
    HardLink,
    /// A named pipe.
    Fifo,
    /// A character device: major, minor.
    Character(u32, u32),
    /// A block device: major, minor.
    Block(u32, u32),
    /// A device of which the archive does not say which.
    UnknownDevice,
}

/// A stretch of a file that has content; the rest is holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// One entry; its content comes behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: Kind,
    /// Its name, as the archive has it.
    pub path: Vec<u8>,
    /// Where a link leads.
    pub link: Vec<u8>,
    /// Permission bits, with setuid, setgid and sticky.
    pub mode: u32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Seconds since the epoch and nanoseconds.
    pub mtime: (i64, u32),
    /// Extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Bytes, holes included.
    pub size: u64,
    /// Where the content goes, in order; within `size`.
    pub runs: Vec<Run>,
}

impl Entry {
    /// An entry of root's without content.
    pub fn new(kind: Kind, path: impl Into<Vec<u8>>, mode: u32) -> Self {
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

    /// The same with this many bytes and no holes.
    pub fn with_size(mut self, size: u64) -> Self {
        self.size = size;
        self.runs = whole(size);
        self
    }

    /// Whether it has holes.
    pub fn is_sparse(&self) -> bool {
        self.runs != whole(self.size)
    }

    /// Bytes of content, holes left out.
    pub fn stored(&self) -> u64 {
        self.runs.iter().map(|run| run.length).sum()
    }
}

/// All of a file of `size` bytes.
pub fn whole(size: u64) -> Vec<Run> {
    match size {
        0 => Vec::new(),
        length => vec![Run { offset: 0, length }],
    }
}
