//! Checks access to KVM on this host, and whether KVM uses hardware virtualization.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

/// Mode in which KVM runs guests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvmKind {
    /// With hardware virtualization (VT-x, AMD-V).
    Hardware,
    /// Without hardware virtualization, by the PVM patches for KVM: guests run deprivileged on
    /// shadow page tables.
    Software,
}

/// Reason why KVM cannot be used, with a remedy.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The device does not exist.
    #[error(
        "/dev/kvm does not exist, so this host has no KVM; enable virtualization in the firmware or load the kvm_intel or kvm_amd module; in a virtual machine, enable nested virtualization"
    )]
    Missing,
    /// The user has no permission to open the device.
    #[error(
        "permission denied for /dev/kvm: add this user to the `kvm` group (`usermod -aG kvm USER`, then log in again) or run as root"
    )]
    Denied,
    /// Another error.
    #[error("cannot use /dev/kvm: {0}")]
    Broken(io::Error),
}

/// Number of the request for the version of the interface (linux/kvm.h).
const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
/// Version of the interface, which has been the same since Linux 2.6.22.
const KVM_API_VERSION: i32 = 12;

/// Opens the device for a VMM.
pub fn open() -> Result<File, KvmError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => KvmError::Missing,
            io::ErrorKind::PermissionDenied => KvmError::Denied,
            _ => KvmError::Broken(e),
        })?;
    // SAFETY: this request takes no argument and only returns a number.
    let version = unsafe { libc::ioctl(file.as_raw_fd(), KVM_GET_API_VERSION, 0) };
    if version == KVM_API_VERSION {
        Ok(file)
    } else {
        Err(KvmError::Broken(io::Error::other(format!(
            "API version {version} instead of {KVM_API_VERSION}"
        ))))
    }
}

/// Returns the mode of KVM according to the processor's flags.
pub fn kind() -> KvmKind {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has = |flag: &str| {
        flags
            .lines()
            .find(|l| l.starts_with("flags"))
            .is_some_and(|l| l.split_whitespace().any(|f| f == flag))
    };
    if has("vmx") || has("svm") {
        KvmKind::Hardware
    } else {
        KvmKind::Software
    }
}
