//! Checks whether this host supports a processor level: a standard set of processor features, to
//! which guests can be limited, so that their snapshots can be restored on other hosts.

use jiffy_proto::cpu_level::CpuLevel;
use std::arch::is_x86_feature_detected as has;
use std::arch::x86_64::__cpuid;

/// CPUID flag of VT-x (leaf 1, ecx).
const VMX: u32 = 1 << 5;
/// CPUID flag of AMD-V (leaf 0x8000_0001, ecx).
const SVM: u32 = 1 << 2;

/// Checks that guests on this host can be limited to `level`. Returns the reason if not.
pub fn check(level: CpuLevel) -> Result<(), String> {
    // Guests with the host's own level see all features.
    if level.is_host() {
        return Ok(());
    }
    check_features(level)
        .map_err(|missing| format!("processor level {level}: this host has no {missing}"))?;
    // Without hardware virtualization the VMM cannot hide features from programs of the guest.
    if __cpuid(1).ecx & VMX != 0 || __cpuid(0x8000_0001).ecx & SVM != 0 {
        Ok(())
    } else {
        Err(format!(
            "cannot limit guests to processor level {level}: this host has neither VT-x nor AMD-V, \
             so their programs can use all features of its processor; omit --cpu-level"
        ))
    }
}

/// Checks that the processor of this host has all features of `level`. Returns the names of the
/// missing features if not.
pub fn check_features(level: CpuLevel) -> Result<(), String> {
    let v2 = [
        ("sse3", has!("sse3")),
        ("ssse3", has!("ssse3")),
        ("cx16", has!("cmpxchg16b")),
        ("sse4_1", has!("sse4.1")),
        ("sse4_2", has!("sse4.2")),
        ("popcnt", has!("popcnt")),
    ];
    let v3 = [
        ("fma", has!("fma")),
        ("movbe", has!("movbe")),
        ("xsave", has!("xsave")),
        ("avx", has!("avx")),
        ("f16c", has!("f16c")),
        ("bmi1", has!("bmi1")),
        ("avx2", has!("avx2")),
        ("bmi2", has!("bmi2")),
        ("abm", has!("lzcnt")),
    ];
    let v4 = [
        ("avx512f", has!("avx512f")),
        ("avx512dq", has!("avx512dq")),
        ("avx512cd", has!("avx512cd")),
        ("avx512bw", has!("avx512bw")),
        ("avx512vl", has!("avx512vl")),
    ];
    let needed: Vec<(&str, bool)> = match level {
        CpuLevel::Host => Vec::new(),
        CpuLevel::X86_64V2 => v2.into(),
        CpuLevel::X86_64V3 => v2.into_iter().chain(v3).collect(),
        CpuLevel::X86_64V4 => v2.into_iter().chain(v3).chain(v4).collect(),
    };
    let missing = needed.into_iter().filter(|(_, has)| !has);
    let missing: Vec<&str> = missing.map(|(name, _)| name).collect();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(missing.join(", "))
    }
}
