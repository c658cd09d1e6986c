//! Processor levels. A level is a set of CPU features that guests see. With a level other than
//! [`CpuLevel::Host`], guests see the same features on all hosts, so snapshots can move between
//! different processors.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Processor level of guests (x86-64 psABI).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CpuLevel {
    /// All features of this host.
    #[default]
    #[serde(rename = "host")]
    Host,
    /// Baseline with SSE 4.2 and POPCNT.
    #[serde(rename = "x86-64-v2")]
    X86_64V2,
    /// Also AVX2, BMI and FMA.
    #[serde(rename = "x86-64-v3")]
    X86_64V3,
    /// Also AVX-512.
    #[serde(rename = "x86-64-v4")]
    X86_64V4,
}

/// Levels with their names on command lines.
const LEVELS: [(CpuLevel, &str); 4] = [
    (CpuLevel::Host, "host"),
    (CpuLevel::X86_64V2, "x86-64-v2"),
    (CpuLevel::X86_64V3, "x86-64-v3"),
    (CpuLevel::X86_64V4, "x86-64-v4"),
];

impl CpuLevel {
    /// Returns whether guests see all features of the host.
    pub fn is_host(&self) -> bool {
        *self == Self::Host
    }

    /// Returns the name for command lines and configurations.
    pub fn name(self) -> &'static str {
        let mut levels = LEVELS.into_iter();
        let found = levels.find(|(level, _)| *level == self);
        found.map_or("host", |(_, name)| name)
    }
}

impl fmt::Display for CpuLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CpuLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The prefix `x86-64-` is optional.
        let is_named = |name: &str| name == text || name.strip_prefix("x86-64-") == Some(text);
        let found = LEVELS.into_iter().find(|(_, name)| is_named(name));
        found.map(|(level, _)| level).ok_or_else(|| {
            format!(
                "`{text}` is not a processor level: use host, x86-64-v2, x86-64-v3 or x86-64-v4"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_as_they_are_written() {
        for (level, name) in LEVELS {
            assert_eq!(name.parse(), Ok(level));
            assert_eq!(level.to_string(), name);
        }
        assert_eq!("v3".parse(), Ok(CpuLevel::X86_64V3));
        assert!("v1".parse::<CpuLevel>().is_err());
    }
}
