//! Checks of `jiffy doctor --security`: modes and owners of the files in the data directory.

use super::Finding;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Files that must be accessible to their owner only: API keys, the key that signs preview links,
/// environment variables of sandboxes (`state.db`), builds, and the TLS key. `tls/authority.pem` is
/// a certificate without its key. It is checked because the daemon writes all files of `tls` with
/// mode 0600, and another user must not replace the certificate.
const SECRET_FILES: [&str; 7] = [
    "keys.db",
    "api-key",
    "preview-key",
    "state.db",
    "builds.db",
    "tls/key.pem",
    "tls/authority.pem",
];
/// Suffixes of database files, including the write-ahead log of SQLite.
const DATABASE_SUFFIXES: [&str; 3] = ["", "-wal", "-shm"];
/// Directories whose control sockets are checked.
const SOCKET_DIRECTORIES: [&str; 3] = ["run", "run/vmm", "run/gvisor"];
/// Maximum number of paths in a finding.
const MAX_SHOWN_PATHS: usize = 5;

/// Checks for files in the data directory that other users can read, change or replace.
pub fn run_all(home: &Path, report: &mut dyn FnMut(Finding)) {
    let data = match fs::metadata(home) {
        Ok(data) => data,
        Err(e) => {
            return report(Finding::note(
                "data",
                format!("{}: {e}", home.display()),
                "no action needed: the first command that uses the directory creates it",
            ));
        }
    };
    report(directory(home, &data));
    report(owners(home, data.uid()));
    report(secrets(home));
    report(directories(home));
}

/// Checks the mode of the data directory.
fn directory(home: &Path, data: &Metadata) -> Finding {
    if data.mode() & 0o077 == 0 {
        return Finding::ok(
            "data",
            format!("{}: accessible to its owner only", home.display()),
        );
    }
    Finding::fail(
        "data",
        format!(
            "{}: mode {:o}: other users can read data of sandboxes",
            home.display(),
            data.mode() & 0o7777
        ),
        format!("run `chmod 700 {}`", home.display()),
    )
}

/// Returns the entries of a directory with their metadata. Skips unreadable entries.
fn entries(directory: &Path) -> Vec<(PathBuf, Metadata)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut all: Vec<_> = entries
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Returns at most [`MAX_SHOWN_PATHS`] paths, separated by spaces, and the number of further paths.
fn path_list(paths: &[PathBuf]) -> String {
    let shown = paths.iter().take(MAX_SHOWN_PATHS);
    let shown: Vec<String> = shown.map(|path| path.display().to_string()).collect();
    let more = paths.len().saturating_sub(MAX_SHOWN_PATHS);
    if more == 0 {
        shown.join(" ")
    } else {
        format!("{} and {more} more", shown.join(" "))
    }
}

/// Returns a failure if `paths`, the paths that fail a check, is not empty. The paths are appended
/// to `problem` and to `remedy`.
fn finding(
    check: &'static str,
    ok: &str,
    problem: &str,
    remedy: &str,
    paths: &[PathBuf],
) -> Finding {
    if paths.is_empty() {
        Finding::ok(check, ok)
    } else {
        Finding::fail(
            check,
            format!("{problem}: {}", path_list(paths)),
            format!("{remedy} {}", path_list(paths)),
        )
    }
}

/// Checks that the direct entries of the data directory belong to its owner.
fn owners(home: &Path, owner: u32) -> Finding {
    let listed = entries(home).into_iter();
    // Only the direct entries are checked. Files below them may have other owners: the layers of
    // images retain the owners that the image defines.
    let foreign = listed.filter(|(_, data)| data.uid() != owner);
    let foreign: Vec<PathBuf> = foreign.map(|(path, _)| path).collect();
    finding(
        "owner",
        "all files belong to the owner of the directory",
        "another user can change",
        &format!("verify the files, then run chown {owner}"),
        &foreign,
    )
}

/// Checks that other users cannot access files with secrets, or sockets.
fn secrets(home: &Path) -> Finding {
    let files = SECRET_FILES
        .iter()
        .flat_map(|name| DATABASE_SUFFIXES.map(|suffix| home.join(format!("{name}{suffix}"))));
    // Files that do not exist are skipped.
    let files = files.filter_map(|path| Some((path.clone(), fs::symlink_metadata(path).ok()?)));
    let sockets = SOCKET_DIRECTORIES
        .iter()
        .flat_map(|name| entries(&home.join(name)));
    let sockets = sockets.filter(|(_, data)| data.file_type().is_socket());
    let open = files
        .chain(sockets)
        .filter(|(_, data)| data.mode() & 0o077 != 0);
    let open: Vec<PathBuf> = open.map(|(path, _)| path).collect();
    finding(
        "secrets",
        "keys, databases and sockets are accessible to their owner only",
        "the mode permits access by other users",
        "chmod go=",
        &open,
    )
}

