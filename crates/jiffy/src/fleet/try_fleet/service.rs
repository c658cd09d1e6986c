//! Program of `jiffy fleet try` that can be killed, suspended and started again.

use super::namespace::{first_child, send};
use anyhow::Context;
use nix::sys::signal::Signal;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Maximum time until `nsenter` has started the program.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the start of the program is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Program in a namespace. It ends with the namespace.
pub struct Service {
    command: Command,
    /// `nsenter`, whose child is the program. `None` if the program was killed.
    holder: Option<Child>,
    /// True while the process is stopped by SIGSTOP.
    is_frozen: bool,
}

impl Service {
    /// Starts a program. `command` is a command of a namespace.
    pub fn start(command: Command) -> anyhow::Result<Self> {
        let mut service = Self {
            command,
            holder: None,
            is_frozen: false,
        };
        service.restart()?;
        Ok(service)
    }

    /// Starts the program again after [`Self::kill`].
    pub fn restart(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(self.exit()?.is_some() || self.holder.is_none(), "it runs");
        let program = self.command.get_args().find_map(|word| {
            let word = word.to_str()?;
            (!word.starts_with('-') && word.contains('/')).then(|| word.to_owned())
        });
        let holder = self.command.spawn();
        let holder =
            holder.with_context(|| format!("cannot start {}", program.unwrap_or_default()))?;
        self.holder = Some(holder);
        self.is_frozen = false;
        Ok(())
    }

    /// Returns the exit status of the program. `None` if it runs.
    pub fn exit(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        match &mut self.holder {
            Some(holder) => Ok(holder.try_wait()?),
            None => Ok(None),
        }
    }

    /// Returns the process id of the program, outside its namespace.
    pub fn process(&mut self) -> anyhow::Result<u32> {
        let started = Instant::now();
        loop {
            let exit = self.exit()?;
            anyhow::ensure!(exit.is_none() && self.holder.is_some(), "it does not run");
            let holder = self.holder.as_ref().map_or(0, Child::id);
            if let Some(process) = first_child(holder) {
                return Ok(process);
            }
            anyhow::ensure!(started.elapsed() < START_TIMEOUT, "it did not start");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Kills the program.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        send(self.process()?, Signal::SIGKILL)?;
        self.wait();
        Ok(())
    }

    /// Waits for the end of the program, which was killed.
    pub fn wait(&mut self) {
        if let Some(mut holder) = self.holder.take() {
            // A suspended `nsenter` would not notice the end of the program.
            let _ = send(holder.id(), Signal::SIGCONT);
            let _ = holder.wait();
        }
        self.is_frozen = false;
    }

    /// Suspends the program.
    pub fn freeze(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.is_frozen, "it is suspended already");
        send(self.process()?, Signal::SIGSTOP)?;
        self.is_frozen = true;
        Ok(())
    }

    /// Continues a suspended program.
    pub fn thaw(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(self.is_frozen, "it is not suspended");
        send(self.process()?, Signal::SIGCONT)?;
        // `nsenter` stops itself when its child is stopped, so continue it as well.
        send(self.holder.as_ref().map_or(0, Child::id), Signal::SIGCONT)?;
        self.is_frozen = false;
        Ok(())
    }
}
