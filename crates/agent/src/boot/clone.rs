//! What only a clone needs: the kernel made its boot id once, before the snapshot.

use super::identity::random_id;
use super::mount::raw;
use std::io;

const SHOWN: &std::ffi::CStr = c"/proc/sys/kernel/random/boot_id";

/// Shows a new boot id to programs, by mounting a file over the kernel's.
pub fn new_boot_id() -> io::Result<()> {
    let hex = random_id()?;
    let id = format!(
        "{}-{}-4{}-8{}-{}\n",
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..]
    );
    let fresh = !std::fs::exists("/run/jiffy-boot-id")?;
    std::fs::write("/run/jiffy-boot-id", id)?;
    if fresh {
        raw(c"/run/jiffy-boot-id", SHOWN, c"", libc::MS_BIND, c"")?;
    }
    Ok(())
}
