//! Renews state that a clone has in common with its parent. A clone is a guest that was restored
//! from a snapshot of another sandbox. The state is: random seeds, the boot id, and memory marked
//! `MADV_WIPEONFORK`.

use super::mount::raw;
use crate::sys;
use std::io::{self, Write};
use std::path::Path;

/// File that replaces the kernel's boot id.
const BOOT_ID: &str = "/run/jiffy/boot-id";
const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";
/// Files with random bytes that distributions store for the next boot.
const SEEDS: [&str; 2] = [
    "/var/lib/systemd/random-seed",
    "/var/lib/urandom/random-seed",
];

/// File of the guest kernel. A write clears the memory of all processes that is marked
/// `MADV_WIPEONFORK`.
const WIPE_ON_FORK: &str = "/proc/sys/vm/wipe_on_fork";

/// Clears memory that programs marked as not to be copied by a fork (`MADV_WIPEONFORK`). Random
/// generators of libraries detect a clone in this way.
pub fn wipe_on_fork() -> io::Result<()> {
    match std::fs::write(WIPE_ON_FORK, "1") {
        // The snapshot contains an earlier kernel, without this file.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Sets a new boot id.
///
/// The guest kernel generates a new id when the file is written. Other kernels reject the write. In
/// this case a file is mounted over the kernel's file. As a side effect, user namespaces cannot
/// mount a `/proc` of their own.
pub fn new_boot_id() -> io::Result<()> {
    // The file exists if an earlier call mounted it.
    let is_mounted = std::fs::exists(BOOT_ID)?;
    if !is_mounted && std::fs::write(BOOT_ID_FILE, "1").is_ok() {
        return Ok(());
    }
    let hex = sys::random_id()?;
    // Form of a random UUID (version 4): the version 4 and the variant 8 each replace a digit.
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

/// Replaces the random bytes that are stored for the next boot, if there are any. A file that
/// cannot be written, for example because the disk is full, is removed. If it remained, the clone
/// would use the parent's bytes.
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
