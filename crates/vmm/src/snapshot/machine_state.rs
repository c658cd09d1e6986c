//! [`MachineState`]: state of a machine's vCPUs and devices, and the file in which a snapshot
//! stores it.
//!
//! The file consists of a magic number, a format version, and named sections in postcard encoding.
//! Each section has a version of its own.

use crate::error::VmmError;
use crate::machine::ioapic::IoApicState;
use crate::machine::legacy_ports::SerialPortState;
use crate::machine::vcpu::VcpuState;
use crate::virtio::mmio::TransportState;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// First bytes of a state file.
const STATE_MAGIC: [u8; 8] = *b"JIFFYVMS";
/// Version of the file format without the sections.
pub const STATE_FORMAT: u32 = 1;
/// Maximum size of a state file, in bytes.
pub const MAX_STATE_BYTES: u64 = 16 << 20;

/// Size and processor features of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineShape {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Size of memory, in MiB.
    pub memory_mib: u32,
    /// Processor features. The state can only be restored on a host with compatible features.
    pub cpu: String,
}

/// KVM's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockState {
    /// Time in the guest, in nanoseconds.
    pub ns: u64,
}

/// State of a paused machine, without its memory and disks.
#[derive(Debug)]
pub struct MachineState {
    /// Size and processor features.
    pub shape: MachineShape,
    /// vCPUs in order of their ids.
    pub vcpus: Vec<VcpuState>,
    /// KVM's clock.
    pub clock: ClockState,
    /// Interrupt pins.
    pub ioapic: IoApicState,
    /// Console port.
    pub serial: SerialPortState,
    /// Devices in guest order.
    pub devices: Vec<TransportState>,
}

crate::frozen_layout!(MachineShape, 32);
crate::frozen_layout!(ClockState, 8);

/// Section of the file. Only a program that supports its version can decode the body.
#[derive(Serialize, Deserialize)]
struct StateSection {
    name: String,
    version: u16,
    body: Vec<u8>,
}

/// Type that is stored in a section.
trait SectionState: Serialize + DeserializeOwned {
    const NAME: &'static str;
    const VERSION: u16;
}

macro_rules! section_state {
    ($type:ty, $name:literal, $version:literal) => {
        impl SectionState for $type {
            const NAME: &'static str = $name;
            const VERSION: u16 = $version;
        }
    };
}

section_state!(MachineShape, "machine", 1);
section_state!(VcpuState, "vcpu", 1);
section_state!(ClockState, "clock", 1);
section_state!(IoApicState, "ioapic", 1);
section_state!(SerialPortState, "serial", 1);
section_state!(TransportState, "device", 1);

/// Returns the error of an invalid file.
fn damaged(what: impl std::fmt::Display) -> VmmError {
    VmmError::Config(format!("snapshot state is damaged: {what}"))
}

/// Encodes a value as a section.
fn section<T: SectionState>(value: &T) -> Result<StateSection, VmmError> {
    Ok(StateSection {
        name: T::NAME.to_owned(),
        version: T::VERSION,
        body: postcard::to_stdvec(value).map_err(|e| VmmError::host("encoding state", e))?,
    })
}

/// Decodes all sections of one kind.
fn decode_all<T: SectionState>(sections: &[StateSection]) -> Result<Vec<T>, VmmError> {
    sections
        .iter()
        .filter(|section| section.name == T::NAME)
        .map(|section| {
            if section.version != T::VERSION {
                return Err(VmmError::Config(format!(
                    "the snapshot was taken by another version of jiffy-vmm ({} state of version {}, this \
                     program supports {}): restore it with that version, or build the template again",
                    T::NAME, section.version, T::VERSION
                )));
            }
            postcard::from_bytes(&section.body).map_err(|e| damaged(format!("{}: {e}", T::NAME)))
        })
        .collect()
}

/// Decodes the section of a type that occurs exactly once in a snapshot.
fn decode_one<T: SectionState>(sections: &[StateSection]) -> Result<T, VmmError> {
    let mut found = decode_all(sections)?.into_iter();
    match (found.next(), found.next()) {
        (Some(value), None) => Ok(value),
        _ => Err(damaged(format!(
            "it must contain exactly one {:?} section",
            T::NAME
        ))),
    }
}

