//! Processor levels: the CPUID of guests is reduced to features that all hosts of a level have.
//!
//! In addition to a level's own features, guests retain the features that their kernel needs:
//! protection (SMEP, SMAP, NX), mitigations, and virtualization.

use crate::error::VmmError;
use jiffy_proto::cpu_level::CpuLevel;
use kvm_bindings::{CpuId, kvm_cpuid_entry2};

/// Index of a register in a leaf: eax, ebx, ecx, edx.
const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;
/// Leaf with AMD's extended features.
const EXTENDED: u32 = 0x8000_0001;

/// Feature of a level: name, leaf, register, bit (Intel SDM volume 2A, CPUID).
type Feature = (&'static str, u32, usize, u32);

/// Features that level x86-64-v2 adds to the first processors of 64 bits.
const V2: [Feature; 7] = [
    ("sse3", 1, ECX, 0),
    ("ssse3", 1, ECX, 9),
    ("cx16", 1, ECX, 13),
    ("sse4_1", 1, ECX, 19),
    ("sse4_2", 1, ECX, 20),
    ("popcnt", 1, ECX, 23),
    ("lahf_lm", EXTENDED, ECX, 0),
];
/// Features that level x86-64-v3 adds to x86-64-v2.
const V3: [Feature; 9] = [
    ("fma", 1, ECX, 12),
    ("movbe", 1, ECX, 22),
    ("xsave", 1, ECX, 26),
    ("avx", 1, ECX, 28),
    ("f16c", 1, ECX, 29),
    ("bmi1", 7, EBX, 3),
    ("avx2", 7, EBX, 5),
    ("bmi2", 7, EBX, 8),
    ("abm", EXTENDED, ECX, 5),
];
/// Features that level x86-64-v4 adds to x86-64-v3.
const V4: [Feature; 5] = [
    ("avx512f", 7, EBX, 16),
    ("avx512dq", 7, EBX, 17),
    ("avx512cd", 7, EBX, 28),
    ("avx512bw", 7, EBX, 30),
    ("avx512vl", 7, EBX, 31),
];
/// Features that belong to no level. Only errors use these names.
const OTHERS: [Feature; 8] = [
    ("pclmulqdq", 1, ECX, 1),
    ("aes", 1, ECX, 25),
    ("rdrand", 1, ECX, 30),
    ("fsgsbase", 7, EBX, 0),
    ("smep", 7, EBX, 7),
    ("smap", 7, EBX, 20),
    ("sha_ni", 7, EBX, 29),
    ("pku", 7, ECX, 3),
];
/// Bits that are retained at every level: leaf, register, mask.
const RETAINED: [(u32, usize, u32); 9] = [
    (1, EAX, u32::MAX),
    (1, EBX, u32::MAX),
    // x2APIC, TSC deadline, hypervisor.
    (1, ECX, 1 << 21 | 1 << 24 | 1 << 31),
    (1, EDX, u32::MAX),
    // SMEP, SMAP.
    (7, EBX, 1 << 7 | 1 << 20),
    // MD_CLEAR, IBRS and IBPB, STIBP, L1D_FLUSH, ARCH_CAPABILITIES, SSBD.
    (7, EDX, 1 << 10 | 0xf << 26 | 1 << 31),
    (EXTENDED, EAX, u32::MAX),
    // All except AMD's extensions to MMX and FXSR, and 3DNow.
    (EXTENDED, EDX, !(1 << 22 | 1 << 25 | 1 << 30 | 1 << 31)),
    // IBPB, IBRS, STIBP, SSBD.
    (0x8000_0008, EBX, 1 << 12 | 1 << 14 | 1 << 15 | 1 << 24),
];
/// Leaves with features that belong to no level: processor trace, AMX, AVX10.
const HIDDEN: [u32; 4] = [0x14, 0x1d, 0x1e, 0x24];
/// Leaf that describes the register state saved by XSAVE.
const XSAVE: u32 = 0xd;
/// Size of the x87 and SSE state with the XSAVE header, in bytes.
const XSAVE_LEGACY_BYTES: u32 = 576;
/// Components of the XSAVE state: x87, SSE, AVX; and with AVX-512.
const AVX_STATE: u32 = 0x7;
const AVX512_STATE: u32 = 0xe7;

/// Returns the features of a level, including the features of lower levels.
fn features(level: CpuLevel) -> impl Iterator<Item = Feature> {
    let v3 = (level >= CpuLevel::X86_64V3).then_some(V3);
    let v4 = (level >= CpuLevel::X86_64V4).then_some(V4);
    let more = v3.into_iter().flatten().chain(v4.into_iter().flatten());
    V2.into_iter().chain(more)
}

/// Returns the name of a feature, or of its bit if the feature belongs to no level.
pub(super) fn feature_name(leaf: u32, subleaf: u32, register: usize, bit: u32) -> String {
    let known = V2.into_iter().chain(V3).chain(V4).chain(OTHERS);
    let mut named =
        known.filter(|(_, of, at, number)| (*of, *at, *number) == (leaf, register, bit));
    match named.next().filter(|_| subleaf == 0) {
        Some((name, ..)) => name.to_owned(),
        None => {
            let register = ["eax", "ebx", "ecx", "edx"].get(register).unwrap_or(&"");
            format!("{register} bit {bit} of leaf {leaf:#x}.{subleaf}")
        }
    }
}

fn registers(entry: &mut kvm_cpuid_entry2) -> [&mut u32; 4] {
    [
        &mut entry.eax,
        &mut entry.ebx,
        &mut entry.ecx,
        &mut entry.edx,
    ]
}

/// Returns the CPUID of guests with `level` on a host that supports `supported`. If the host lacks
/// features, the error names them.
pub fn mask(supported: &CpuId, level: CpuLevel) -> Result<CpuId, VmmError> {
    let mut table = supported.clone();
    if level.is_host() {
        return Ok(table);
    }
    let missing = missing(supported, level);
    if !missing.is_empty() {
        return Err(VmmError::Config(format!(
            "this host is below processor level {level}: its processor has no {}",
            missing.join(", ")
        )));
    }
    let largest = xsave_bytes(supported, level);
    for entry in table.as_mut_slice() {
        match (entry.function, entry.index) {
            (1, _) | (7, 0) | (EXTENDED, _) | (0x8000_0008, _) => mask_features(entry, level),
            (XSAVE, index) => mask_xsave(entry, index, level, largest),
            // All other subleaves of leaf 7 contain features of newer processors.
            (7, _) => clear(entry),
            (leaf, _) if HIDDEN.contains(&leaf) => clear(entry),
            _ => {}
        }
    }
    Ok(table)
}

/// Returns the names of the features of `level` that the host lacks.
fn missing(supported: &CpuId, level: CpuLevel) -> Vec<&'static str> {
    let has = |(_, leaf, register, bit): &Feature| {
        let mut entries = supported.as_slice().iter();
        let entry = entries.find(|entry| entry.function == *leaf && entry.index == 0);
        entry.is_some_and(|entry| *registers(&mut entry.clone())[*register] >> bit & 1 == 1)
    };
    features(level)
        .filter(|feature| !has(feature))
        .map(|(name, ..)| name)
        .collect()
}

