//! Processor features as a name: a guest that was started with a feature must not be restored
//! without it.

use kvm_bindings::CpuId;
use std::arch::x86_64::__cpuid_count;
use std::fmt::Write;

/// Bits of leaf 1 ECX that depend on the operating system's settings, not on the processor:
/// OSXSAVE.
const OSXSAVE: u32 = 1 << 27;
/// Leaves and subleaves that hold features, and the registers of eax, ebx, ecx, edx that do (Intel
/// SDM volume 2A, CPUID).
const FEATURE_LEAVES: [(u32, u32, [bool; 4]); 7] = [
    (1, 0, [true, false, true, true]),
    (7, 0, [false, true, true, true]),
    (7, 1, [true, false, false, false]),
    (0xd, 0, [true, false, false, true]),
    (0xd, 1, [true, false, false, false]),
    (0x8000_0001, 0, [false, false, true, true]),
    (0x8000_0008, 0, [false, true, false, false]),
];

/// Feature words in hexadecimal: first the processor's, then those that KVM offers. Both count,
/// because a guest without hardware virtualization sees the processor's.
pub fn name_of(supported: &CpuId) -> String {
    let mut name = String::new();
    for kvm in [false, true] {
        for (leaf, subleaf, wanted) in FEATURE_LEAVES {
            let words = if kvm {
                let entry = supported
                    .as_slice()
                    .iter()
                    .find(|e| e.function == leaf && e.index == subleaf);
                entry.map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
            } else {
                let r = __cpuid_count(leaf, subleaf);
                [r.eax, r.ebx, r.ecx, r.edx]
            };
            for (register, (word, wanted)) in words.into_iter().zip(wanted).enumerate() {
                let volatile = if leaf == 1 && register == 2 {
                    OSXSAVE
                } else {
                    0
                };
                if wanted {
                    // Writing to a string does not fail.
                    let _ = write!(name, "{:08x}", word & !volatile);
                }
            }
        }
        name.push(if kvm { ' ' } else { '/' });
    }
    name.pop();
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_processor_has_the_same_name_each_time() {
        let none = CpuId::from_entries(&[]).unwrap();
        assert_eq!(name_of(&none), name_of(&none));
        assert_eq!(name_of(&none).len(), 2 * 13 * 8 + 1);
    }
}
