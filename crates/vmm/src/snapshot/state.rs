//! The file that holds the state of vCPUs and devices: magic, format version, then named sections that each have a version of
//! their own, in postcard's encoding.

use crate::error::VmmError;
use crate::machine::ioapic::IoApicState;
use crate::machine::legacy::SerialSaved;
use crate::machine::vcpu::VcpuState;
use crate::virtio::mmio::TransportState;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const MAGIC: [u8; 8] = *b"JIFFYVMS";
/// Version of the container.
pub const FORMAT: u32 = 1;
/// Largest state file that is read.
pub const MAX_STATE: u64 = 16 << 20;

/// What the machine is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// MiB of memory.
    pub memory_mib: u32,
    /// What the processor offers; restored only where it is the same.
    pub cpu: String,
}

/// KVM's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockState {
    /// Nanoseconds that the guest has seen pass.
    pub ns: u64,
}

/// A machine that stands still, without its memory and disks.
#[derive(Debug)]
pub struct MachineState {
    /// What it is made of.
    pub shape: Shape,
    /// In order of their ids.
    pub vcpus: Vec<VcpuState>,
    /// Time.
    pub clock: ClockState,
    /// Interrupt pins.
    pub ioapic: IoApicState,
    /// Console port.
    pub serial: SerialSaved,
    /// In guest order.
    pub devices: Vec<TransportState>,
}

crate::frozen_layout!(Shape, 32);
crate::frozen_layout!(ClockState, 8);

/// One part of the file. The body of a part is only understood by a program that knows its version.
#[derive(Serialize, Deserialize)]
struct Section {
    name: String,
    version: u16,
    body: Vec<u8>,
}

/// A type that is stored in a section.
trait Stored: Serialize + DeserializeOwned {
    const NAME: &'static str;
    const VERSION: u16;
}

macro_rules! stored {
    ($type:ty, $name:literal, $version:literal) => {
        impl Stored for $type {
            const NAME: &'static str = $name;
            const VERSION: u16 = $version;
        }
    };
}

stored!(Shape, "machine", 1);
stored!(VcpuState, "vcpu", 1);
stored!(ClockState, "clock", 1);
stored!(IoApicState, "ioapic", 1);
stored!(SerialSaved, "serial", 1);
stored!(TransportState, "device", 1);

fn damaged(what: impl std::fmt::Display) -> VmmError {
    VmmError::Config(format!("snapshot state is damaged: {what}"))
}

fn section<T: Stored>(value: &T) -> Result<Section, VmmError> {
    Ok(Section {
        name: T::NAME.to_owned(),
        version: T::VERSION,
        body: postcard::to_stdvec(value).map_err(|e| VmmError::host("encoding state", e))?,
    })
}

fn all<T: Stored>(sections: &[Section]) -> Result<Vec<T>, VmmError> {
    sections
        .iter()
        .filter(|section| section.name == T::NAME)
        .map(|section| {
            if section.version != T::VERSION {
                return Err(VmmError::Config(format!(
                    "the snapshot was taken by another version of jiffy-vmm ({} state of version {}, this program knows {}): \
                     restore it with that version, or build the template anew",
                    T::NAME, section.version, T::VERSION
                )));
            }
            postcard::from_bytes(&section.body).map_err(|e| damaged(format!("{}: {e}", T::NAME)))
        })
        .collect()
}

fn one<T: Stored>(sections: &[Section]) -> Result<T, VmmError> {
    let mut found = all(sections)?.into_iter();
    match (found.next(), found.next()) {
        (Some(value), None) => Ok(value),
        _ => Err(damaged(format!("not exactly one {}", T::NAME))),
    }
}

impl MachineState {
    /// As it is written to a file.
    pub fn encode(&self) -> Result<Vec<u8>, VmmError> {
        let mut sections = vec![section(&self.shape)?];
        for vcpu in &self.vcpus {
            sections.push(section(vcpu)?);
        }
        sections.push(section(&self.clock)?);
        sections.push(section(&self.ioapic)?);
        sections.push(section(&self.serial)?);
        for device in &self.devices {
            sections.push(section(device)?);
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(FORMAT.to_le_bytes());
        bytes.extend(
            postcard::to_stdvec(&sections).map_err(|e| VmmError::host("encoding state", e))?,
        );
        Ok(bytes)
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(bytes: &[u8]) -> Result<Self, VmmError> {
        let (magic, rest) = bytes
            .split_first_chunk()
            .ok_or_else(|| damaged("it is too short"))?;
        if *magic != MAGIC {
            return Err(damaged("it is something else"));
        }
        let (format, rest) = rest
            .split_first_chunk()
            .ok_or_else(|| damaged("it is too short"))?;
        let format = u32::from_le_bytes(*format);
        if format != FORMAT {
            return Err(VmmError::Config(format!(
                "the snapshot is of format {format} and this jiffy-vmm reads format {FORMAT}: restore it with the version of \
                 Jiffy that made it, or build the template anew"
            )));
        }
        let sections: Vec<Section> = postcard::from_bytes(rest).map_err(damaged)?;
        let known = [
            Shape::NAME,
            VcpuState::NAME,
            ClockState::NAME,
            IoApicState::NAME,
            SerialSaved::NAME,
            TransportState::NAME,
        ];
        if let Some(unknown) = sections.iter().find(|s| !known.contains(&&*s.name)) {
            return Err(VmmError::Config(format!(
                "the snapshot holds {:?}, which this jiffy-vmm does not know: restore it with the version that made it",
                unknown.name
            )));
        }
        let state = Self {
            shape: one(&sections)?,
            vcpus: all(&sections)?,
            clock: one(&sections)?,
            ioapic: one(&sections)?,
            serial: one(&sections)?,
            devices: all(&sections)?,
        };
        if state.vcpus.len() != usize::from(state.shape.vcpus) {
            return Err(damaged("the number of vCPUs is wrong"));
        }
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// State of a real guest with two vCPUs, as format 1 has it.
    const GOLDEN: &[u8] = include_bytes!("../../tests/data/state-format1.bin");

    #[test]
    fn the_golden_state_keeps_loading_and_is_written_the_same() {
        let state = MachineState::decode(GOLDEN).unwrap();
        assert_eq!(state.vcpus.len(), 2);
        let names: Vec<&str> = state.devices.iter().map(TransportState::name).collect();
        assert_eq!(names, ["blk0", "vsock", "rng", "balloon"]);
        assert_eq!(state.encode().unwrap(), GOLDEN);
    }

    #[test]
    fn no_damage_of_a_state_does_more_than_be_refused() {
        for length in (0..GOLDEN.len()).step_by(61) {
            assert!(MachineState::decode(&GOLDEN[..length]).is_err());
        }
        for at in (0..GOLDEN.len()).step_by(7) {
            let mut bad = GOLDEN.to_vec();
            bad[at] ^= 0xff;
            // Registers may hold anything; what matters is that reading does not panic or take all memory.
            let _ = MachineState::decode(&bad);
        }
    }
}
