//! Host ports that are forwarded to ports of a sandbox.

use super::remote::Remote;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::Child;

/// Running `jiffy port-forward`, terminated when this value is dropped.
pub struct Forward {
    /// Process of the command.
    pub process: Child,
    addresses: Vec<String>,
}

impl Forward {
    /// Forwards the ports in `args`. `ports` is their number.
    pub fn new(remote: &Remote, args: &[&str], ports: usize) -> Self {
        let mut command = remote.command(&[&["port-forward"], args].concat());
        let mut process = command.spawn().unwrap();
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let mut addresses = Vec::new();
        for _ in 0..ports {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            let (address, _) = line.split_once(" -> ").unwrap_or_else(|| panic!("{line}"));
            addresses.push(address.to_owned());
        }
        Self { process, addresses }
    }

    /// Terminates the command, and returns its standard error.
    pub fn end(&mut self) -> String {
        let _ = self.process.kill();
        let mut output = String::new();
        let report = self.process.stderr.take();
        report.unwrap().read_to_string(&mut output).unwrap();
        output
    }

    /// Connects to one of the ports.
    pub fn connect(&self, port: usize) -> TcpStream {
        TcpStream::connect(&self.addresses[port]).unwrap()
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
