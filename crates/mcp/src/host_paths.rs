//! Files of the host that may be copied. A path must be below an allowed directory after its
//! symbolic links are resolved. Files are opened relative to this directory without following
//! links, so that a path that changes after the check cannot lead outside.

use crate::error::{ToolError, ToolResult};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Directories of the host whose files may be copied.
#[derive(Debug, Default)]
pub struct AllowedDirectories(Vec<PathBuf>);

/// File of the host that is being written. It replaces its target when it is complete.
#[derive(Debug)]
pub struct NewHostFile {
    /// File with a temporary name.
    pub file: File,
    directory: File,
    temporary: String,
    name: PathBuf,
    /// True if the file is complete. Otherwise dropping this value removes it.
    is_complete: bool,
}

impl AllowedDirectories {
    /// Resolves the directories of the options.
    pub fn new(directories: &[PathBuf]) -> anyhow::Result<Self> {
        let resolve = |directory: &PathBuf| {
            let resolved = directory.canonicalize();
            match resolved {
                Ok(path) if path.is_dir() => Ok(path),
                Ok(path) => anyhow::bail!("--allow-dir: {} is not a directory", path.display()),
                Err(e) => anyhow::bail!("--allow-dir: cannot open {}: {e}", directory.display()),
            }
        };
        let directories: anyhow::Result<_> = directories.iter().map(resolve).collect();
        Ok(Self(directories?))
    }

    /// Opens a regular file for reading.
    pub fn open(&self, path: &str) -> ToolResult<File> {
        let resolved = Path::new(path)
            .canonicalize()
            .map_err(|e| failed(path, &e))?;
        let (root, relative) = self.split(path, &resolved)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = open_below(root, relative, flags).map_err(|e| failed(path, &e))?;
        if file.metadata().is_ok_and(|m| m.is_file()) {
            return Ok(file);
        }
        Err(ToolError::new(format!(
            "`{path}` is not a regular file: pack directories into an archive first"
        )))
    }

    /// Creates a file that replaces `path` when it is complete.
    pub fn create(&self, path: &str) -> ToolResult<NewHostFile> {
        let no_name = || ToolError::new(format!("`{path}` has no file name: specify one"));
        let target = Path::new(path);
        let name = target.file_name().ok_or_else(no_name)?;
        if path.contains('\0') {
            return Err(failed(path, &io::ErrorKind::InvalidFilename.into()));
        }
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let parent = parent.canonicalize().map_err(|e| failed(path, &e))?;
        let (root, relative) = self.split(path, &parent)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = open_below(root, relative, flags).map_err(|e| failed(path, &e))?;
        if directory_entry_is_directory(&directory, name) {
            return Err(ToolError::new(format!(
                "`{path}` is a directory: specify the name of the file"
            )));
        }
        let random = crate::session::random_word();
        let temporary = format!(".jiffy-{random}.part");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = Mode::from_raw_mode(0o644);
        let file = rustix::fs::openat(&directory, &temporary, flags | OFlags::CLOEXEC, mode)
            .map_err(|e| failed(path, &e.into()))?;
        Ok(NewHostFile {
            file: file.into(),
            directory,
            temporary,
            name: name.into(),
            is_complete: false,
        })
    }

    /// Returns the allowed directory above `resolved`, and the relative path below it.
    fn split<'a>(&'a self, path: &str, resolved: &'a Path) -> ToolResult<(&'a Path, &'a Path)> {
        let below = |root: &'a PathBuf| Some((root.as_path(), resolved.strip_prefix(root).ok()?));
        self.0.iter().find_map(below).ok_or_else(|| {
            let roots: Vec<_> = self
                .0
                .iter()
                .map(|root| root.display().to_string())
                .collect();
            ToolError::new(format!(
                "`{path}` is not below a permitted directory: use a path below {}",
                roots.join(" or ")
            ))
        })
    }
}

/// Opens `relative` below `root` without following symbolic links.
fn open_below(root: &Path, relative: &Path, flags: OFlags) -> io::Result<File> {
    let directory = File::open(root)?;
    // An empty path would be rejected by the kernel.
    let is_root = relative.as_os_str().is_empty();
    let relative = if is_root { Path::new(".") } else { relative };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = flags | OFlags::CLOEXEC;
    let file = openat2(&directory, relative, flags, Mode::empty(), resolve)?;
    Ok(file.into())
}

