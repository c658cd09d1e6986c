//! Confinement of the fetcher, before it reads anything of the store's.

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

/// Maximum length in bytes of a file that the fetcher writes: more than any disk of a guest.
const MAX_FILE_BYTES: u64 = 2 << 40;
/// Files by which host names are resolved.
const RESOLVER_FILES: [&str; 5] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/host.conf",
];
/// Variables that name files with credentials, which are read again when those end.
const TOKEN_VARIABLES: [&str; 2] = [
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
];
/// Directories of libraries, from which an ordinary user's resolver loads some.
const LIBRARIES: [&str; 4] = ["/lib", "/lib64", "/usr/lib", "/etc/ld.so.cache"];

/// Gives up all that the fetcher does not need: other files, its user, capabilities, other
/// processes, most system calls. This process must have one thread. `check` is set so that a
/// directory with a store is noticed that is not there any more.
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
    confinement::seal()?;
    confinement::restrict_files(&visible, &LIBRARIES)?;
    seccomp::enter()?;
    Ok(())
}

fn limit_resources() -> io::Result<()> {
    confinement::raise_descriptor_limit()?;
    // A core file would hold keys.
    confinement::set_limit(Resource::RLIMIT_CORE, 0)?;
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE)?;
    confinement::set_limit(Resource::RLIMIT_FSIZE, MAX_FILE_BYTES.min(hard))
}

/// Files that the fetcher needs.
fn visible(settings: &RemoteSettings, grants: &GrantDirectory) -> Vec<VisiblePath> {
    let of = |path: PathBuf, is_writable| VisiblePath { path, is_writable };
    let mut visible = vec![
        // Not the files beside it: keys may name a command, which the daemon would run.
        of(settings.home.join("store/layers"), true),
        of(grants.path().to_owned(), true),
    ];
    if let StoreUrl::Directory(path) = &settings.url {
        visible.push(of(path.clone(), false));
    }
    let files = RESOLVER_FILES.iter().map(PathBuf::from);
    let tokens = TOKEN_VARIABLES.iter().filter_map(std::env::var_os);
    // Such a file is replaced together with links beside it.
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

/// Moves to namespaces, a root and, where the host allows it, a user of its own. Returns the
/// mounts.
fn leave_host(visible: &[VisiblePath]) -> Result<Option<MountTable>, Box<dyn Error>> {
    let namespaces = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    if !Uid::effective().is_root() {
        if let Err(e) = enter_user_namespace() {
            tracing::warn!(error = %e, "an ordinary user's fetcher is confined by Landlock only");
            return Ok(None);
        }
        unshare(namespaces)?;
        let mounts = enter_root(visible, None)?;
        drop_capabilities()?;
        return Ok(mounts);
    }
    let is_host = jiffy_rootless::is_host_root();
    let own_pid = fs::read_link("/proc/self")?;
    let own_pid = own_pid.to_str().and_then(|pid| pid.parse().ok());
    match unshare(namespaces) {
        // Root of a container without the right to do so, where there is no jail for VMMs either.
        Err(Errno::EPERM) => {
            tracing::warn!("root may not make namespaces: Landlock alone confines the fetcher");
            drop_capabilities()?;
            return Ok(None);
        }
        other => other?,
    }
    let user = match (is_host, own_pid, std::process::id()) {
        // Process 1 of a namespace, as the daemon starts it.
        (true, Some(host_pid), 1) => match OwnUser::create(host_pid) {
            Ok(user) => Some(user),
            Err(e) => {
                tracing::warn!(error = %e, "the fetcher is root without capabilities");
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
                "a file system does not map users: the fetcher is root without capabilities"
            );
            let mounts = enter_root(visible, None)?;
            drop_capabilities()?;
            Ok(mounts)
        }
    }
}

/// Has the store's directory checked for a rename or removal on the host, which a mount does not
/// show.
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
    let is_there = move || match mounts.root_of(&path)? {
        Some(now) if now == before => Ok(()),
        _ => Err(io::ErrorKind::NotFound.into()),
    };
    let _ = check.set(Box::new(is_there));
    Ok(())
}