/// Clears the bits of features that do not belong to the level.
fn mask_features(entry: &mut kvm_cpuid_entry2, level: CpuLevel) {
    let leaf = entry.function;
    let mut allowed = [0; 4];
    for (_, register, mask) in RETAINED.into_iter().filter(|(of, ..)| *of == leaf) {
        // Features of the leaf that guests retain at every level.
        allowed[register] |= mask;
    }
    for (_, _, register, bit) in features(level).filter(|(_, of, ..)| *of == leaf) {
        allowed[register] |= 1 << bit;
    }
    if leaf == 0x8000_0008 {
        // Widths of addresses and numbers of cores.
        allowed[EAX] = u32::MAX;
        allowed[ECX] = u32::MAX;
    }
    for (register, allowed) in registers(entry).into_iter().zip(allowed) {
        *register &= allowed;
    }
}

/// Returns the components of the XSAVE state that a level permits. 0 if the level does not include
/// XSAVE.
fn states(level: CpuLevel) -> u32 {
    match level {
        CpuLevel::Host => u32::MAX,
        CpuLevel::X86_64V2 => 0,
        CpuLevel::X86_64V3 => AVX_STATE,
        CpuLevel::X86_64V4 => AVX512_STATE,
    }
}

/// Returns the maximum size of the XSAVE state, in bytes.
fn xsave_bytes(supported: &CpuId, level: CpuLevel) -> u32 {
    let parts = supported.as_slice().iter().filter(|entry| {
        // Components 0 and 1 (x87 and SSE) are in the legacy area.
        entry.function == XSAVE
            && (2..32).contains(&entry.index)
            && states(level) >> entry.index & 1 == 1
    });
    // Each component's EAX is its size, and its EBX is its offset.
    let ends = parts.map(|part| part.eax.saturating_add(part.ebx));
    ends.max().unwrap_or(XSAVE_LEGACY_BYTES)
}

