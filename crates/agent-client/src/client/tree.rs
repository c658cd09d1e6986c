//! Synchronised directory trees: listing with metadata, content of selected files, removal.

use super::AgentClient;
use super::files::{FileReader, escape};
use crate::error::ClientError;
use crate::request_body::RequestBody;

/// Maximum size of a list in bytes.
const MAX_LIST_BYTES: usize = 64 << 20;

/// Type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeEntryKind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
}

/// File in a directory tree of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeEntry {
    /// Type.
    pub kind: TreeEntryKind,
    /// Path relative to the tree, as the guest reported it.
    pub path: Vec<u8>,
    /// Target of a symbolic link.
    pub target: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// Size in bytes.
    pub size: u64,
    /// Time of modification: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Time of the last change of content or metadata.
    pub ctime: (i64, u32),
    /// Number of the inode.
    pub inode: u64,
}

impl AgentClient {
    /// Lists all files below a directory, except devices, pipes and sockets. A missing directory
    /// has no files.
    pub async fn tree(&self, directory: &[u8]) -> Result<Vec<TreeEntry>, ClientError> {
        let mut reader = self.get(&uri("/tree", directory)).await?;
        let mut body = Vec::new();
        while let Some(piece) = reader.next().await? {
            // The guest determines the size.
            if body.len() + piece.len() > MAX_LIST_BYTES {
                return Err(ClientError::TooLarge {
                    limit: MAX_LIST_BYTES,
                });
            }
            body.extend_from_slice(&piece);
        }
        entries(&body).ok_or_else(|| ClientError::Protocol("invalid list of files".to_owned()))
    }

    /// Reads regular files as an archive. `paths` and the names in the archive are relative to the
    /// directory. Files that do not exist are omitted.
    pub async fn tree_files<'a>(
        &self,
        directory: &[u8],
        paths: impl Iterator<Item = &'a [u8]>,
    ) -> Result<FileReader, ClientError> {
        let answer = self.post_paths("/tree", directory, paths).await?;
        Ok(FileReader { answer })
    }

    /// Removes files and empty directories, in this order. `paths` are relative to the directory.
    pub async fn remove_from_tree<'a>(
        &self,
        directory: &[u8],
        paths: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), ClientError> {
        let answer = self.post_paths("/tree/remove", directory, paths).await?;
        answer.collect(1024).await?;
        Ok(())
    }

    /// Posts a list of paths below `directory`. Each path ends with a zero byte.
    async fn post_paths<'a>(
        &self,
        path: &str,
        directory: &[u8],
        paths: impl Iterator<Item = &'a [u8]>,
    ) -> Result<crate::connection_pool::PooledResponse, ClientError> {
        let mut body = Vec::new();
        for path in paths {
            body.extend_from_slice(path);
            body.push(0);
        }
        let body = RequestBody::whole(body);
        self.post_bytes(&uri(path, directory), body).await
    }
}

fn uri(path: &str, directory: &[u8]) -> String {
    // If the sandbox has no access token, the agent answers only if the query names root.
    let mut uri = format!("{path}?username=root&path=");
    escape(&mut uri, directory);
    uri
}

/// Parses a list. `None` if it is invalid.
fn entries(body: &[u8]) -> Option<Vec<TreeEntry>> {
    let mut fields = body.split(|b| *b == 0);
    let mut entries = Vec::new();
    loop {
        let metadata = fields.next()?;
        if metadata.is_empty() {
            // The list ends with a zero byte.
            return fields.next().is_none().then_some(entries);
        }
        let (path, target) = (fields.next()?.to_vec(), fields.next()?.to_vec());
        entries.push(entry(std::str::from_utf8(metadata).ok()?, path, target)?);
    }
}

/// Parses an entry. `metadata` has type, mode, size, times of change and inode. `None` if it has
/// another form.
fn entry(metadata: &str, path: Vec<u8>, target: Vec<u8>) -> Option<TreeEntry> {
    let words: Vec<&str> = metadata.split(' ').collect();
    let [kind, mode, size, mtime, ctime, inode] = words[..] else {
        return None;
    };
    let time = |text: &str| {
        let (seconds, nanoseconds) = text.split_once('.')?;
        Some((seconds.parse().ok()?, nanoseconds.parse().ok()?))
    };
    Some(TreeEntry {
        kind: match kind {
            "f" => TreeEntryKind::File,
            "d" => TreeEntryKind::Directory,
            "l" => TreeEntryKind::Symlink,
            _ => return None,
        },
        path,
        target,
        mode: u32::from_str_radix(mode, 8).ok()?,
        size: size.parse().ok()?,
        mtime: time(mtime)?,
        ctime: time(ctime)?,
        inode: inode.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed_and_damaged_lists_are_rejected() {
        let text = b"f 644 3 1.2 3.4 5\0a\nb\0\0l 777 1 -1.0 0.0 6\0l\0t\0";
        let list = entries(text).unwrap();
        assert_eq!(list.len(), 2);
        assert_eq!((&list[0].path[..], list[0].mode), (&b"a\nb"[..], 0o644));
        assert_eq!((list[1].mtime, &list[1].target[..]), ((-1, 0), &b"t"[..]));
        assert!(entries(b"").unwrap().is_empty());
        for bad in [
            &b"f 644 3 1.2 3.4 5\0a\0"[..],
            b"f 644 3 1.2 3.4\0a\0\0",
            b"x 644 3 1.2 3.4 5\0a\0\0",
            b"f 9 3 1.2 3.4 5\0a\0\0",
            b"f 644 -3 1.2 3.4 5\0a\0\0",
            b"f 644 3 1 3.4 5\0a\0\0",
            b"\0a\0\0",
            b"\xff\0a\0\0",
        ] {
            assert!(entries(bad).is_none(), "{bad:?}");
        }
    }
}
