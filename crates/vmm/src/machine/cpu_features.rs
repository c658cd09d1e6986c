//! Processor features in text form. A guest that was started with a feature must not be restored
//! without it.
//!
//! A guest either sees all features of the host's processor, or only the features of a *processor
//! level* such as x86-64-v3 (`cpu_level.rs`), which different hosts can offer.
//!
//! The text consists of feature words in hexadecimal: the words of the processor, `/`, and the
//! words that KVM offers. Both matter: without hardware virtualization, programs in the guest see
//! the processor's features despite the CPUID of KVM. For a guest with a processor level, the text
//! is the level, `:`, and the words that KVM offers, reduced to the level.

use super::cpu_level::feature_name;
use crate::error::VmmError;
use jiffy_proto::cpu_level::CpuLevel;
use kvm_bindings::CpuId;
use std::arch::x86_64::__cpuid_count;
use std::fmt::Write;

/// OSXSAVE: bit of leaf 1 ECX that depends on settings of the operating system, not on the
/// processor.
const OSXSAVE: u32 = 1 << 27;
/// Leaves and subleaves that contain features, and which of the registers eax, ebx, ecx, edx
/// contain them (Intel SDM volume 2A, CPUID).
const FEATURE_LEAVES: [(u32, u32, [bool; 4]); 7] = [
    (1, 0, [true, false, true, true]),
    (7, 0, [false, true, true, true]),
    (7, 1, [true, false, false, false]),
    (0xd, 0, [true, false, false, true]),
    (0xd, 1, [true, false, false, false]),
    (0x8000_0001, 0, [false, false, true, true]),
    (0x8000_0008, 0, [false, true, false, false]),
];
/// Number of feature words.
const WORDS: usize = 13;
/// Maximum number of features named in an error.
const MAX_NAMED: usize = 8;

/// Location of a feature word: leaf, subleaf, register.
type WordPlace = (u32, u32, usize);

/// Returns the leaf, subleaf and register of each word, in the order of the words.
fn places() -> impl Iterator<Item = WordPlace> {
    FEATURE_LEAVES
        .into_iter()
        .flat_map(|(leaf, subleaf, present)| {
            let registers = (0..4).zip(present).filter(|(_, present)| *present);
            registers.map(move |(register, _)| (leaf, subleaf, register))
        })
}

/// Returns the feature words of a processor. `read` returns the registers of a leaf and subleaf.
fn words(read: impl Fn(u32, u32) -> [u32; 4]) -> Vec<u32> {
    let word = |(leaf, subleaf, register): WordPlace| {
        let volatile = match (leaf, register) {
            (1, 2) => OSXSAVE,
            _ => 0,
        };
        read(leaf, subleaf)[register] & !volatile
    };
    places().map(word).collect()
}

/// Returns the words of the features that KVM supports.
fn kvm_words(supported: &CpuId) -> Vec<u32> {
    words(|leaf, subleaf| {
        // Compare both leaf and subleaf. KVM sets `index` to 0 for leaves without subleaves.
        let mut entries = supported.as_slice().iter();
        let entry = entries.find(|e| e.function == leaf && e.index == subleaf);
        entry.map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
    })
}

fn hexadecimal(words: &[u32]) -> String {
    words.iter().fold(String::new(), |mut text, word| {
        // Ignore the result: writing to a string cannot fail.
        let _ = write!(text, "{word:08x}");
        text
    })
}

/// Returns the text form of the features of a guest with `level`. `supported` is the CPUID that KVM
/// offers, reduced to the level ([`mask`](super::cpu_level::mask)).
pub fn name_of(supported: &CpuId, level: CpuLevel) -> String {
    let kvm = hexadecimal(&kvm_words(supported));
    if !level.is_host() {
        return format!("{level}:{kvm}");
    }
    let processor = words(|leaf, subleaf| {
        let r = __cpuid_count(leaf, subleaf);
        [r.eax, r.ebx, r.ecx, r.edx]
    });
    format!("{}/{kvm}", hexadecimal(&processor))
}