/// Checks that other users cannot list or change directories.
fn directories(home: &Path) -> Finding {
    let below = entries(home).into_iter();
    let sockets = SOCKET_DIRECTORIES
        .iter()
        .filter_map(|name| Some((home.join(name), fs::symlink_metadata(home.join(name)).ok()?)));
    // The unprivileged host users of sandbox processes traverse some directories and need their
    // execute permission, so only read and write permissions are checked.
    let open = below
        .chain(sockets)
        .filter(|(_, data)| data.is_dir() && data.mode() & 0o066 != 0);
    let mut open: Vec<PathBuf> = open.map(|(path, _)| path).collect();
    // `run` is an entry of the data directory and a directory with sockets.
    open.sort();
    open.dedup();
    finding(
        "directories",
        "snapshots, templates, uploads and other directories are accessible to their owner only",
        "the mode permits other users to list or change",
        "chmod go-rw",
        &open,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    fn set(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// Creates a data directory with the modes that a daemon sets.
    fn home() -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        set(home.path(), 0o700);
        for name in [
            "run",
            "run/vmm",
            "run/gvisor",
            "tls",
            "snapshots",
            "uploads",
        ] {
            fs::create_dir(home.path().join(name)).unwrap();
            set(&home.path().join(name), 0o700);
        }
        set(&home.path().join("run/gvisor"), 0o711);
        for name in [
            "keys.db",
            "keys.db-wal",
            "api-key",
            "state.db",
            "tls/key.pem",
        ] {
            fs::write(home.path().join(name), "").unwrap();
            set(&home.path().join(name), 0o600);
        }
        fs::write(home.path().join("run/vmm.log"), "").unwrap();
        drop(UnixListener::bind(home.path().join("run/jiffy.sock")).unwrap());
        set(&home.path().join("run/jiffy.sock"), 0o600);
        home
    }

    fn findings(home: &Path) -> Vec<Finding> {
        let mut all = Vec::new();
        super::run_all(home, &mut |finding| all.push(finding));
        all
    }

    fn failed(home: &Path) -> Vec<&'static str> {
        let failed = findings(home).into_iter();
        let failed = failed.filter(|finding| finding.status == Status::Fail);
        failed.map(|finding| finding.check).collect()
    }

    #[test]
    fn the_data_directory_of_a_daemon_has_no_findings() {
        let home = home();
        for finding in findings(home.path()) {
            assert_eq!(finding.status, Status::Ok, "{finding:?}");
        }
        let missing = findings(Path::new("/nonexistent/jiffy"));
        assert_eq!(missing[0].status, Status::Note);
    }

    #[test]
    fn a_data_directory_that_others_may_read_is_a_failure() {
        let home = home();
        set(home.path(), 0o755);
        let all = findings(home.path());
        assert_eq!((all[0].status, all[0].check), (Status::Fail, "data"));
        assert!(all[0].description.contains("755"), "{}", all[0].description);
    }

    #[test]
    fn every_secret_socket_and_directory_that_others_may_use_is_named_with_its_remedy() {
        for (name, before, mode, check) in [
            ("keys.db", 0o600, 0o640, "secrets"),
            ("keys.db-wal", 0o600, 0o604, "secrets"),
            ("api-key", 0o600, 0o644, "secrets"),
            ("state.db", 0o600, 0o644, "secrets"),
            ("tls/key.pem", 0o600, 0o660, "secrets"),
            ("run/jiffy.sock", 0o600, 0o777, "secrets"),
            ("run", 0o700, 0o755, "directories"),
            ("run/gvisor", 0o711, 0o733, "directories"),
            ("snapshots", 0o700, 0o755, "directories"),
            ("uploads", 0o700, 0o770, "directories"),
        ] {
            let home = home();
            let path = home.path().join(name);
            set(&path, mode);
            assert_eq!(failed(home.path()), [check], "{name}");
            let all = findings(home.path());
            let finding = all.iter().find(|f| f.check == check).unwrap();
            let remedy = finding.remedy.clone().unwrap_or_default();
            let path_text = path.display().to_string();
            assert!(
                remedy.starts_with("chmod go") && remedy.contains(&path_text),
                "{remedy}"
            );
            set(&path, before);
            assert!(failed(home.path()).is_empty(), "{name}");
        }
    }

    #[test]
    fn files_of_another_user_are_a_failure() {
        let home = home();
        let owner = fs::metadata(home.path()).unwrap().uid();
        assert_eq!(owners(home.path(), owner).status, Status::Ok);
        // All entries belong to another user, and are more than `MAX_SHOWN_PATHS`.
        let finding = owners(home.path(), owner + 1);
        assert_eq!(finding.status, Status::Fail);
        assert!(
            finding.description.contains("more"),
            "{}",
            finding.description
        );
    }
}
