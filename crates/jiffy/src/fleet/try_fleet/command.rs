//! Faults that a user of `jiffy fleet try` causes by lines on standard input.
//!
//! `jiffy fleet try` runs several hosts in network namespaces of this machine, to demonstrate
//! failures.

use super::Fleet;
use super::service::Service;
use anyhow::Context;
use std::io::{BufRead, Read};
use tokio::sync::mpsc;

/// Maximum length of a line in bytes.
const MAX_LINE: u64 = 256;
/// Maximum number of lines that wait.
const MAX_LINES: usize = 64;

/// Commands, for the user.
pub const HELP: &str = "\
  kill NAME         end all processes of a machine at once, as a power failure does
  start NAME        start it again, with its data
  freeze NAME       suspend the daemon of a machine, or a server
  thaw NAME         continue it
  disconnect NAME   cut the network of a machine
  connect NAME      connect it again";

/// Fault, or the end of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Start,
    Freeze,
    Thaw,
    Disconnect,
    Connect,
}

impl Fault {
    fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "kill" => Self::Kill,
            "start" => Self::Start,
            "freeze" => Self::Freeze,
            "thaw" => Self::Thaw,
            "disconnect" => Self::Disconnect,
            "connect" => Self::Connect,
            _ => return None,
        })
    }

    /// Returns the new state of a machine or server.
    fn done(self) -> &'static str {
        match self {
            Self::Kill => "killed",
            Self::Start => "started",
            Self::Freeze => "suspended",
            Self::Thaw => "continues",
            Self::Disconnect => "disconnected",
            Self::Connect => "connected",
        }
    }
}

/// Reads lines of standard input. The channel is closed at the end of the input.
pub fn read_lines() -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel(MAX_LINES);
    // A task of the runtime would delay the exit until its read has ended.
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        loop {
            let mut line = String::new();
            let read = input.by_ref().take(MAX_LINE).read_line(&mut line);
            if !read.is_ok_and(|length| length > 0) || sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    lines
}

impl Fleet {
    /// Executes a line of standard input. Returns the answer. `None` for an empty line.
    pub fn execute(&mut self, line: &str) -> anyhow::Result<Option<String>> {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            [] => Ok(None),
            ["help"] => Ok(Some(HELP.to_owned())),
            [verb, name] if let Some(fault) = Fault::parse(verb) => {
                self.cause(fault, name)
                    .with_context(|| format!("cannot {verb} {name}"))?;
                Ok(Some(format!("{name}: {}", fault.done())))
            }
            _ => anyhow::bail!("unknown command: `help` lists the commands"),
        }
    }

    /// Causes a fault of the machine or server with this name.
    fn cause(&mut self, fault: Fault, name: &str) -> anyhow::Result<()> {
        let names = self.names();
        let etcd = self.etcd.as_mut().and_then(|etcd| etcd.member(name));
        let server = if name == "s3" {
            Some(&mut self.s3)
        } else {
            etcd
        };
        if let Some(server) = server {
            return cause_in_server(fault, server);
        }
        let network = &self.network;
        let mut machines = self.hosts.iter_mut().chain(&mut self.front);
        let machine = machines.find(|machine| machine.name == name);
        let Some(machine) = machine else {
            anyhow::bail!("no machine is named {name:?}: {}", names.join(", "));
        };
        match fault {
            Fault::Kill => machine.lose_power(network),
            Fault::Start => machine.restart(network),
            Fault::Freeze => machine.service()?.freeze(),
            Fault::Thaw => machine.service()?.thaw(),
            Fault::Disconnect => machine.set_connected(network, false),
            Fault::Connect => machine.set_connected(network, true),
        }
    }

    /// Returns the names of all machines and servers.
    pub fn names(&self) -> Vec<String> {
        let machines = self.hosts.iter().chain(&self.front);
        let mut names: Vec<_> = machines.map(|machine| machine.name.clone()).collect();
        names.push("s3".to_owned());
        names.extend(self.etcd.iter().flat_map(|etcd| etcd.names()));
        names
    }
}

fn cause_in_server(fault: Fault, server: &mut Service) -> anyhow::Result<()> {
    match fault {
        Fault::Kill => server.kill(),
        Fault::Start => server.restart(),
        Fault::Freeze => server.freeze(),
        Fault::Thaw => server.thaw(),
        Fault::Disconnect | Fault::Connect => {
            anyhow::bail!("the servers have no network of their own: use freeze and thaw")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_of_the_help_is_accepted() {
        for line in HELP.lines() {
            let verb = line.split_whitespace().next().unwrap();
            assert!(Fault::parse(verb).is_some(), "{verb}");
        }
        assert_eq!(Fault::parse("reboot"), None);
    }
}
