//! I/O APIC in user space (Intel 82093AA) with 24 pins. Redirection entries become MSI routes of
//! KVM.
//!
//! All devices send edges through irqfds, so the kernel delivers interrupts without this device.
//! The guest programs a pin once, and the device only translates the pin's entry into a route.

use kvm_bindings::{
    KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1,
    kvm_irq_routing_msi,
};
use kvm_ioctls::VmFd;

/// Number of pins.
pub const IOAPIC_PINS: u8 = 24;

/// Offsets of the two registers in memory. A write to the first selects the register that the
/// second one accesses.
const REG_SELECT: u64 = 0x00;
const REG_WINDOW: u64 = 0x10;
/// Indices of registers. Each pin has two, from `INDEX_TABLE` on: the halves of its entry.
const INDEX_ID: u8 = 0x00;
const INDEX_VERSION: u8 = 0x01;
const INDEX_ARBITRATION: u8 = 0x02;
const INDEX_TABLE: u8 = 0x10;
/// 0x11 is the version of the 82093AA. Bits 16 to 23 hold the highest pin.
const VERSION_REGISTER_VALUE: u32 = 0x11 | ((IOAPIC_PINS as u32 - 1) << 16);
/// Bit of an entry that disables the pin.
const ENTRY_MASKED: u64 = 1 << 16;
/// Delivery status and remote IRR.
const ENTRY_READ_ONLY_BITS: u64 = 1 << 12 | 1 << 14;

/// Receiver of the routes: KVM, or a test.
pub trait IoApicRouting: Send {
    /// Replaces all routes. Pins without a route deliver no interrupts.
    fn set(&mut self, routes: &[IoApicRoute]) -> Result<(), String>;
}

/// MSI message of a pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoApicRoute {
    /// Pin, which is also the GSI.
    pub pin: u8,
    /// Low half of the message address.
    pub address: u32,
    /// Message data.
    pub data: u32,
}

/// Registers of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IoApicState {
    select: u8,
    id: u32,
    table: [u64; IOAPIC_PINS as usize],
}

crate::frozen_layout!(IoApicState, 200);

/// The device.
pub struct IoApic<R> {
    routes: R,
    select: u8,
    id: u32,
    table: [u64; IOAPIC_PINS as usize],
}

impl<R: IoApicRouting> IoApic<R> {
    /// Creates the device with all pins masked, as after a reset.
    pub fn new(routes: R) -> Self {
        Self {
            routes,
            select: 0,
            id: 0,
            table: [ENTRY_MASKED; IOAPIC_PINS as usize],
        }
    }

    /// Returns all registers.
    pub fn save(&self) -> IoApicState {
        IoApicState {
            select: self.select,
            id: self.id,
            table: self.table,
        }
    }

    /// Sets all registers and the resulting routes.
    pub fn restore(&mut self, state: &IoApicState) -> Result<(), String> {
        self.select = state.select;
        self.id = state.id;
        self.table = state.table;
        self.set_routes()
    }

    /// Handles a 32-bit read of a register.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            REG_SELECT => u32::from(self.select),
            REG_WINDOW => self.register(),
            _ => 0,
        };
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    /// Handles a 32-bit write of a register.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), String> {
        let mut bytes = [0u8; 4];
        for (to, from) in bytes.iter_mut().zip(data) {
            *to = *from;
        }
        let value = u32::from_le_bytes(bytes);
        match offset {
            REG_SELECT => self.select = bytes[0],
            REG_WINDOW => return self.set_register(value),
            _ => {}
        }
        Ok(())
    }

    /// Returns the value of the selected register.
    fn register(&self) -> u32 {
        match self.select {
            INDEX_ID | INDEX_ARBITRATION => self.id,
            INDEX_VERSION => VERSION_REGISTER_VALUE,
            index => self.entry(index).map_or(0, |(pin, high)| {
                let halves = self.table[pin].to_le_bytes();
                let at = if high { 4 } else { 0 };
                u32::from_le_bytes([halves[at], halves[at + 1], halves[at + 2], halves[at + 3]])
            }),
        }
    }

    /// Returns the pin of a register index, and whether the index selects the upper half of the
    /// entry.
    fn entry(&self, index: u8) -> Option<(usize, bool)> {
        let at = index.checked_sub(INDEX_TABLE)?;
        let pin = usize::from(at / 2);
        (pin < self.table.len()).then_some((pin, at % 2 == 1))
    }

    /// Handles a write of the selected register.
    fn set_register(&mut self, value: u32) -> Result<(), String> {
        if self.select == INDEX_ID {
            // Bits 24 to 27. The other bits are reserved.
            self.id = value & 0x0f00_0000;
            return Ok(());
        }
        let Some((pin, high)) = self.entry(self.select) else {
            return Ok(());
        };
        let old = self.table[pin];
        let new = if high {
            (old & u64::from(u32::MAX)) | (u64::from(value) << 32)
        } else {
            (old & !u64::from(u32::MAX)) | (u64::from(value) & !ENTRY_READ_ONLY_BITS)
        };
        self.table[pin] = new;
        // A pin that remains masked has no route before and after the write. Changing the routes
        // takes time, and a kernel writes both halves of masked entries at its start.
        if old & ENTRY_MASKED != 0 && new & ENTRY_MASKED != 0 {
            return Ok(());
        }
        self.set_routes()
    }

    /// Sends the routes of all unmasked pins to KVM.
    fn set_routes(&mut self) -> Result<(), String> {
        let routes: Vec<IoApicRoute> = (0..IOAPIC_PINS)
            .zip(self.table)
            .filter(|(_, entry)| entry & ENTRY_MASKED == 0)
            .map(|(pin, entry)| route(pin, entry))
            .collect();
        self.routes.set(&routes)
    }
}

