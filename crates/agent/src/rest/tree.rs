//! Synchronised directory trees: `GET /tree` lists a tree with the metadata of its files,
//! `POST /tree` sends the content of some of its files, and `POST /tree/remove` removes some of
//! them.
//!
//! The query parameter `path` is the directory. Requests with a body contain paths relative to it,
//! each followed by a zero byte.

use super::archive::send::stream;
use super::error::RestError;
use super::file_query::{decode_bytes, pairs, parameter};
use crate::body::{ReplyBody, json};
use crate::rpc::request::collect;
use crate::state::Agent;
use crate::workers::{CallClass, Progress};
use hyper::body::Incoming;
use hyper::{Request, Response, Uri};
use jiffy_archive::{ArchiveError, PackOptions};
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Maximum number of files in a list.
const MAX_FILES: usize = 1_000_000;
/// Maximum size of a list in bytes.
const MAX_LIST_BYTES: usize = 56 << 20;
/// Maximum size of the body of a request in bytes.
const MAX_BODY_BYTES: usize = 64 << 20;

/// Returns the directory of a request. Rejects callers that are not root.
async fn directory(agent: &Agent, uri: &Uri) -> Result<PathBuf, RestError> {
    super::only_root(agent, parameter(uri, "username").as_deref(), "trees are").await?;
    let path = pairs(uri).find(|(name, _)| *name == "path");
    let path = path
        .map(|(_, value)| decode_bytes(value))
        .unwrap_or_default();
    let path = PathBuf::from(OsStr::from_bytes(&path));
    if !path.is_absolute() {
        return Err(RestError::bad("the query has no absolute path"));
    }
    Ok(path)
}

/// Parses the paths in a body.
fn paths(body: &[u8]) -> Result<Vec<Vec<u8>>, RestError> {
    let paths: Vec<_> = body
        .split(|b| *b == 0)
        .filter(|path| !path.is_empty())
        .collect();
    let is_inside = |path: &&[u8]| {
        let mut parts = Path::new(OsStr::from_bytes(path)).components();
        parts.all(|part| matches!(part, Component::Normal(_)))
    };
    if !paths.iter().all(is_inside) {
        return Err(RestError::bad("a path is not below the directory"));
    }
    Ok(paths.into_iter().map(<[u8]>::to_vec).collect())
}

/// Sends the list of all files below a directory, except devices, pipes and sockets. Each file is
/// the text `KIND MODE SIZE MTIME CTIME INODE`, the path and the target of a symbolic link, each
/// followed by a zero byte. Times are `SECONDS.NANOSECONDS`, and the mode is octal.
pub async fn list(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let root = directory(agent, request.uri()).await?;
    let what = "cannot list a tree";
    let work = move |progress: &Progress| {
        let mut out = Vec::new();
        let mut count = 0;
        let mut waiting = vec![PathBuf::new()];
        while let Some(parent) = waiting.pop() {
            progress.enter(&root.join(&parent))?;
            let entries = match fs::read_dir(root.join(&parent)) {
                // The directory was removed meanwhile, or the tree does not exist yet.
                Err(e) if is_missing(&e) => continue,
                entries => entries.map_err(|e| RestError::io(what, &e))?,
            };
            for entry in entries {
                let name = entry.map_err(|e| RestError::io(what, &e))?.file_name();
                let path = parent.join(name);
                let full = root.join(&path);
                let Ok(found) = fs::symlink_metadata(&full) else {
                    continue;
                };
                if found.is_dir() {
                    waiting.push(path.clone());
                }
                count += 1;
                if count > MAX_FILES || out.len() > MAX_LIST_BYTES {
                    return Err(RestError::bad(format!("more than {MAX_FILES} files")));
                }
                push(&mut out, &path, &full, &found).map_err(|e| RestError::io(what, &e))?;
            }
            progress.advance();
        }
        Ok(out)
    };
    let call = agent.workers.attempt(CallClass::Archive, what, work);
    Ok(Response::new(ReplyBody::whole(call.await?)))
}

/// Returns whether a path does not exist.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// Appends a file to a list.
fn push(out: &mut Vec<u8>, path: &Path, full: &Path, found: &Metadata) -> io::Result<()> {
    let kind = found.file_type();
    let (letter, target) = if kind.is_symlink() {
        match fs::read_link(full) {
            Ok(target) => ('l', target),
            // The link was replaced meanwhile.
            Err(_) => return Ok(()),
        }
    } else if kind.is_dir() {
        ('d', PathBuf::new())
    } else if kind.is_file() {
        ('f', PathBuf::new())
    } else {
        return Ok(());
    };
    write!(
        out,
        "{letter} {:o} {} {}.{} {}.{} {}\0",
        found.mode() & 0o7777,
        found.size(),
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec(),
        found.ino()
    )?;
    for text in [path.as_os_str(), target.as_os_str()] {
        out.extend_from_slice(text.as_bytes());
        out.push(0);
    }
    Ok(())
}

/// Sends the regular files that the body lists, as an archive with relative paths. Files that do
/// not exist are omitted.
pub async fn send(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let root = directory(agent, request.uri()).await?;
    let names = paths(&collect(request.into_body(), MAX_BODY_BYTES).await?)?;
    stream(agent, PackOptions::TREE, move |packer| {
        for name in names {
            let path = root.join(OsStr::from_bytes(&name));
            if !fs::symlink_metadata(&path).is_ok_and(|found| found.is_file()) {
                continue;
            }
            match packer.add(&path, &name) {
                // The file was removed meanwhile.
                Err(ArchiveError::File { source, .. }) if is_missing(&source) => {}
                result => result?,
            }
        }
        Ok(())
    })
}

/// Removes the files and empty directories that the body lists, in this order. Directories with
/// other files are retained.
pub async fn remove(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let root = directory(agent, request.uri()).await?;
    let names = paths(&collect(request.into_body(), MAX_BODY_BYTES).await?)?;
    let what = "cannot remove files of a tree";
    let work = move |progress: &Progress| {
        for name in names {
            let path = root.join(OsStr::from_bytes(&name));
            progress.enter(&path)?;
            let removed = match fs::symlink_metadata(&path) {
                Ok(found) if found.is_dir() => fs::remove_dir(&path),
                Ok(_) => fs::remove_file(&path),
                Err(e) => Err(e),
            };
            match removed {
                Err(e) if e.kind() != io::ErrorKind::DirectoryNotEmpty && !is_missing(&e) => {
                    let what = format!("cannot remove '{}'", path.display());
                    return Err(RestError::io(&what, &e));
                }
                _ => {}
            }
        }
        Ok(())
    };
    let call = agent.workers.attempt(CallClass::Archive, what, work);
    Ok(json(&call.await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_outside_of_the_directory_are_rejected() {
        assert_eq!(
            paths(b"a/b\0c\0").unwrap(),
            [b"a/b".to_vec(), b"c".to_vec()]
        );
        assert!(paths(b"").unwrap().is_empty());
        for body in [&b"../a\0"[..], b"/a\0", b"a/../b\0", b"a\0./b\0"] {
            assert!(paths(body).is_err(), "{body:?}");
        }
    }
}
