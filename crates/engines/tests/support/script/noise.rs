//! Accesses to registers and ports that no driver makes.

use super::*;

/// First port of the serial console, which has eight.
const SERIAL: u16 = 0x3f8;
/// Port of the keyboard controller, through which a guest resets its machine.
const RESET_PORT: u16 = 0x64;

impl Script {
    /// Accesses the configuration space of the device, for example the size of the balloon.
    pub(super) fn configuration(&mut self, device: Device) {
        let (offset, width) = (self.random.below(0xf00), self.random.of(&[1, 2, 4, 8]));
        let offset = self.random.of(&[0, 4, 7, offset]);
        let at = MMIO + device.page * 0x1000 + CONFIGURATION + offset;
        let value = self.random.next();
        self.step(What::Store, width, 0, at, value);
        self.step(What::Load, width, 0, at, 0);
    }

    /// Accesses any register, in any width and order.
    pub(super) fn noise(&mut self, device: Device) {
        for _ in 0..40 {
            let offset = if self.random.once_in(4) {
                self.random.below(0x1000 - 8)
            } else {
                self.random.below(0x30) * 4
            };
            let at = MMIO + device.page * 0x1000 + offset;
            let width = self.random.of(&[4, 4, 4, 1, 2, 8]);
            let value = if self.random.once_in(2) {
                self.random.next()
            } else {
                self.random.below(16)
            };
            let what = self.random.of(&[What::Store, What::Store, What::Load]);
            self.step(what, width, 0, at, value);
        }
        self.query_status(device);
    }

    /// Takes devices in and out of service while requests are in flight.
    pub(super) fn reset_storm(&mut self, device: Device) {
        self.set_up(device);
        for _ in 0..30 {
            self.notify(device);
            let status = self.random.of(&[
                0,
                DRIVER,
                FEATURES_OK,
                DRIVER_OK,
                DRIVER_OK,
                DRIVER_OK,
                FAILED,
            ]);
            self.register(device, STATUS, status);
        }
        self.query_status(device);
    }

    /// Accesses all ports except the reset port, and addresses without devices.
    pub(super) fn ports(&mut self) {
        for _ in 0..30 {
            let any = self.random.next().to_le_bytes();
            let port = if self.random.once_in(2) {
                // The serial console, including its interrupt and divisor registers.
                SERIAL + u16::from(any[0] % 8)
            } else {
                u16::from_le_bytes([any[0], any[1]])
            };
            if port != RESET_PORT {
                self.step(What::Out, 1, port, 0, any[2].into());
            }
        }
        // Restore normal output, because later output must be readable. The registers control the
        // line and the modem.
        self.step(What::Out, 1, SERIAL + 3, 0, 3);
        self.step(What::Out, 1, SERIAL + 4, 0, 0);
        for _ in 0..10 {
            let nowhere = MMIO + 0x1_0000 + self.random.below(1 << 24) * 8;
            let what = self.random.of(&[What::Store, What::Load]);
            let width = self.random.of(&[1, 2, 4, 8]);
            self.step(what, width, 0, nowhere, u64::MAX);
        }
    }

    /// Accesses the pins of the I/O APIC, masked and unmasked, with invalid vectors and
    /// destinations.
    pub(super) fn interrupts(&mut self) {
        for _ in 0..60 {
            let select = self.random.below(0x50);
            self.step(What::Store, 4, 0, IOAPIC, select);
            let value = self.random.next() & 0xffff_ffff;
            self.step(What::Store, 4, 0, IOAPIC + 0x10, value);
            self.step(What::Load, 4, 0, IOAPIC + 0x10, 0);
        }
    }
}