/// Converts a redirection entry to an MSI message (Intel SDM volume 3, 11.11). The message is
/// always edge-triggered because all devices send edges.
fn route(pin: u8, entry: u64) -> IoApicRoute {
    let [vector, mode, ..] = entry.to_le_bytes();
    let destination = entry.to_le_bytes()[7];
    let delivery = u32::from(mode & 0x7);
    let logical = u32::from(mode >> 3 & 1);
    IoApicRoute {
        pin,
        address: 0xfee0_0000 | u32::from(destination) << 12 | logical << 2,
        data: u32::from(vector) | delivery << 8,
    }
}

/// Routing table in KVM.
pub struct KvmRoutes(pub std::sync::Arc<VmFd>);

impl IoApicRouting for KvmRoutes {
    fn set(&mut self, routes: &[IoApicRoute]) -> Result<(), String> {
        let entries: Vec<kvm_irq_routing_entry> = routes
            .iter()
            .map(|route| kvm_irq_routing_entry {
                gsi: u32::from(route.pin),
                type_: KVM_IRQ_ROUTING_MSI,
                u: kvm_irq_routing_entry__bindgen_ty_1 {
                    msi: kvm_irq_routing_msi {
                        address_lo: route.address,
                        // MSI addresses of local APICs are below 4 GiB.
                        address_hi: 0,
                        data: route.data,
                        ..Default::default()
                    },
                },
                ..Default::default()
            })
            .collect();
        let table = KvmIrqRouting::from_entries(&entries).map_err(|e| format!("{e:?}"))?;
        self.0.set_gsi_routing(&table).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct RecordedRoutes(Arc<Mutex<Vec<IoApicRoute>>>);

    impl IoApicRouting for RecordedRoutes {
        fn set(&mut self, routes: &[IoApicRoute]) -> Result<(), String> {
            *self.0.lock().unwrap() = routes.to_vec();
            Ok(())
        }
    }

    fn write(apic: &mut IoApic<RecordedRoutes>, index: u8, value: u32) {
        apic.write(REG_SELECT, &[index, 0, 0, 0]).unwrap();
        apic.write(REG_WINDOW, &value.to_le_bytes()).unwrap();
    }

    fn read(apic: &mut IoApic<RecordedRoutes>, index: u8) -> u32 {
        apic.write(REG_SELECT, &[index, 0, 0, 0]).unwrap();
        let mut data = [0; 4];
        apic.read(REG_WINDOW, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn an_unmasked_pin_becomes_a_message_and_a_masked_one_none() {
        let seen = RecordedRoutes::default();
        let mut apic = IoApic::new(seen.clone());
        // Entry of pin 5. Upper half: destination 3. Lower half: vector 0x31, and bit 11 for a
        // logical destination.
        write(&mut apic, 0x10 + 2 * 5 + 1, 0x0300_0000);
        write(&mut apic, 0x10 + 2 * 5, 0x0000_0831);
        assert_eq!(
            *seen.0.lock().unwrap(),
            [IoApicRoute {
                pin: 5,
                address: 0xfee0_3004,
                data: 0x31
            }]
        );
        // Bit 16 masks the pin.
        write(&mut apic, 0x10 + 2 * 5, 0x0001_0031);
        assert!(seen.0.lock().unwrap().is_empty());
        assert_eq!(read(&mut apic, 0x10 + 2 * 5), 0x0001_0031);
    }

    #[test]
    fn every_index_and_offset_is_harmless() {
        let mut apic = IoApic::new(RecordedRoutes::default());
        assert_eq!(read(&mut apic, INDEX_VERSION), 0x0017_0011);
        for index in 0..=255 {
            write(&mut apic, index, u32::MAX);
            read(&mut apic, index);
        }
        for offset in [1, 4, 0x14, 0xfff] {
            apic.write(offset, &[1]).unwrap();
            apic.read(offset, &mut [0; 8]);
        }
    }
}
