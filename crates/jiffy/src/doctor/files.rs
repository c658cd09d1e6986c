//! Modes and owners in the data directory.

use super::Finding;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Files with which one is somebody else: keys, what signs links, environments of sandboxes, the
/// key of the TLS authority.
const SECRET_FILES: [&str; 7] = [
    "keys.db",
    "api-key",
    "preview-key",
    "state.db",
    "builds.db",
    "tls/key.pem",
    "tls/authority.pem",
];
/// Files beside a database with what is not yet in it.
const DATABASE_SUFFIXES: [&str; 3] = ["", "-wal", "-shm"];
/// Directories whose entries are looked at: sockets that take orders.
const SOCKET_DIRECTORIES: [&str; 3] = ["run", "run/vmm", "run/gvisor"];
/// Most paths that a finding names.
const MAX_SHOWN_PATHS: usize = 5;

/// Looks at the data directory and at what in it others could read, write or exchange.
pub fn run_all(home: &Path, tell: &mut dyn FnMut(Finding)) {
    let data = match fs::metadata(home) {
        Ok(data) => data,
        Err(e) => {
            return tell(Finding::note(
                "data",
                format!("{}: {e}", home.display()),
                "it is made by the first command that needs it",
            ));
        }
    };
    tell(directory(home, &data));
    tell(owners(home, data.uid()));
    tell(secrets(home));
    tell(directories(home));
}

fn directory(home: &Path, data: &Metadata) -> Finding {
    if data.mode() & 0o077 == 0 {
        return Finding::ok("data", format!("{}: for its owner only", home.display()));
    }
    Finding::fail(
        "data",
        format!(
            "{}: mode {:o}: others may read what sandboxes leave there",
            home.display(),
            data.mode() & 0o7777
        ),
        format!("chmod 700 {}", home.display()),
    )
}

/// Entries of a directory with what they are; none of what cannot be read.
fn entries(directory: &Path) -> Vec<(PathBuf, Metadata)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut all: Vec<_> = entries
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .collect();
    all.sort_by(|one, other| one.0.cmp(&other.0));
    all
}

/// Some of the paths, for people and for a shell.
fn path_list(paths: &[PathBuf]) -> String {
    let shown = paths.iter().take(MAX_SHOWN_PATHS);
    let shown: Vec<String> = shown.map(|path| path.display().to_string()).collect();
    let more = paths.len().saturating_sub(MAX_SHOWN_PATHS);
    match more {
        0 => shown.join(" "),
        more => format!("{} and {more} more", shown.join(" ")),
    }
}

/// Judges a list of paths that are not as they should be.
fn finding(
    what: &'static str,
    fine: &str,
    found: &str,
    remedy: &str,
    paths: &[PathBuf],
) -> Finding {
    match paths.is_empty() {
        true => Finding::ok(what, fine),
        false => Finding::fail(
            what,
            format!("{found}: {}", path_list(paths)),
            format!("{remedy} {}", path_list(paths)),
        ),
    }
}

fn owners(home: &Path, owner: u32) -> Finding {
    let listed = entries(home).into_iter();
    let foreign = listed.filter(|(_, data)| data.uid() != owner);
    let foreign: Vec<PathBuf> = foreign.map(|(path, _)| path).collect();
    finding(
        "owner",
        "all of it is the owner's",
        "another user may change this",
        &format!("if it is what it should be, chown {owner}"),
        &foreign,
    )
}

fn secrets(home: &Path) -> Finding {
    let files = SECRET_FILES
        .iter()
        .flat_map(|name| DATABASE_SUFFIXES.map(|suffix| home.join(format!("{name}{suffix}"))));
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
        "keys, databases and sockets are for their owner only",
        "others may use this as soon as they reach it",
        "chmod go=",
        &open,
    )
}

fn directories(home: &Path) -> Finding {
    let below = entries(home).into_iter();
    let sockets = SOCKET_DIRECTORIES
        .iter()
        .filter_map(|name| Some((home.join(name), fs::symlink_metadata(home.join(name)).ok()?)));
    // That others may pass through is needed where the users of sandboxes have something.
    let open = below
        .chain(sockets)
        .filter(|(_, data)| data.is_dir() && data.mode() & 0o066 != 0);
    let mut open: Vec<PathBuf> = open.map(|(path, _)| path).collect();
    open.dedup();
    finding(
        "directories",
        "snapshots, templates, uploads and the others are for their owner only",
        "others may list or change this as soon as they reach it",
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

    /// A data directory as a daemon leaves it.
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
        failed.map(|finding| finding.what).collect()
    }

    #[test]
    fn a_data_directory_as_the_daemon_leaves_it_has_nothing_to_change() {
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
        assert_eq!((all[0].status, all[0].what), (Status::Fail, "data"));
        assert!(all[0].found.contains("755"), "{}", all[0].found);
    }

    #[test]
    fn every_secret_socket_and_directory_that_others_may_use_is_named_with_its_remedy() {
        for (name, before, mode, what) in [
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
            assert_eq!(failed(home.path()), [what], "{name}");
            let all = findings(home.path());
            let finding = all.iter().find(|f| f.what == what).unwrap();
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
        let finding = owners(home.path(), owner + 1);
        assert_eq!(finding.status, Status::Fail);
        assert!(finding.found.contains("more"), "{}", finding.found);
    }
}
