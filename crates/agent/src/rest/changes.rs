//! `GET /changes`: which files this sandbox changed against its template, without their content.

use super::archive::is_left_out;
use super::error::RestError;
use super::target::parameter;
use crate::body::Reply;
use crate::boot::root;
use crate::server::json;
use crate::state::Agent;
use crate::sys;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Most changes of an answer.
const MAX_CHANGES: usize = 100_000;
/// Changes of an answer when nobody says.
const USUAL_CHANGES: usize = 10_000;
/// Deepest directory that is looked into.
const MAX_DEPTH: usize = 512;
/// Says that a directory hides what lies below it (overlayfs).
const OPAQUE: &CStr = c"trusted.overlay.opaque";

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
enum Kind {
    /// It is new.
    A,
    /// It is another.
    C,
    /// It is gone.
    D,
}

/// A file that is not as the template has it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Change {
    path: String,
    kind: Kind,
}

/// Answer of `/changes`.
#[derive(Debug, Default, Serialize)]
struct Changes {
    changes: Vec<Change>,
    /// There are more, which are not told.
    more: bool,
}

/// Tells the changes.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<Reply>, RestError> {
    let query = |name: &str| parameter(request.uri(), name);
    super::only_root(agent, query("username").as_deref(), "changes are")?;
    let most = match query("limit") {
        None => USUAL_CHANGES,
        Some(text) => text
            .parse()
            .ok()
            .filter(|n| (1..=MAX_CHANGES).contains(n))
            .ok_or_else(|| RestError::bad(format!("`limit` must be 1 to {MAX_CHANGES}")))?,
    };
    let Some((written, images)) = root::written().zip(root::images_below()) else {
        return Err(RestError::new(
            StatusCode::NOT_FOUND,
            "no changes are known: this agent did not mount its own root",
        ));
    };
    let upper = path_of(written);
    let lowers = images.iter().map(path_of).collect();
    let work = tokio::task::spawn_blocking(move || {
        let mut found = Changes::default();
        let mut walk = Walk {
            most,
            out: &mut found,
        };
        walk.directory(&upper, lowers, Path::new(""), 0)
            .map(|()| found)
    });
    let found = work
        .await
        .map_err(|e| RestError::new(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))?
        .map_err(|e| RestError::io("cannot look at what this sandbox wrote", &e))?;
    Ok(json(&found))
}

/// A way to an open directory that no mount hides.
fn path_of(directory: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

struct Walk<'a> {
    most: usize,
    out: &'a mut Changes,
}

impl Walk<'_> {
    /// Notes what differs in the directory `upper`, which lies over those of `lowers`, the uppermost
    /// first. What goes away meanwhile is passed over.
    fn directory(
        &mut self,
        upper: &Path,
        lowers: Vec<PathBuf>,
        path: &Path,
        depth: usize,
    ) -> io::Result<()> {
        if depth > MAX_DEPTH {
            self.out.more = true;
            return Ok(());
        }
        let names = match names(upper) {
            Err(e) if depth > 0 && e.kind() == io::ErrorKind::NotFound => return Ok(()),
            names => names?,
        };
        let hidden = depth > 0 && is_opaque(upper);
        if hidden {
            for name in below(&lowers)?.difference(&names) {
                self.note(&path.join(name), Kind::D);
            }
        }
        for name in &names {
            let path = path.join(name);
            if is_left_out(path.as_os_str().as_bytes()) {
                continue;
            }
            let own = upper.join(name);
            let Ok(found) = fs::symlink_metadata(&own) else {
                continue;
            };
            let (there, below) = look(&lowers, name);
            match (is_whiteout(&found), there) {
                (true, true) => self.note(&path, Kind::D),
                // Of a file that came and went.
                (true, false) => continue,
                (false, true) => self.note(&path, Kind::C),
                (false, false) => self.note(&path, Kind::A),
            }
            if self.out.more {
                return Ok(());
            }
            if found.is_dir() {
                self.directory(&own, below, &path, depth + 1)?;
            }
        }
        Ok(())
    }

    fn note(&mut self, path: &Path, kind: Kind) {
        if self.out.changes.len() >= self.most {
            self.out.more = true;
            return;
        }
        self.out.changes.push(Change {
            path: format!("/{}", path.to_string_lossy()),
            kind,
        });
    }
}

fn names(directory: &Path) -> io::Result<BTreeSet<OsString>> {
    let entries = fs::read_dir(directory)?;
    Ok(entries.flatten().map(|entry| entry.file_name()).collect())
}

