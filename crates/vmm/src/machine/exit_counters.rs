//! Numbers of exits from the guest, counted by KVM (binary statistics;
//! Documentation/virt/kvm/api.rst, 4.133).

use crate::error::VmmError;
use kvm_ioctls::VcpuFd;
use nix::errno::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

/// `KVM_GET_STATS_FD` (include/uapi/linux/kvm.h).
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;
/// Size of `struct kvm_stats_header`: flags, name size, number of descriptors, and the offsets of
/// id, descriptors and data; all u32.
const STATS_HEADER_BYTES: usize = 24;
/// Size of `struct kvm_stats_desc` without its name: flags u32, exponent i16, size u16, offset u32,
/// bucket size u32.
const STATS_DESCRIPTOR_BYTES: usize = 16;
/// Maximum size of a name in bytes. No kernel has longer names.
const MAX_STAT_NAME_BYTES: usize = 256;
/// Maximum number of statistics.
const MAX_STATS: u64 = 1024;

/// Statistics file of every vCPU, and the offset of the number of exits in it.
#[derive(Debug)]
pub struct ExitCounters {
    vcpus: Vec<File>,
    offset: Option<u64>,
}

impl ExitCounters {
    /// Opens the statistics of vCPUs that are not running yet. For a running vCPU, the request
    /// would block until `KVM_RUN` returns. Kernels before 5.14 have no counters.
    pub fn new(vcpus: &[VcpuFd]) -> Self {
        let open = |vcpu: &VcpuFd| {
            // SAFETY: this request takes no argument and returns a new descriptor.
            let fd = unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_GET_STATS_FD, 0) };
            // SAFETY: the kernel has just created this descriptor for this process.
            (fd >= 0).then(|| unsafe { File::from_raw_fd(fd) })
        };
        // If one request fails, all results are dropped, and `read` returns `None`.
        let vcpus: Option<Vec<File>> = vcpus.iter().map(open).collect();
        Self {
            vcpus: vcpus.unwrap_or_default(),
            offset: None,
        }
    }

    /// Returns the number of exits of all vCPUs so far. `None` if the kernel does not count exits.
    pub fn read(&mut self) -> Result<Option<u64>, VmmError> {
        let Some(first) = self.vcpus.first() else {
            return Ok(None);
        };
        let failed = |e: io::Error| VmmError::host("statistics of KVM", e);
        let offset = match self.offset {
            Some(offset) => offset,
            // The offset is the same for all vCPUs.
            None => match find_offset(first, b"exits").map_err(failed)? {
                Some(offset) => *self.offset.insert(offset),
                None => return Ok(None),
            },
        };
        let mut exits = 0u64;
        for vcpu in &self.vcpus {
            let mut value = [0; 8];
            vcpu.read_exact_at(&mut value, offset).map_err(failed)?;
            // The sum wraps only after centuries of exits.
            exits = exits.wrapping_add(u64::from_le_bytes(value));
        }
        Ok(Some(exits))
    }
}

/// Returns the offset of the first value of the statistic named `statistic`.
fn find_offset(statistics: &File, statistic: &[u8]) -> io::Result<Option<u64>> {
    let bad = || io::Error::from(Errno::EBADMSG);
    let mut header = [0; STATS_HEADER_BYTES];
    statistics.read_exact_at(&mut header, 0)?;
    // Fields: 0 flags, 1 name size, 2 number of descriptors, 3 id, 4 descriptors, 5 data.
    let field = |at: usize| -> io::Result<u64> {
        let bytes = header.get(at * 4..).and_then(|b| b.first_chunk());
        Ok(u64::from(u32::from_le_bytes(*bytes.ok_or_else(bad)?)))
    };
    let (name_size, count, first, data) = (field(1)?, field(2)?, field(4)?, field(5)?);
    let name_size = usize::try_from(name_size).map_err(io::Error::other)?;
    // Reject an unknown format before using its sizes.
    if name_size > MAX_STAT_NAME_BYTES || count > MAX_STATS {
        return Err(bad());
    }
    let mut descriptor = vec![0; STATS_DESCRIPTOR_BYTES + name_size];
    let stride = u64::try_from(descriptor.len()).map_err(io::Error::other)?;
    for number in 0..count {
        statistics.read_exact_at(&mut descriptor, first + number * stride)?;
        let (head, name) = descriptor.split_at(STATS_DESCRIPTOR_BYTES);
        let name = name.split(|&b| b == 0).next().unwrap_or_default();
        if name == statistic {
            // The offset of the value follows flags, exponent and size.
            let offset = head.get(8..).and_then(|b| b.first_chunk());
            let offset = u32::from_le_bytes(*offset.ok_or_else(bad)?);
            return Ok(Some(data + u64::from(offset)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::tempfile::TempFile;

    /// Returns a statistics file in the kernel's format.
    fn statistics(names: &[&str], values: &[u64]) -> File {
        // A header of 24 bytes, then descriptors of 32 bytes (16, and a name of 16), then values.
        let name_size = 16u32;
        let count = u32::try_from(names.len()).unwrap();
        let data = 24 + count * 32;
        let mut bytes = Vec::new();
        for field in [0, name_size, count, 24, 24, data] {
            bytes.extend(field.to_le_bytes());
        }
        for (at, name) in (0u32..).zip(names) {
            bytes.extend([0; 8]);
            bytes.extend((at * 8).to_le_bytes());
            bytes.extend([0; 4]);
            let mut padded = [0; 16];
            padded[..name.len()].copy_from_slice(name.as_bytes());
            bytes.extend(padded);
        }
        values.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
        let file = TempFile::new().unwrap().into_file();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    #[test]
    fn exits_of_all_vcpus_are_added_up() {
        let names = ["io_exits", "exits", "halt_exits"];
        let vcpus = vec![
            statistics(&names, &[1, 20, 3]),
            statistics(&names, &[4, 50, 6]),
        ];
        let mut counters = ExitCounters {
            vcpus,
            offset: None,
        };
        assert_eq!(counters.read().unwrap(), Some(70));
        assert_eq!(counters.read().unwrap(), Some(70));
    }

    #[test]
    fn a_kernel_without_exit_counters_is_not_an_error() {
        let vcpus = vec![statistics(&["halt_exits"], &[3])];
        let mut counters = ExitCounters {
            vcpus,
            offset: None,
        };
        assert_eq!(counters.read().unwrap(), None);
        assert_eq!(ExitCounters::new(&[]).read().unwrap(), None);
    }
}
