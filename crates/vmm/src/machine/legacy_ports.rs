//! Legacy PC ports: the serial console and the reset line of the keyboard controller.

use jiffy_proto::console::ConsoleRing;
use std::io::{self, Write};
use std::sync::Arc;
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, SerialState, Trigger};
use vmm_sys_util::eventfd::EventFd;

/// First port of COM1.
pub const COM1: u16 = 0x3f8;
/// Interrupt of COM1.
pub const COM1_IRQ: u32 = 4;
const COM1_LAST: u16 = COM1 + 7;
/// Port with the output of the timer.
const SYSTEM_CONTROL: u16 = 0x61;
/// Command port of the keyboard controller, and the command that resets the processor.
const KEYBOARD_COMMAND: u16 = 0x64;
const RESET_CPU: u8 = 0xfe;
/// Output of PIT channel 2 is high, so that a guest polling it does not wait forever.
const TIMER2_OUTPUT_HIGH: u8 = 0x20;

/// Interrupt of the serial port.
#[derive(Clone)]
struct SerialIrq(Arc<EventFd>);

impl Trigger for SerialIrq {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Destination of the serial port's output.
#[derive(Clone)]
struct ConsoleWriter(Arc<ConsoleRing>);

impl Write for ConsoleWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Effect of a port write.
#[derive(Debug, PartialEq, Eq)]
pub enum PortEffect {
    /// No effect beyond the device.
    None,
    /// The machine must be reset.
    Reset,
}

/// Registers of the console port in the order of `vm_superio`'s state, and unread input.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SerialPortState {
    registers: [u8; 9],
    input: Vec<u8>,
}

crate::frozen_layout!(SerialPortState, 40);

/// All legacy port devices.
pub struct LegacyPorts {
    serial: Serial<SerialIrq, NoEvents, ConsoleWriter>,
    // `restore` creates the serial port anew with duplicates of `console` and `irq`.
    console: ConsoleWriter,
    irq: SerialIrq,
}

impl LegacyPorts {
    /// Creates the ports. Console output goes to `console`, the serial interrupt to `irq`.
    pub fn new(console: ConsoleRing, irq: EventFd) -> Self {
        let (irq, console) = (SerialIrq(Arc::new(irq)), ConsoleWriter(Arc::new(console)));
        Self {
            serial: Serial::new(irq.clone(), console.clone()),
            console,
            irq,
        }
    }

    /// Writes a line to the guest's console output.
    pub fn log_to_console(&mut self, line: &str) {
        // Ignore the result: writing to the ring cannot fail.
        let _ = writeln!(self.serial.writer_mut(), "\r\njiffy: {line}\r");
    }

    /// Returns the registers.
    pub fn save(&self) -> SerialPortState {
        let state = self.serial.state();
        SerialPortState {
            registers: [
                state.baud_divisor_low,
                state.baud_divisor_high,
                state.interrupt_enable,
                state.interrupt_identification,
                state.line_control,
                state.line_status,
                state.modem_control,
                state.modem_status,
                state.scratch,
            ],
            input: state.in_buffer,
        }
    }

    /// Restores the registers. A pending interrupt is raised at once.
    pub fn restore(&mut self, saved: &SerialPortState) -> Result<(), String> {
        let r = saved.registers;
        let state = SerialState {
            baud_divisor_low: r[0],
            baud_divisor_high: r[1],
            interrupt_enable: r[2],
            interrupt_identification: r[3],
            line_control: r[4],
            line_status: r[5],
            modem_control: r[6],
            modem_status: r[7],
            scratch: r[8],
            in_buffer: saved.input.clone(),
        };
        let (irq, console) = (self.irq.clone(), self.console.clone());
        self.serial = Serial::from_state(&state, irq, NoEvents, console)
            .map_err(|e| format!("serial port: {e:?}"))?;
        Ok(())
    }

    /// Handles a port read. A port without a device reads as all ones.
    pub fn read(&mut self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        let [byte, ..] = data else { return };
        // The remaining bytes of a wider access stay 0xff: every register has one byte.
        match port {
            COM1..=COM1_LAST => *byte = self.serial.read(low_byte(port - COM1)),
            SYSTEM_CONTROL => *byte = TIMER2_OUTPUT_HIGH,
            // Status: the keyboard controller is ready for a command.
            KEYBOARD_COMMAND => *byte = 0,
            _ => {}
        }
    }

    /// Handles a port write.
    pub fn write(&mut self, port: u16, data: &[u8]) -> PortEffect {
        match (port, data) {
            (COM1..=COM1_LAST, [byte, ..]) => {
                // Ignore the error: it only means that the interrupt's eventfd is full, so an
                // interrupt is pending.
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
