//! Address spaces of the machine. All vCPU threads access them. Each device has its own lock, and
//! no method holds two locks at the same time.

use super::ioapic::{IoApic, IoApicState, KvmRoutes};
use super::legacy_ports::{LegacyPorts, PortEffect, SerialPortState};
use crate::error::VmmError;
use crate::memory::{IOAPIC_START, MMIO_START, MMIO_STRIDE};
use crate::virtio::mmio::MmioDevice;
use jiffy_proto::vm::VmStats;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Virtio device shared by vCPU threads and the event loop.
pub type SharedDevice = Arc<Mutex<MmioDevice>>;

/// Acquires a lock. No code panics while holding a lock, so the content of a poisoned lock is
/// valid.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Effect of an access on the whole machine.
#[derive(Debug, PartialEq, Eq)]
pub enum BusEffect {
    /// No effect.
    None,
    /// The machine must be reset.
    Reset,
}

/// The address spaces of the machine.
pub struct Bus {
    devices: Vec<SharedDevice>,
    ioapic: Mutex<IoApic<KvmRoutes>>,
    ports: Mutex<LegacyPorts>,
    // Both counters are accessed with `Relaxed`: they are statistics, and no other data depends on
    // them.
    mmio_exits: AtomicU64,
    pio_exits: AtomicU64,
    /// Called when a device may have failed during a vCPU's access. The event loop then reports it.
    on_failure: Box<dyn Fn() + Send + Sync>,
}

impl Bus {
    /// Creates the bus. Device `i` is at `MMIO_START + i * MMIO_STRIDE`.
    pub fn new(
        devices: Vec<SharedDevice>,
        ioapic: IoApic<KvmRoutes>,
        ports: LegacyPorts,
        on_failure: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self {
            devices,
            ioapic: Mutex::new(ioapic),
            ports: Mutex::new(ports),
            mmio_exits: AtomicU64::new(0),
            pio_exits: AtomicU64::new(0),
            on_failure,
        }
    }

    /// Returns the device at an address, and the offset in its register page.
    fn device(&self, address: u64) -> Option<(&SharedDevice, u64)> {
        let offset = address.checked_sub(MMIO_START)?;
        let index = usize::try_from(offset / MMIO_STRIDE).ok()?;
        Some((self.devices.get(index)?, offset % MMIO_STRIDE))
    }

    /// Returns the offset of an address in the registers of the I/O APIC.
    fn ioapic_offset(address: u64) -> Option<u64> {
        // The registers occupy one page.
        address.checked_sub(IOAPIC_START).filter(|&o| o < 0x1000)
    }

    /// Handles a memory read by the guest. An address without a device reads as all ones.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        self.mmio_exits.fetch_add(1, Ordering::Relaxed);
        if let Some((device, offset)) = self.device(address) {
            lock(device).read(offset, data);
        } else if let Some(offset) = Self::ioapic_offset(address) {
            lock(&self.ioapic).read(offset, data);
        } else {
            data.fill(0xff);
        }
    }

    /// Handles a memory write by the guest. A write to an address without a device is ignored.
    pub fn mmio_write(&self, address: u64, data: &[u8]) -> Result<(), VmmError> {
        self.mmio_exits.fetch_add(1, Ordering::Relaxed);
        if let Some((device, offset)) = self.device(address) {
            let mut device = lock(device);
            device.write(offset, data);
            // Signalling while holding the lock is harmless: the callback only writes to an
            // eventfd.
            if device.has_failure() {
                (self.on_failure)();
            }
        } else if let Some(offset) = Self::ioapic_offset(address) {
            lock(&self.ioapic)
                .write(offset, data)
                .map_err(|e| VmmError::host("routing an interrupt", e))?;
        }
        Ok(())
    }

    /// Handles a port read.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        self.pio_exits.fetch_add(1, Ordering::Relaxed);
        lock(&self.ports).read(port, data);
    }

    /// Handles a port write.
    pub fn port_write(&self, port: u16, data: &[u8]) -> BusEffect {
        self.pio_exits.fetch_add(1, Ordering::Relaxed);
        match lock(&self.ports).write(port, data) {
            PortEffect::None => BusEffect::None,
            PortEffect::Reset => BusEffect::Reset,
        }
    }

    /// Writes a line of the VMM to the console output.
    pub fn log_to_console(&self, line: &str) {
        lock(&self.ports).log_to_console(line);
    }

    /// Returns the state of interrupt pins and console port. No vCPU may be running.
    pub fn save(&self) -> (IoApicState, SerialPortState) {
        (lock(&self.ioapic).save(), lock(&self.ports).save())
    }

    /// Restores interrupt pins and console port. No vCPU may be running.
    pub fn restore(&self, ioapic: &IoApicState, serial: &SerialPortState) -> Result<(), VmmError> {
        let routing = |e| VmmError::host("routing interrupts", e);
        lock(&self.ioapic).restore(ioapic).map_err(routing)?;
        lock(&self.ports).restore(serial).map_err(VmmError::Config)
    }

    /// Returns the numbers of exits to the VMM. The caller sets the other fields.
    pub fn stats(&self) -> VmStats {
        VmStats {
            mmio_exits: self.mmio_exits.load(Ordering::Relaxed),
            pio_exits: self.pio_exits.load(Ordering::Relaxed),
            ..VmStats::default()
        }
    }
}
