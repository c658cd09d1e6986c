//! Properties of a host that must be equal, or sufficient, on all hosts of a fleet. They are
//! compared when a host joins.

use jiffy_fleet_core::MESSAGE_FORMAT;
use serde::{Deserialize, Serialize};

/// Maximum length of a property.
const MAX_TEXT_BYTES: usize = 256;

/// Properties of a host that joins, or of the member that admits it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Version of Jiffy.
    pub version: String,
    /// Latest format of messages and records.
    pub format: u32,
    /// Highest processor level: 2 to 4 for x86-64-v2 to v4, 0 if unknown.
    pub cpu_level: u8,
    /// Start of the digest of the guest kernel. `None` if the host has no guest kernel.
    pub kernel: Option<String>,
    /// Start of the digest of the gVisor program. `None` if the host does not run gVisor.
    pub gvisor: Option<String>,
}

impl HostFacts {
    /// Returns the properties of this build and processor without engines.
    #[must_use]
    pub fn new(version: &str) -> Self {
        Self {
            version: version.to_owned(),
            format: MESSAGE_FORMAT,
            cpu_level: processor_level(),
            kernel: None,
            gvisor: None,
        }
    }

    /// Checks the format of messages.
    ///
    /// # Errors
    /// The reason why the host cannot join.
    pub fn check_format(&self, member: &Self) -> Result<(), String> {
        if self.format != member.format {
            let (older, newer) = if self.format < member.format {
                ("the host", "the fleet")
            } else {
                ("the fleet", "the host")
            };
            return Err(format!(
                "the versions differ in their formats: the host has {} (format {}), the fleet {} \
                 (format {}); upgrade {older} to the version of {newer}",
                self.version, self.format, member.version, member.format
            ));
        }
        Ok(())
    }

    /// Checks whether a host with these properties can be a member of a fleet with processor level
    /// `cpu_level`. `member` is a host of the fleet. Returns the reason why it cannot.
    ///
    /// # Errors
    /// The reason with both values.
    pub fn check(&self, cpu_level: u8, member: &Self) -> Result<(), String> {
        let texts = [
            Some(&self.version),
            self.kernel.as_ref(),
            self.gvisor.as_ref(),
        ];
        if texts
            .into_iter()
            .flatten()
            .any(|text| text.len() > MAX_TEXT_BYTES)
        {
            return Err("a property of the host is too long".to_owned());
        }
        self.check_format(member)?;
        if self.cpu_level < cpu_level {
            return Err(format!(
                "the processor of the host has {}, but the fleet requires {}: use another \
                 processor, or create the fleet with a lower --cpu-level",
                level_name(self.cpu_level),
                level_name(cpu_level)
            ));
        }
        different("guest kernel", &self.kernel, &member.kernel)?;
        different("gVisor", &self.gvisor, &member.gvisor)
    }
}

/// Fails if both hosts have a program in different versions: a snapshot that one of them made could
/// not be restored by the other.
fn different(what: &str, ours: &Option<String>, theirs: &Option<String>) -> Result<(), String> {
    match (ours, theirs) {
        (Some(ours), Some(theirs)) if ours != theirs => Err(format!(
            "the host has {what} {ours}, but the fleet has {theirs}: sandboxes could not move \
             between them; install the same version of Jiffy on all hosts"
        )),
        _ => Ok(()),
    }
}

/// Returns the name of a processor level.
#[must_use]
pub fn level_name(level: u8) -> String {
    match level {
        0 => "no known level".to_owned(),
        level => format!("x86-64-v{level}"),
    }
}

/// Returns the processor level of this host (x86-64 psABI).
#[cfg(target_arch = "x86_64")]
fn processor_level() -> u8 {
    use std::arch::is_x86_feature_detected as has;
    let v2 = has!("sse4.2") && has!("popcnt") && has!("cmpxchg16b");
    let v3 = has!("avx2") && has!("bmi1") && has!("bmi2") && has!("fma") && has!("lzcnt");
    let v4 = has!("avx512f") && has!("avx512bw") && has!("avx512cd") && has!("avx512dq");
    match (v2, v3, v4 && has!("avx512vl")) {
        (true, true, true) => 4,
        (true, true, false) => 3,
        (true, false, _) => 2,
        (false, ..) => 0,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn processor_level() -> u8 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_cannot_exchange_sandboxes_are_rejected_with_both_values() {
        let member = HostFacts {
            version: "0.1.0".to_owned(),
            format: 1,
            cpu_level: 3,
            kernel: Some("k1".to_owned()),
            gvisor: Some("g1".to_owned()),
        };
        assert_eq!(member.check(3, &member), Ok(()));
        let change = |change: fn(&mut HostFacts)| {
            let mut host = member.clone();
            change(&mut host);
            host.check(3, &member)
        };
        // A host without an engine, or with a better processor, can join.
        assert_eq!(change(|host| host.kernel = None), Ok(()));
        assert_eq!(change(|host| host.cpu_level = 4), Ok(()));
        for (result, reason) in [
            (
                change(|host| host.cpu_level = 2),
                "x86-64-v2, but the fleet requires x86-64-v3",
            ),
            (
                change(|host| host.kernel = Some("k2".to_owned())),
                "k2, but the fleet has k1",
            ),
            (
                change(|host| host.gvisor = Some("g2".to_owned())),
                "g2, but the fleet has g1",
            ),
            (change(|host| host.format = 2), "upgrade the fleet"),
            (change(|host| host.format = 0), "upgrade the host"),
            (change(|host| host.version = "x".repeat(300)), "too long"),
        ] {
            let error = result.unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
