//! What is left of a PC: the serial console, and the keyboard controller's reset line.

use jiffy_proto::console::ConsoleRing;
use std::io::{self, Write};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

/// First port of COM1.
pub const COM1: u16 = 0x3f8;
/// Interrupt of COM1.
pub const COM1_IRQ: u32 = 4;
const COM1_LAST: u16 = COM1 + 7;
const SYSTEM_CONTROL: u16 = 0x61;
const KEYBOARD_COMMAND: u16 = 0x64;
const RESET_CPU: u8 = 0xfe;
/// PIT channel 2 output is high: nobody waits for it for ever.
const TIMER2_DONE: u8 = 0x20;

struct SerialIrq(EventFd);

impl Trigger for SerialIrq {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

struct Output(ConsoleRing);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a port write asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum PortEffect {
    /// Nothing beyond the device.
    None,
    /// The machine is to be reset.
    Reset,
}

/// All port devices.
pub struct LegacyPorts {
    serial: Serial<SerialIrq, NoEvents, Output>,
}

impl LegacyPorts {
    /// Console output goes to `console`, the serial interrupt to `irq`.
    pub fn new(console: ConsoleRing, irq: EventFd) -> Self {
        Self {
            serial: Serial::new(SerialIrq(irq), Output(console)),
        }
    }

    /// Port read. Nobody there reads as ones.
    pub fn read(&mut self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        let [byte, ..] = data else { return };
        match port {
            COM1..=COM1_LAST => *byte = self.serial.read(low_byte(port - COM1)),
            SYSTEM_CONTROL => *byte = TIMER2_DONE,
            KEYBOARD_COMMAND => *byte = 0,
            _ => {}
        }
    }

    /// Port write.
    pub fn write(&mut self, port: u16, data: &[u8]) -> PortEffect {
        match (port, data) {
            (COM1..=COM1_LAST, [byte, ..]) => {
                // Fails only when the interrupt's eventfd is full: then it is pending already.
                let _ = self.serial.write(low_byte(port - COM1), *byte);
                PortEffect::None
            }
            (KEYBOARD_COMMAND, [RESET_CPU, ..]) => PortEffect::Reset,
            _ => PortEffect::None,
        }
    }
}

fn low_byte(value: u16) -> u8 {
    value.to_le_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    fn ports() -> (LegacyPorts, ConsoleRing) {
        let ring = ConsoleRing::create().unwrap();
        let reader = ConsoleRing::open(ring.fd().try_clone_to_owned().unwrap()).unwrap();
        (
            LegacyPorts::new(ring, EventFd::new(EFD_NONBLOCK).unwrap()),
            reader,
        )
    }

    #[test]
    fn serial_output_lands_in_the_ring() {
        let (mut ports, reader) = ports();
        for byte in b"panic!" {
            ports.write(COM1, &[*byte]);
        }
        assert_eq!(reader.tail(), b"panic!");
    }

    #[test]
    fn the_keyboard_controller_resets_and_nothing_else_does() {
        let (mut ports, _reader) = ports();
        assert_eq!(
            ports.write(KEYBOARD_COMMAND, &[RESET_CPU]),
            PortEffect::Reset
        );
        for port in 0..=u16::MAX {
            if port != KEYBOARD_COMMAND {
                assert_eq!(ports.write(port, &[RESET_CPU]), PortEffect::None);
            }
            ports.read(port, &mut [0; 4]);
            ports.read(port, &mut []);
        }
    }
}