impl MachineState {
    /// Encodes the state for a file.
    pub fn encode(&self) -> Result<Vec<u8>, VmmError> {
        let mut sections = vec![section(&self.shape)?];
        // The order of sections with the same name is the order of vCPUs and devices.
        for vcpu in &self.vcpus {
            sections.push(section(vcpu)?);
        }
        sections.push(section(&self.clock)?);
        sections.push(section(&self.ioapic)?);
        sections.push(section(&self.serial)?);
        for device in &self.devices {
            sections.push(section(device)?);
        }
        let mut bytes = STATE_MAGIC.to_vec();
        bytes.extend(STATE_FORMAT.to_le_bytes());
        bytes.extend(
            postcard::to_stdvec(&sections).map_err(|e| VmmError::host("encoding state", e))?,
        );
        Ok(bytes)
    }

    /// Decodes the output of [`Self::encode`].
    pub fn decode(bytes: &[u8]) -> Result<Self, VmmError> {
        let (magic, rest) = bytes
            .split_first_chunk()
            .ok_or_else(|| damaged("it is too short"))?;
        if *magic != STATE_MAGIC {
            return Err(damaged("it is not a state file"));
        }
        let (format, rest) = rest
            .split_first_chunk()
            .ok_or_else(|| damaged("it is too short"))?;
        let format = u32::from_le_bytes(*format);
        if format != STATE_FORMAT {
            return Err(VmmError::Config(format!(
                "the snapshot has format {format}, but this jiffy-vmm supports format \
                 {STATE_FORMAT}: restore it with the version of Jiffy that created it, or build the template again"
            )));
        }
        let sections: Vec<StateSection> = postcard::from_bytes(rest).map_err(damaged)?;
        let known_sections = [
            MachineShape::NAME,
            VcpuState::NAME,
            ClockState::NAME,
            IoApicState::NAME,
            SerialPortState::NAME,
            TransportState::NAME,
        ];
        // A section that is ignored would silently lose state of the guest.
        if let Some(unknown) = sections
            .iter()
            .find(|s| !known_sections.contains(&&*s.name))
        {
            return Err(VmmError::Config(format!(
                "the snapshot contains {:?} state, which this jiffy-vmm does not support: \
                 restore it with the version that created it",
                unknown.name
            )));
        }
        let state = Self {
            shape: decode_one(&sections)?,
            vcpus: decode_all(&sections)?,
            clock: decode_one(&sections)?,
            ioapic: decode_one(&sections)?,
            serial: decode_one(&sections)?,
            devices: decode_all(&sections)?,
        };
        // The number of devices is checked when they are restored.
        if state.vcpus.len() != usize::from(state.shape.vcpus) {
            return Err(damaged("the number of vCPUs is wrong"));
        }
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// State of a real guest with two vCPUs, in format 1.
    const GOLDEN_STATE: &[u8] = include_bytes!("../../tests/data/state-format1.bin");

    #[test]
    fn the_golden_state_loads_and_encodes_to_the_same_bytes() {
        let state = MachineState::decode(GOLDEN_STATE).unwrap();
        assert_eq!(state.vcpus.len(), 2);
        let names: Vec<&str> = state.devices.iter().map(TransportState::name).collect();
        assert_eq!(names, ["blk0", "vsock", "rng", "balloon"]);
        assert_eq!(state.encode().unwrap(), GOLDEN_STATE);
    }

    #[test]
    fn a_damaged_state_never_causes_a_panic() {
        for length in (0..GOLDEN_STATE.len()).step_by(61) {
            assert!(MachineState::decode(&GOLDEN_STATE[..length]).is_err());
        }
        for at in (0..GOLDEN_STATE.len()).step_by(7) {
            let mut bad = GOLDEN_STATE.to_vec();
            bad[at] ^= 0xff;
            // Registers may contain any value: decoding must not panic or exhaust memory.
            let _ = MachineState::decode(&bad);
        }
    }
}
