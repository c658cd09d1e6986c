//! Attributes of nodes.
//!
//! A *node* is a file, directory or link of a volume, identified by a number as in FUSE.

use nix::libc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Time since 1970 in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub i64);

impl Time {
    /// Returns the present time.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self(since.map_or(0, |since| {
            i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
        }))
    }

    /// Returns the time with these seconds and nanoseconds, in the range of this type.
    pub fn new(seconds: i64, nanoseconds: i64) -> Self {
        Self(
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(nanoseconds),
        )
    }

    /// Returns the seconds and the nanoseconds.
    pub fn parts(self) -> (i64, u32) {
        let nanoseconds = self.0.rem_euclid(1_000_000_000);
        (
            self.0.div_euclid(1_000_000_000),
            u32::try_from(nanoseconds).unwrap_or(0),
        )
    }
}

/// Attributes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Number of the node. Numbers are never reused.
    pub node: u64,
    /// Type and permissions, as in `stat(2)`.
    pub mode: u32,
    /// Number of names.
    pub links: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node.
    pub device: u32,
    /// Size in bytes.
    pub size: u64,
    /// Number of 512-byte blocks on the host's disk.
    pub blocks: u64,
    /// Time of the last access.
    pub accessed: Time,
    /// Time of the last change of the content.
    pub modified: Time,
    /// Time of the last change of content or attributes.
    pub changed: Time,
}

impl Attributes {
    /// Returns the type of the node: a bit pattern of `S_IFMT`.
    pub fn kind(&self) -> u32 {
        self.mode & libc::S_IFMT
    }

    /// Returns whether the node is a directory.
    pub fn is_directory(&self) -> bool {
        self.kind() == libc::S_IFDIR
    }

    /// Returns whether the node is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == libc::S_IFREG
    }
}

/// Changes of attributes. `None` leaves an attribute as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Change {
    /// Permissions; the type is ignored.
    pub mode: Option<u32>,
    /// User.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size: Option<u64>,
    /// Time of the last access.
    pub accessed: Option<Time>,
    /// Time of the last change of the content.
    pub modified: Option<Time>,
}

/// Owner and permissions of a new node.
#[derive(Debug, Clone, Copy)]
pub struct Creation {
    /// Type and permissions.
    pub mode: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number.
    pub device: u32,
}