fn directory_entry_is_directory(directory: &File, name: &std::ffi::OsStr) -> bool {
    rustix::fs::statat(directory, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

fn failed(path: &str, error: &io::Error) -> ToolError {
    ToolError::new(format!("cannot open `{path}` on the host: {error}"))
}

impl NewHostFile {
    /// Replaces the target by the complete file.
    pub fn finish(mut self) -> io::Result<()> {
        rustix::fs::renameat(
            &self.directory,
            &self.temporary,
            &self.directory,
            &self.name,
        )?;
        self.is_complete = true;
        Ok(())
    }
}

impl Drop for NewHostFile {
    fn drop(&mut self) {
        if !self.is_complete {
            // Ignore the error: the file may have been removed meanwhile.
            let flags = rustix::fs::AtFlags::empty();
            let _ = rustix::fs::unlinkat(&self.directory, &self.temporary, flags);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::symlink;

    struct Place {
        _root: tempfile::TempDir,
        inside: PathBuf,
        outside: PathBuf,
        allowed: AllowedDirectories,
    }

    fn place() -> Place {
        let root = tempfile::tempdir().unwrap();
        let (inside, outside) = (root.path().join("in"), root.path().join("out"));
        std::fs::create_dir(&inside).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(inside.join("file"), "inside").unwrap();
        std::fs::write(outside.join("secret"), "outside").unwrap();
        let allowed = AllowedDirectories::new(std::slice::from_ref(&inside)).unwrap();
        Place {
            _root: root,
            inside,
            outside,
            allowed,
        }
    }

    fn text(path: PathBuf) -> String {
        path.to_str().unwrap().to_owned()
    }

    #[test]
    fn only_files_below_the_allowed_directories_are_read() {
        let place = place();
        symlink(place.outside.join("secret"), place.inside.join("link")).unwrap();
        symlink(&place.outside, place.inside.join("directory")).unwrap();
        symlink(place.inside.join("file"), place.inside.join("own")).unwrap();
        symlink(place.inside.join("file"), place.outside.join("back")).unwrap();
        for name in ["file", "own", "../in/file", "../out/back"] {
            let mut content = String::new();
            let mut file = place.allowed.open(&text(place.inside.join(name))).unwrap();
            file.read_to_string(&mut content).unwrap();
            assert_eq!(content, "inside", "{name}");
        }
        for name in [
            "link",
            "directory/secret",
            "../out/secret",
            ".",
            "absent",
            "fi\0le",
        ] {
            let path = text(place.inside.join(name));
            assert!(place.allowed.open(&path).is_err(), "{name}");
        }
        assert!(place.allowed.open("/etc/passwd").is_err());
        assert!(AllowedDirectories::default().open("/etc/passwd").is_err());
        // A neighbour whose name starts with the name of the directory is not below it.
        std::fs::create_dir(place.inside.with_extension("x")).unwrap();
        let neighbour = place.inside.with_extension("x").join("file");
        std::fs::write(&neighbour, "").unwrap();
        assert!(place.allowed.open(&text(neighbour)).is_err());
    }

    #[test]
    fn a_link_that_appears_after_the_check_is_not_followed() {
        let place = place();
        symlink(&place.outside, place.inside.join("directory")).unwrap();
        let path = Path::new("directory/secret");
        assert!(open_below(&place.inside, path, OFlags::RDONLY).is_err());
        assert!(open_below(&place.inside, Path::new("../out/secret"), OFlags::RDONLY).is_err());
    }

    #[test]
    fn written_files_replace_their_target_only_when_complete() {
        let place = place();
        let secret = place.outside.join("secret");
        symlink(&secret, place.inside.join("link")).unwrap();
        symlink(&place.outside, place.inside.join("directory")).unwrap();
        for name in ["file", "new", "link"] {
            let path = place.inside.join(name);
            let mut new = place.allowed.create(&text(path.clone())).unwrap();
            new.file.write_all(b"content").unwrap();
            new.finish().unwrap();
            assert_eq!(std::fs::read_to_string(path).unwrap(), "content");
        }
        assert_eq!(std::fs::read_to_string(secret).unwrap(), "outside");
        drop(
            place
                .allowed
                .create(&text(place.inside.join("new")))
                .unwrap(),
        );
        for name in ["directory/new", "../out/new", "absent/new", "..", "n\0w"] {
            let path = text(place.inside.join(name));
            assert!(place.allowed.create(&path).is_err(), "{name}");
        }
        let names = std::fs::read_dir(&place.inside).unwrap();
        // The entries `file`, `new`, `link` and `directory`.
        assert_eq!(names.count(), 4, "an incomplete file remained");
    }
}
