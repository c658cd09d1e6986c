//! Confinement of the fetcher, entered before it reads data from the store.
//!
//! The *fetcher* is the process of this host that downloads missing memory of guests from the
//! store.

use super::seccomp;
use crate::host::RemoteSettings;
use crate::host::fetch_grants::GrantDirectory;
use crate::{DirectoryCheck, StoreUrl};
use jiffy_confinement::{self as confinement, MountTable, VisiblePath};
use nix::sched::CloneFlags;
use nix::sys::resource::{Resource, getrlimit};
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

/// Maximum length in bytes of a file that the fetcher writes: more than any guest's disk.
const MAX_FILE_BYTES: u64 = 2 << 40;
/// Configuration files of the host name resolver.
const RESOLVER_FILES: [&str; 5] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/host.conf",
];
/// Variables with paths of credential files, which are read again when the credentials expire.
const TOKEN_VARIABLES: [&str; 2] = [
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
];
/// Directories of libraries, from which the resolver may load modules. Only a fetcher without a new
/// root sees them: a new root contains the visible paths only.
const LIBRARIES: [&str; 4] = ["/lib", "/lib64", "/usr/lib", "/etc/ld.so.cache"];

/// Drops the privileges that the fetcher does not need: other files, its user, capabilities, other
/// processes, most system calls. This process must be single-threaded. Sets `check`, so that the
/// removal of a store's directory is noticed.
pub(super) fn confine(
    settings: &RemoteSettings,
    grants: &GrantDirectory,
    check: &DirectoryCheck,
) -> Result<(), Box<dyn Error>> {
    limit_resources()?;
    let visible = visible(settings, grants);
    let is_host = jiffy_rootless::is_host_root();
    let own = confinement::enter_own_root(&visible, CloneFlags::empty(), is_host)?;
    if let Some(reason) = own.weakness {
        tracing::warn!(
            reason,
            "the confinement of the fetcher is weaker than intended"
        );
    }
    if let Some(mounts) = own.mounts {
        watch_directory(settings, mounts, check)?;
    }
    confinement::forbid_inspection()?;
    confinement::restrict_files(&visible, &LIBRARIES)?;
    seccomp::enter()?;
    Ok(())
}

fn limit_resources() -> io::Result<()> {
    confinement::raise_descriptor_limit()?;
    // A core file would contain keys.
    confinement::set_limit(Resource::RLIMIT_CORE, 0)?;
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE)?;
    confinement::set_limit(Resource::RLIMIT_FSIZE, MAX_FILE_BYTES.min(hard))
}

/// Returns the files that the fetcher needs.
fn visible(settings: &RemoteSettings, grants: &GrantDirectory) -> Vec<VisiblePath> {
    let of = |path: PathBuf, is_writable| VisiblePath { path, is_writable };
    let mut visible = vec![
        // Only this subdirectory: files next to it may contain a command that the daemon runs.
        of(settings.home.join("store/layers"), true),
        of(grants.path().to_owned(), true),
    ];
    if let StoreUrl::Directory(path) = &settings.url {
        visible.push(of(path.clone(), false));
    }
    let files = RESOLVER_FILES.iter().map(PathBuf::from);
    let tokens = TOKEN_VARIABLES.iter().filter_map(std::env::var_os);
    // Such a file may be replaced by changing symbolic links in its directory. Therefore the whole
    // directory is visible, unless it is `/` or directly below `/`.
    let tokens = tokens.map(|path| match Path::new(&path).parent() {
        Some(parent) if parent.components().count() > 2 => parent.to_owned(),
        _ => path.into(),
    });
    let present = files.chain(tokens).filter(|path| path.exists());
    visible.extend(present.map(|path| of(path, false)));
    for visible in &mut visible {
        if let Ok(path) = std::path::absolute(&visible.path) {
            visible.path = path;
        }
    }
    visible
}

/// Sets the check for renames and removals of the store's directory on the host, which are not
/// visible through the mount.
fn watch_directory(
    settings: &RemoteSettings,
    mounts: MountTable,
    check: &DirectoryCheck,
) -> io::Result<()> {
    let StoreUrl::Directory(path) = &settings.url else {
        return Ok(());
    };
    let path = std::path::absolute(path)?;
    let Some(before) = mounts.root_of(&path)? else {
        return Ok(());
    };
    let exists = move || match mounts.root_of(&path)? {
        Some(now) if now == before => Ok(()),
        _ => Err(io::ErrorKind::NotFound.into()),
    };
    let _ = check.set(Box::new(exists));
    Ok(())
}
