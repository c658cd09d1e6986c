//! `POST /changes/hashes`: hashes of files, by which two sandboxes compare the contents of their
//! changed files.
//!
//! The body contains absolute paths that are separated by zero bytes. The response is a list with
//! the SHA-256 of each file in hexadecimal digits. For a symbolic link, its target is hashed. The
//! entry is null for other files, for files that cannot be read, and beyond `maxBytes`.

use super::error::RestError;
use super::file_query::parameter;
use crate::body::{ReplyBody, json};
use crate::rpc::request::collect;
use crate::state::Agent;
use crate::workers::{CallClass, Progress};
use data_encoding::HEXLOWER;
use hyper::body::Incoming;
use hyper::{Request, Response};
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Maximum size of a request in bytes.
const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Maximum number of paths in a request.
const MAX_PATHS: usize = 10_000;
/// Number of bytes that are read at once.
const CHUNK_BYTES: usize = 128 << 10;

/// Returns the hashes.
pub async fn answer(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = |name: &str| parameter(request.uri(), name);
    super::only_root(agent, query("username").as_deref(), "hashes are").await?;
    let max_bytes = query("maxBytes").and_then(|text| text.parse().ok());
    let body = collect(request.into_body(), MAX_REQUEST_BYTES).await?;
    let what = "cannot hash files of this sandbox";
    let work = move |progress: &Progress| {
        let paths = body.split(|byte| *byte == 0);
        let mut hasher = Hasher {
            remaining: max_bytes.unwrap_or(u64::MAX),
            chunk: vec![0; CHUNK_BYTES],
            step: &|| progress.advance(),
        };
        let hash = |path: &[u8]| hasher.hash(Path::new(OsStr::from_bytes(path)));
        let hashes: Vec<Option<String>> = paths.take(MAX_PATHS).map(hash).collect();
        Ok::<_, RestError>(hashes)
    };
    let call = agent.workers.attempt(CallClass::Archive, what, work);
    Ok(json(&call.await?))
}

/// Computes hashes of files.
struct Hasher<'a> {
    /// Number of bytes that may still be read.
    remaining: u64,
    /// Buffer, which all files share.
    chunk: Vec<u8>,
    /// Called after each step.
    step: &'a dyn Fn(),
}

impl Hasher<'_> {
    /// Returns the hash of a file.
    fn hash(&mut self, path: &Path) -> Option<String> {
        (self.step)();
        let found = fs::symlink_metadata(path).ok()?;
        if found.is_symlink() {
            let target = fs::read_link(path).ok()?;
            let digest = Sha256::digest(target.as_os_str().as_bytes());
            return Some(HEXLOWER.encode(&digest));
        }
        if !found.is_file() || found.len() > self.remaining {
            return None;
        }
        self.read_and_hash(path).ok()?
    }

    /// Returns the SHA-256 of a regular file. `None` for other files, and if the remaining budget
    /// of bytes is too small.
    fn read_and_hash(&mut self, path: &Path) -> io::Result<Option<String>> {
        // The file may have been replaced meanwhile: the call must neither follow a link nor wait
        // for a pipe.
        let mut options = OpenOptions::new();
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let mut file = options.read(true).open(path)?;
        if !file.metadata()?.is_file() {
            return Ok(None);
        }
        let mut digest = Sha256::new();
        loop {
            let n = file.read(&mut self.chunk)?;
            if n == 0 {
                return Ok(Some(HEXLOWER.encode(&digest.finalize())));
            }
            // The file may have grown.
            let Some(remaining) = self.remaining.checked_sub(n as u64) else {
                return Ok(None);
            };
            self.remaining = remaining;
            digest.update(&self.chunk[..n]);
            (self.step)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn equal_contents_have_equal_hashes_and_special_files_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for (name, content) in [("a", "x"), ("b", "x"), ("c", "y"), ("empty", "")] {
            fs::write(path(name), content).unwrap();
        }
        symlink("a", path("link")).unwrap();
        symlink("b", path("other")).unwrap();
        // `remaining` is the maximum number of bytes that are read.
        let hash = |name: &str, remaining: u64| {
            let (chunk, step) = (vec![0; 8], &|| ());
            let mut hasher = Hasher {
                remaining,
                chunk,
                step,
            };
            hasher.hash(&path(name))
        };
        assert_eq!(hash("a", 9), hash("b", 9));
        assert_ne!(hash("a", 9), hash("c", 9));
        assert_ne!(hash("link", 9), hash("other", 9));
        assert!(hash("a", 9).is_some() && hash("empty", 0).is_some());
        assert_eq!(hash("a", 0), None, "a file beyond the limit");
        assert_eq!(hash(".", 9), None);
        assert_eq!(hash("missing", 9), None);
        let pipe = crate::sys::cpath(&path("pipe")).unwrap();
        // SAFETY: the path is zero-terminated.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        assert_eq!(hash("pipe", 9), None);
    }
}
