//! Machine of `jiffy fleet try`: a host or a front, with its own namespaces and data directory.
//!
//! A *front* is a process without sandboxes that passes connections of clients to the hosts of a
//! fleet.

use super::namespace::Namespace;
use super::service::Service;
use super::{API_PORT, S3_PORT, SERVER, wait_for};
use anyhow::Context;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

/// Host or front. Its processes end when the value is dropped.
pub struct Host {
    pub name: String,
    pub home: PathBuf,
    pub address: String,
    /// Number of its interface on the bridge.
    number: usize,
    /// Arguments of its daemon.
    daemon: Vec<String>,
    /// Processes and namespaces. `None` after a simulated power failure.
    running: Option<Running>,
    is_connected: bool,
}

/// Processes of a machine.
struct Running {
    // Fields are dropped in this order.
    namespace: Namespace,
    service: Option<Service>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.namespace.end();
        if let Some(service) = &mut self.service {
            service.wait();
        }
    }
}

impl Host {
    /// Creates a machine without content, connected to the bridge of `network`.
    pub fn new(
        network: &Namespace,
        name: &str,
        number: usize,
        home: PathBuf,
    ) -> anyhow::Result<Self> {
        let mut host = Self {
            name: name.to_owned(),
            home,
            address: super::address(number),
            number,
            daemon: Vec::new(),
            running: None,
            is_connected: true,
        };
        host.boot(network)?;
        Ok(host)
    }

    /// Creates the namespaces.
    fn boot(&mut self, network: &Namespace) -> anyhow::Result<()> {
        let namespace = Namespace::new()?;
        network.connect(&namespace, self.number, &self.address)?;
        self.is_connected = true;
        self.running = Some(Running {
            namespace,
            service: None,
        });
        Ok(())
    }

    /// Returns the log of the daemon.
    pub fn log(&self) -> PathBuf {
        self.home.join("daemon.log")
    }

    /// Returns the namespaces of the machine.
    pub fn namespace(&self) -> anyhow::Result<&Namespace> {
        let running = self.running.as_ref().map(|running| &running.namespace);
        running.with_context(|| format!("{} is switched off: start it first", self.name))
    }

    /// Returns a command of `jiffy` on this machine.
    fn jiffy(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = self.namespace()?.command(std::env::current_exe()?);
        command
            .args(arguments)
            .env("JIFFY_HOME", &self.home)
            .env("AWS_ENDPOINT_URL", format!("http://{SERVER}:{S3_PORT}"))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_REGION", "us-east-1")
            .env("AWS_ACCESS_KEY_ID", "trial")
            .env("AWS_SECRET_ACCESS_KEY", "trial-secret");
        Ok(command)
    }

    /// Runs a command and returns its output.
    pub fn run(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.jiffy(arguments)?.output()?;
        anyhow::ensure!(
            output.status.success(),
            "`jiffy {}` failed on {}: {}",
            arguments
                .iter()
                .take(2)
                .copied()
                .collect::<Vec<_>>()
                .join(" "),
            self.address,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts the daemon or front, and waits until it is ready.
    pub fn start(&mut self, arguments: &[&str]) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(self.log());
        let log = log.with_context(|| format!("cannot open {}", self.log().display()))?;
        let mut command = self.jiffy(arguments)?;
        command.stdout(log.try_clone()?).stderr(log);
        let mut service = Service::start(command)?;
        self.daemon = arguments.iter().map(|&word| word.to_owned()).collect();
        let mut exit = None;
        let started = wait_for("the daemon", || {
            exit = service.exit().ok().flatten();
            exit.is_some() || self.is_ready()
        });
        if let Some(running) = &mut self.running {
            running.service = Some(service);
        }
        // The directory is removed with the fleet.
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let last = text.lines().last().unwrap_or_default();
        anyhow::ensure!(
            exit.is_none(),
            "the daemon exited: {}",
            jiffy_client::terminal::line(last)
        );
        started.with_context(|| format!("last line of its log: {last}"))
    }

    /// Returns whether the daemon or front serves its API.
    fn is_ready(&self) -> bool {
        if self
            .daemon
            .first()
            .is_some_and(|command| command == "serve")
        {
            return UnixStream::connect(self.home.join("run/jiffy.sock")).is_ok();
        }
        let namespace = self.namespace();
        namespace.is_ok_and(|namespace| namespace.accepts(&self.address, API_PORT))
    }

    /// Ends all processes at once, after the network was cut: other machines receive nothing more.
    pub fn lose_power(&mut self, network: &Namespace) -> anyhow::Result<()> {
        self.namespace()?;
        network.set_link(self.number, false)?;
        self.running = None;
        Ok(())
    }

    /// Starts the machine again, with the same data directory and daemon.
    pub fn restart(&mut self, network: &Namespace) -> anyhow::Result<()> {
        anyhow::ensure!(self.running.is_none(), "{} runs", self.name);
        self.boot(network)?;
        let daemon = self.daemon.clone();
        let daemon: Vec<_> = daemon.iter().map(String::as_str).collect();
        self.start(&daemon)
    }

    /// Connects or disconnects the machine.
    pub fn set_connected(&mut self, network: &Namespace, connected: bool) -> anyhow::Result<()> {
        self.namespace()?;
        let state = if connected {
            "connected"
        } else {
            "disconnected"
        };
        anyhow::ensure!(
            self.is_connected != connected,
            "{} is {state} already",
            self.name
        );
        network.set_link(self.number, connected)?;
        self.is_connected = connected;
        Ok(())
    }

    /// Returns the daemon.
    pub fn service(&mut self) -> anyhow::Result<&mut Service> {
        let name = &self.name;
        let running = self.running.as_mut();
        let running = running.with_context(|| format!("{name} is switched off"))?;
        running.service.as_mut().context("it has no daemon")
    }
}
