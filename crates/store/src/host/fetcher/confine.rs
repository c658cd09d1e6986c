//! Confinement of the fetcher, entered before it reads data from the store.

use super::seccomp;
use crate::host::RemoteSettings;
use crate::host::fetch_grants::GrantDirectory;
use crate::{DirectoryCheck, StoreUrl};
use jiffy_confinement::{
    self as confinement, MountTable, OwnUser, VisiblePath, drop_capabilities, enter_root,
    enter_user_namespace,
};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::Uid;
use std::error::Error;
use std::fs;
use std::io;
use std::os::fd::AsFd;
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
    if let Some(mounts) = leave_host(&visible)? {
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

/// Enters new namespaces, a new root and, if the host permits it, a separate user. Returns the
/// mount table, or `None` if the process still has the host's root or the table is unavailable.
fn leave_host(visible: &[VisiblePath]) -> Result<Option<MountTable>, Box<dyn Error>> {
    let namespaces = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    if !Uid::effective().is_root() {
        if let Err(e) = enter_user_namespace() {
            tracing::warn!(error = %e, "cannot create a user namespace: the fetcher is confined by Landlock only");
            return Ok(None);
        }
        unshare(namespaces)?;
        let mounts = enter_root(visible, None)?;
        drop_capabilities()?;
        return Ok(mounts);
    }
    let is_host = jiffy_rootless::is_host_root();
    // `/proc` still belongs to the daemon's PID namespace: the link contains this process's id
    // there.
    let own_pid = fs::read_link("/proc/self")?;
    let own_pid = own_pid.to_str().and_then(|pid| pid.parse().ok());
    match unshare(namespaces) {
        // The root user of an unprivileged container. VMMs have no jail there either.
        Err(Errno::EPERM) => {
            tracing::warn!("cannot create namespaces: the fetcher is confined by Landlock only");
            drop_capabilities()?;
            return Ok(None);
        }
        other => other?,
    }
    let user = match (is_host, own_pid, std::process::id()) {
        // Creating a user requires a PID namespace. The daemon starts the fetcher as process 1 of
        // one unless the host denies this.
        (true, Some(host_pid), 1) => match OwnUser::create(host_pid) {
            Ok(user) => Some(user),
            Err(e) => {
                tracing::warn!(error = %e, "cannot create a user for the fetcher: it runs as root without capabilities");
                None
            }
        },
        _ => None,
    };
    let Some(user) = user else {
        let mounts = enter_root(visible, None)?;
        drop_capabilities()?;
        return Ok(mounts);
    };
    match enter_root(visible, Some(user.as_fd())) {
        Ok(mounts) => {
            user.enter()?;
            Ok(mounts)
        }
        Err(e) => {
            tracing::warn!(
                error = %e,
                "a file system does not support ID-mapped mounts: the fetcher runs as root without capabilities"
            );
            let mounts = enter_root(visible, None)?;
            drop_capabilities()?;
            Ok(mounts)
        }
    }
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