/// Checks that a guest with the features `saved` can run on this host, whose KVM offers
/// `supported`. The error names missing features.
pub fn check(saved: &str, supported: &CpuId) -> Result<(), VmmError> {
    // A guest that sees the host's processor requires equal text, which is the common case.
    let this_host = name_of(supported, CpuLevel::Host);
    if saved == this_host {
        return Ok(());
    }
    let rejected = |reason: String| {
        Err(VmmError::Config(format!(
            "the snapshot was taken on a host whose processor offers other features ({reason}): \
             restore it on a host of the same kind, or build the template again on this host. A \
             snapshot without memory (`--disk-only`) boots on every host"
        )))
    };
    // A guest with a level requires only the features in its own CPUID.
    if let Some((level, needed)) = saved.split_once(':') {
        let Some(needed) = parse(needed) else {
            return rejected("they cannot be read".to_owned());
        };
        let missing = missing(&needed, &kvm_words(supported));
        return if missing.is_empty() {
            Ok(())
        } else {
            rejected(format!("level {level}; missing here: {missing}"))
        };
    }
    let both = |name: &str| {
        let (processor, kvm) = name.split_once('/')?;
        Some((parse(processor)?, parse(kvm)?))
    };
    let (Some(saved), Some(this_host)) = (both(saved), both(&this_host)) else {
        return rejected("they cannot be read".to_owned());
    };
    // The text differs, and the guest sees the host's processor: find the difference for the error.
    let missing_in = |one: &(Vec<u32>, Vec<u32>), other: &(Vec<u32>, Vec<u32>)| {
        let by_processor = missing(&one.0, &other.0);
        if by_processor.is_empty() {
            missing(&one.1, &other.1)
        } else {
            by_processor
        }
    };
    let (missing, more) = (
        missing_in(&saved, &this_host),
        missing_in(&this_host, &saved),
    );
    rejected(match (missing.is_empty(), more.is_empty()) {
        (false, _) => format!("missing here: {missing}"),
        (true, false) => format!("more here: {more}"),
        (true, true) => "another model".to_owned(),
    })
}

/// Parses words of eight hexadecimal digits each.
fn parse(text: &str) -> Option<Vec<u32>> {
    let digits: Vec<&str> = (0..text.len())
        .step_by(8)
        .map(|at| text.get(at..at + 8))
        .collect::<Option<_>>()?;
    let words: Vec<u32> = digits
        .iter()
        .map(|word| u32::from_str_radix(word, 16).ok())
        .collect::<Option<_>>()?;
    (words.len() == WORDS).then_some(words)
}

/// Returns the names of the features in `needed` that `this_host` lacks. Leaf 1 eax is ignored: it
/// contains the processor's family and model.
fn missing(needed: &[u32], this_host: &[u32]) -> String {
    let mut names = Vec::new();
    for ((leaf, subleaf, register), (needed, this_host)) in
        places().zip(needed.iter().zip(this_host))
    {
        // Family, model and stepping.
        if (leaf, register) == (1, 0) {
            continue;
        }
        let absent = needed & !this_host;
        let bits = (0..32).filter(|bit| absent >> bit & 1 == 1);
        names.extend(bits.map(|bit| feature_name(leaf, subleaf, register, bit)));
    }
    let more = names.len().saturating_sub(MAX_NAMED);
    names.truncate(MAX_NAMED);
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_bindings::kvm_cpuid_entry2;

    fn host(ecx: u32, ebx: u32) -> CpuId {
        let leaf = |function| kvm_cpuid_entry2 {
            function,
            ..Default::default()
        };
        let (mut one, mut seven) = (leaf(1), leaf(7));
        (one.ecx, seven.ebx) = (ecx, ebx);
        CpuId::from_entries(&[one, seven]).unwrap()
    }

    #[test]
    fn the_same_processor_has_the_same_name_each_time() {
        let none = CpuId::from_entries(&[]).unwrap();
        assert_eq!(
            name_of(&none, CpuLevel::Host),
            name_of(&none, CpuLevel::Host)
        );
        assert_eq!(name_of(&none, CpuLevel::Host).len(), 2 * WORDS * 8 + 1);
        assert_eq!(places().count(), WORDS);
    }

    #[test]
    fn a_guest_with_a_level_runs_on_hosts_with_all_its_features() {
        let level = CpuLevel::X86_64V3;
        let saved = name_of(&host(1 << 28, 1 << 5), level);
        assert!(saved.starts_with("x86-64-v3:"));
        check(&saved, &host(1 << 28, 1 << 5)).unwrap();
        // A host with more features, or with another model.
        check(&saved, &host(1 << 28 | 1 << 25, 1 << 5 | 1 << 16)).unwrap();
        let rejected = check(&saved, &host(1 << 28, 0)).unwrap_err().to_string();
        assert!(
            rejected.contains("x86-64-v3") && rejected.contains("missing here: avx2"),
            "{rejected}"
        );
        let rejected = check("x86-64-v3:00", &host(0, 0)).unwrap_err();
        assert!(
            rejected.to_string().contains("cannot be read"),
            "{rejected}"
        );
    }

    #[test]
    fn a_guest_with_all_host_features_runs_only_on_equal_hosts() {
        let this_host = host(1 << 28, 1 << 5);
        let saved = name_of(&this_host, CpuLevel::Host);
        check(&saved, &this_host).unwrap();
        let rejected = check(&saved, &host(0, 1 << 5)).unwrap_err().to_string();
        assert!(rejected.contains("missing here: avx"), "{rejected}");
        let rejected = check(&saved, &host(1 << 28 | 1 << 25, 1 << 5));
        let rejected = rejected.unwrap_err().to_string();
        assert!(rejected.contains("more here: aes"), "{rejected}");
    }
}
