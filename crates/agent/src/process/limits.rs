//! Resource limits (`setrlimit`) that a client sets for one process: an extension of `Start`.

use serde::{Deserialize, Serialize};

/// Resource limits, each both hard and soft. Absent limits are inherited (see
/// [`crate::sys::raise_open_files`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct ProcessLimits {
    /// Number of open files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nofile: Option<u64>,
    /// Number of processes of the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nproc: Option<u64>,
    /// CPU time in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_s: Option<u64>,
    /// Address space in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_bytes: Option<u64>,
    /// Size of core files in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core: Option<u64>,
}

impl ProcessLimits {
    /// Returns the limits as pairs for `prlimit`.
    pub fn pairs(&self) -> Vec<(u32, libc::rlimit)> {
        [
            (libc::RLIMIT_NOFILE, self.nofile),
            (libc::RLIMIT_NPROC, self.nproc),
            (libc::RLIMIT_CPU, self.cpu_s),
            (libc::RLIMIT_AS, self.as_bytes),
            (libc::RLIMIT_CORE, self.core),
        ]
        .into_iter()
        .filter_map(|(resource, value)| {
            let value = value?;
            let limit = libc::rlimit {
                rlim_cur: value,
                rlim_max: value,
            };
            Some((resource, limit))
        })
        .collect()
    }
}
