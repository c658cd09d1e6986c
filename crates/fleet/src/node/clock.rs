//! Clock of a node, and the identity of the process. Both depend on the boot of the host.

use jiffy_fleet_core::{Instance, Millis};
use rustix::time::{ClockId, clock_gettime};
use std::fmt;

/// File with the id of the current boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Clock that never goes back.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Returns the time.
    fn now(&self) -> Millis;
}

/// `CLOCK_BOOTTIME`, which also advances while the host is suspended.
#[derive(Debug, Clone, Copy, Default)]
pub struct BootClock;

impl Clock for BootClock {
    fn now(&self) -> Millis {
        let time = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let milliseconds = u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000;
        Millis(seconds.saturating_mul(1000).saturating_add(milliseconds))
    }
}

/// Returns the identity of this process. Must be called once, at the start of the process.
///
/// # Errors
/// An I/O error if the id of the boot cannot be read.
pub fn current_instance() -> std::io::Result<Instance> {
    let text = std::fs::read_to_string(BOOT_ID)?;
    let digits: Vec<u8> = text
        .bytes()
        .filter(u8::is_ascii_hexdigit)
        .map(|digit| (char::from(digit).to_digit(16).unwrap_or(0)) as u8)
        .collect();
    let mut boot = [0; 16];
    if digits.len() != 2 * boot.len() {
        return Err(std::io::Error::other(format!("{BOOT_ID} contains no id")));
    }
    for (byte, pair) in boot.iter_mut().zip(digits.chunks(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Ok(Instance {
        boot,
        started_ms: BootClock.now().0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_one_boot_have_the_same_boot_id_and_increasing_times() {
        let first = current_instance().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(2));
        let second = current_instance().unwrap();
        assert_ne!(first.boot, [0; 16]);
        assert!(second.is_restart_of(&first));
    }
}