/// Hides the parts of the register state (XSAVE, CPUID leaf 0xD) that the CPU level does not
/// include.
fn mask_xsave(entry: &mut kvm_cpuid_entry2, index: u32, level: CpuLevel, largest: u32) {
    let states = states(level);
    match index {
        // EAX and EDX are the mask of supported components. EBX and ECX are the sizes of the state
        // with the current and with all components.
        0 if states != 0 => {
            (entry.eax, entry.edx) = (entry.eax & states, 0);
            (entry.ebx, entry.ecx) = (largest, largest);
        }
        2..32 if states >> index & 1 == 1 => {}
        _ => clear(entry),
    }
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    for register in registers(entry) {
        *register = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a processor with all feature bits, and realistic XSAVE states.
    fn full() -> Vec<kvm_cpuid_entry2> {
        let leaf = |function, index| kvm_cpuid_entry2 {
            function,
            index,
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..Default::default()
        };
        let mut leaves: Vec<_> = [0, 1, 7, XSAVE, 0x14, EXTENDED, 0x8000_0008]
            .map(|function| leaf(function, 0))
            .into();
        leaves.extend([leaf(7, 1), leaf(XSAVE, 1)]);
        for (index, bytes, offset) in [(2, 256, 576), (5, 64, 1088), (6, 512, 1152), (9, 8, 2688)] {
            let mut state = leaf(XSAVE, index);
            (state.eax, state.ebx) = (bytes, offset);
            leaves.push(state);
        }
        leaves
    }

    fn table(entries: &[kvm_cpuid_entry2]) -> CpuId {
        CpuId::from_entries(entries).unwrap()
    }

    fn find(table: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        let mut entries = table.as_slice().iter();
        *entries
            .find(|entry| (entry.function, entry.index) == (function, index))
            .unwrap()
    }

    #[test]
    fn guests_of_a_level_see_its_features_and_no_later_ones() {
        let full = table(&full());
        assert_eq!(mask(&full, CpuLevel::Host).unwrap(), full);
        // `bytes` is the size of the XSAVE state.
        for (level, avx, avx512, bytes) in [
            (CpuLevel::X86_64V2, false, false, 0),
            (CpuLevel::X86_64V3, true, false, 832),
            (CpuLevel::X86_64V4, true, true, 1664),
        ] {
            let masked = mask(&full, level).unwrap();
            assert!(missing(&masked, level).is_empty());
            let (one, seven) = (find(&masked, 1, 0), find(&masked, 7, 0));
            // Bit 28 of leaf 1 is AVX, and bit 16 of leaf 7 is AVX-512F.
            assert_eq!(one.ecx >> 28 & 1 == 1, avx, "{level}");
            assert_eq!(seven.ebx >> 16 & 1 == 1, avx512, "{level}");
            assert_eq!(find(&masked, XSAVE, 0).ecx, bytes, "{level}");
            // AES (bit 25) and SHA (bit 29) belong to no level. SMEP (bit 7) is retained.
            assert_eq!((one.ecx >> 25 & 1, seven.ebx >> 29 & 1), (0, 0));
            assert_eq!(seven.ebx >> 7 & 1, 1);
            // Protection keys, and leaves of newer processors.
            assert_eq!(seven.ecx, 0);
            for (leaf, index) in [(7, 1), (XSAVE, 1), (XSAVE, 9), (0x14, 0)] {
                assert_eq!(find(&masked, leaf, index).eax, 0, "{leaf:x} {index}");
            }
            assert_eq!(find(&masked, 0, 0).ebx, u32::MAX);
        }
    }

    #[test]
    fn guests_of_a_level_see_the_same_cpuid_on_all_hosts() {
        let one = full();
        let mut other = full();
        for entry in &mut other {
            // Without AES, SHA, protection keys and processor trace.
            match (entry.function, entry.index) {
                (1, 0) => entry.ecx &= !(1 << 25),
                (7, 0) => (entry.ebx, entry.ecx) = (entry.ebx & !(1 << 29), 0),
                (0x14, 0) => clear(entry),
                _ => {}
            }
        }
        let level = CpuLevel::X86_64V3;
        let masked = [one, other].map(|host| mask(&table(&host), level).unwrap());
        assert_eq!(masked[0], masked[1]);
    }

    #[test]
    fn a_host_below_a_level_is_rejected_with_its_missing_features() {
        let mut leaves = full();
        for entry in leaves.iter_mut().filter(|entry| entry.function == 7) {
            entry.ebx &= !(1 << 5 | 1 << 16);
        }
        let host = table(&leaves);
        assert!(mask(&host, CpuLevel::X86_64V2).is_ok());
        let refused = mask(&host, CpuLevel::X86_64V4).unwrap_err().to_string();
        assert!(
            refused.contains("x86-64-v4") && refused.contains("no avx2, avx512f"),
            "{refused}"
        );
    }
}
