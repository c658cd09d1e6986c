//! Memory of a VMM process, divided into memory of the guest and of the VMM.

use anyhow::Context;
use std::fs;

/// Memory in KiB.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct VmmMemory {
    /// Private memory of the VMM itself.
    pub own: u64,
    /// Host memory that backs the guest's memory.
    pub guest: u64,
}

/// Reads `/proc/PID/smaps`. Guest memory is recognised by its size: one mapping of at least
/// `guest_mib` MiB.
pub fn of_process(pid: u32, guest_mib: u32) -> anyhow::Result<VmmMemory> {
    let path = format!("/proc/{pid}/smaps");
    let smaps = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(parse(&smaps, guest_mib))
}

/// Parses `/proc/PID/smaps`. The mapping of at least `guest_mib` MiB is the memory of the guest.
fn parse(smaps: &str, guest_mib: u32) -> VmmMemory {
    let mut memory = VmmMemory::default();
    let mut is_guest = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(key), Some(value)) = (words.next(), words.next()) else {
            continue;
        };
        let kib: u64 = value.parse().unwrap_or(0);
        match key {
            // The size precedes the other values of a mapping.
            "Size:" => is_guest = kib >= u64::from(guest_mib) * 1024,
            // Pages of the guest are counted even if several guests share them. Pages that VMMs
            // share, such as their program, are not counted.
            "Rss:" if is_guest => memory.guest += kib,
            "Private_Clean:" | "Private_Dirty:" if !is_guest => memory.own += kib,
            _ => {}
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_recognised_by_its_size() {
        let smaps = "7f00-7f10 rw-p 00000000 00:00 0\nSize: 526336 kB\nRss: 40960 kB\nPrivate_Dirty: 40960 kB\n\
            5600-5601 r-xp 0 08:01 1 /x\nSize: 1000 kB\nRss: 900 kB\nPrivate_Clean: 300 kB\nPrivate_Dirty: 20 kB\n";
        assert_eq!(
            parse(smaps, 512),
            VmmMemory {
                own: 320,
                guest: 40_960
            }
        );
    }
}
