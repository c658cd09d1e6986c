//! Renewal of state that a clone shares with its parent: random seeds, boot id, and memory marked
//! `MADV_WIPEONFORK`.

use super::mount::raw;
use crate::sys;
use std::io::{self, Write};
use std::path::Path;

const BOOT_ID: &str = "/run/jiffy/boot-id";
const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";
/// Files with random bytes that distributions keep for the next boot.
const SEEDS: [&str; 2] = [
    "/var/lib/systemd/random-seed",
    "/var/lib/urandom/random-seed",
];

/// File of the guest kernel. A write says that the machine is a copy.
const WIPE_ON_FORK: &str = "/proc/sys/vm/wipe_on_fork";

/// Empties memory that programs marked as not to be copied by a fork (`MADV_WIPEONFORK`): random
/// generators in libraries notice a clone by that.
pub fn wipe_on_fork() -> io::Result<()> {
    match std::fs::write(WIPE_ON_FORK, "1") {
        // The snapshot is of an earlier kernel.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Gives the machine a new boot id.
///
/// The guest kernel makes one when the file is written to. Other kernels refuse that: there a file
/// is mounted over theirs, which keeps user namespaces from mounting a `/proc` of their own.
pub fn new_boot_id() -> io::Result<()> {
    let is_mounted = std::fs::exists(BOOT_ID)?;
    if !is_mounted && std::fs::write(BOOT_ID_FILE, "1").is_ok() {
        return Ok(());
    }
    let hex = sys::random_id()?;
    let id = format!(
        "{}-{}-4{}-8{}-{}\n",
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..]
    );
    std::fs::write(BOOT_ID, id)?;
    if !is_mounted {
        let shown = sys::cstring(BOOT_ID_FILE.as_bytes())?;
        raw(c"/run/jiffy/boot-id", &shown, c"", libc::MS_BIND, c"")?;
    }
    Ok(())
}

/// Replaces the random bytes that are kept for the next boot, if there are any. If there is no
/// space for new ones they are removed: none is better than the parent's.
pub fn new_random_seeds() -> io::Result<()> {
    for seed in SEEDS.map(Path::new) {
        if !std::fs::metadata(seed).is_ok_and(|found| found.is_file()) {
            continue;
        }
        let mut bytes = [0; 512];
        sys::random(&mut bytes)?;
        let mut options = std::fs::File::options();
        let file = sys::open_regular(seed, options.write(true).truncate(true));
        if file.and_then(|mut file| file.write_all(&bytes)).is_err() {
            std::fs::remove_file(seed)?;
        }
    }
    Ok(())
}