/// Names in directories that lie on each other.
fn below(lowers: &[PathBuf]) -> io::Result<BTreeSet<OsString>> {
    let mut all = BTreeSet::new();
    let mut gone = BTreeSet::new();
    for lower in lowers {
        for name in names(lower)? {
            match fs::symlink_metadata(lower.join(&name)) {
                Ok(found) if is_whiteout(&found) => drop(gone.insert(name)),
                _ if !gone.contains(&name) => drop(all.insert(name)),
                _ => {}
            }
        }
    }
    Ok(all)
}

/// Whether `name` is in the directories `lowers`, which lie on each other, and, if it is a directory,
/// those that it consists of.
fn look(lowers: &[PathBuf], name: &OsStr) -> (bool, Vec<PathBuf>) {
    let mut there = false;
    let mut directories = Vec::new();
    for lower in lowers {
        let path = lower.join(name);
        match fs::symlink_metadata(&path) {
            Err(_) => continue,
            Ok(found) if is_whiteout(&found) => break,
            Ok(found) => {
                let first = !there;
                there = true;
                if !found.is_dir() {
                    // A file hides what lies below it, and is hidden by a directory above it.
                    break;
                }
                debug_assert!(first || !directories.is_empty());
                let last = is_opaque(&path);
                directories.push(path);
                if last {
                    break;
                }
            }
        }
    }
    (there, directories)
}

/// overlayfs's mark of a file that is gone.
fn is_whiteout(found: &Metadata) -> bool {
    found.file_type().is_char_device() && found.rdev() == 0
}

fn is_opaque(directory: &Path) -> bool {
    let Ok(path) = sys::cpath(directory) else {
        return false;
    };
    let mut value = [0_u8; 1];
    // SAFETY: valid C strings, and a buffer of the length that is said.
    let length = unsafe {
        libc::lgetxattr(
            path.as_ptr(),
            OPAQUE.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    length == 1 && &value == b"y"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(upper: &Path, lowers: &[&Path], most: usize) -> (Vec<String>, bool) {
        let mut found = Changes::default();
        let lowers = lowers.iter().map(|l| l.to_path_buf()).collect();
        let mut walk = Walk {
            most,
            out: &mut found,
        };
        walk.directory(upper, lowers, Path::new(""), 0).unwrap();
        let shown = found
            .changes
            .iter()
            .map(|c| format!("{:?} {}", c.kind, c.path));
        (shown.collect(), found.more)
    }

    #[test]
    fn files_are_new_other_or_gone_whichever_image_had_them() {
        let dir = tempfile::tempdir().unwrap();
        let [upper, high, low] = ["upper", "high", "low"].map(|name| dir.path().join(name));
        for (root, files) in [
            (&low, &["etc/a", "etc/b", "usr/x"][..]),
            (&high, &["etc/c"]),
            (
                &upper,
                &[
                    "etc/a",
                    "etc/c",
                    "etc/new",
                    "home/me/f",
                    "run/passing",
                    "usr/x",
                ],
            ),
        ] {
            for file in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "x").unwrap();
            }
        }
        let expected = [
            "C /etc",
            "C /etc/a",
            "C /etc/c",
            "A /etc/new",
            "A /home",
            "A /home/me",
            "A /home/me/f",
            "A /run",
            "C /usr",
            "C /usr/x",
        ];
        let (found, more) = changes(&upper, &[&high, &low], 100);
        assert_eq!((found, more), (expected.map(str::to_owned).to_vec(), false));
        let (found, more) = changes(&upper, &[&high, &low], 2);
        assert_eq!((found.len(), more), (2, true));
    }

    #[test]
    fn marks_of_overlayfs_are_files_that_are_gone() {
        // SAFETY: no argument but a number.
        if unsafe { libc::geteuid() } != 0 {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let [upper, low] = ["upper", "low"].map(|name| dir.path().join(name));
        for path in [&upper, &low] {
            fs::create_dir_all(path.join("d")).unwrap();
        }
        for name in ["gone", "kept", "d/hidden"] {
            fs::write(low.join(name), "x").unwrap();
        }
        for name in ["gone", "never"] {
            let path = sys::cpath(&upper.join(name)).unwrap();
            // SAFETY: a valid path.
            let made = unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR, 0) };
            assert_eq!(made, 0);
        }
        let opaque = sys::cpath(&upper.join("d")).unwrap();
        // SAFETY: valid C strings and a buffer of one byte.
        let set =
            unsafe { libc::setxattr(opaque.as_ptr(), OPAQUE.as_ptr(), b"y".as_ptr().cast(), 1, 0) };
        if set != 0 {
            // The file system of the tests has no such attributes.
            return;
        }
        let (found, _) = changes(&upper, &[&low], 100);
        assert_eq!(found, ["C /d", "D /d/hidden", "D /gone"]);
    }
}
