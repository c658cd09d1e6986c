//! `jiffy run`: runs a command in a new sandbox and removes the sandbox afterwards.
//!
//! The sandbox belongs to a daemon (`remote.rs`) or is a child of this process (`local.rs`).
//! `source.rs` selects between the two.

mod command_target;
pub mod ephemeral;
mod local;
pub mod outcome;
mod publish;
mod remote;
pub mod session;
mod source;
mod streams;
mod terminal;
mod volume;

use crate::cli::EngineArgs;
use crate::cli::{RunArgs, SizeArgs};
use anyhow::Context;
pub use command_target::{CommandTarget, agent};
use jiffy_daemon::TemplateProgress;
use jiffy_engine_api::{EngineName, SandboxSize};
use jiffy_engines::{Host, PreparedTemplate};
use outcome::Outcome;
use publish::Listeners;
use source::GuestSource;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;
pub use terminal::size as terminal_size;
use tokio::signal::unix::{Signal, SignalKind, signal};
use volume::Volumes;

/// Runs the command and returns its exit code. An error is a failure of Jiffy, not of the command.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    check_size(&args.size)?;
    let env = environment(&args.exec.env)?;
    let runtime = crate::runtime()?;
    let prepared = PreparedCommand {
        args,
        env,
        // Volumes are read before the guest is created, so that invalid arguments are reported
        // early.
        volumes: Volumes::open(&args.volumes)?,
        listeners: runtime.block_on(Listeners::open(&args.publish))?,
    };
    let outcome = match runtime.block_on(source::choose(args))? {
        GuestSource::Daemon { client, engine } => {
            runtime.block_on(remote::run(prepared, &client, engine))
        }
        GuestSource::ThisProcess => local::run(prepared, &runtime),
    };
    // Dropping the runtime would wait for its blocking tasks, for example for an interrupted copy
    // of a volume. The thread that reads standard input is not such a task, and ends with the
    // process.
    runtime.shutdown_background();
    outcome?.report(args.exec.json, start)
}

/// Command with its environment, volumes and ports.
struct PreparedCommand<'a> {
    args: &'a RunArgs,
    env: BTreeMap<String, String>,
    volumes: Volumes,
    listeners: Listeners,
}

impl PreparedCommand<'_> {
    /// Runs the command in a booted guest. Copies volumes to the guest before the command and back
    /// afterwards, and forwards ports while the command runs.
    async fn run_in(
        self,
        target: &impl CommandTarget,
        signals: &mut Signals,
    ) -> anyhow::Result<Outcome> {
        let Self {
            args,
            env,
            volumes,
            listeners,
        } = self;
        let (agent, user) = (target.agent(), args.exec.user.as_deref());
        if !volumes.is_empty() {
            tokio::select! {
                result = volumes.copy_in(&agent, user) => result?,
                number = signals.next() => return Ok(Outcome::interrupted(number)),
            }
        }
        // Connections from now on reach the guest; earlier connections wait in the kernel's queue.
        let published = listeners.forward_to(&target.ports());
        let mut outcome = session::run(&args.exec, target, env, signals).await?;
        published.close().await;
        if !volumes.are_copied_back() {
            return Ok(outcome);
        }
        // An unfinished command has neither exited nor been killed by the agent at its timeout. It
        // may still write, so the guest's files may be incomplete, and are not copied.
        let result = if outcome.finished {
            tokio::select! {
                result = volumes.copy_back(&agent, user) => result,
                _ = signals.next() => Err(anyhow::anyhow!("interrupted while volumes were copied back")),
            }
        } else {
            Err(anyhow::anyhow!("no volume was copied back"))
        };
        if let Err(e) = result {
            // The failure must not hide the exit status of the command: the message retains the
            // code that the failure replaces. An outcome that is not finished already has the code
            // of another failure or of a signal.
            let message = outcome
                .message
                .take()
                .unwrap_or_else(|| format!("the command exited with {}", outcome.code));
            outcome.message = Some(format!("{message}; {e:#}"));
            if outcome.finished {
                outcome.code = crate::FAILURE_EXIT_CODE;
            }
        }
        Ok(outcome)
    }
}

/// Returns the size in the arguments. Missing values default to `default`.
fn resolve_size(args: &SizeArgs, default: SandboxSize) -> SandboxSize {
    SandboxSize {
        vcpus: args.cpus.unwrap_or(default.vcpus),
        memory_mib: args.memory.unwrap_or(default.memory_mib),
        disk_mib: args.disk.unwrap_or(default.disk_mib),
    }
}

/// Checks the limits of the size in the arguments.
pub fn check_size(args: &SizeArgs) -> anyhow::Result<()> {
    Ok(resolve_size(args, SandboxSize::default()).check()?)
}

/// Returns the size in the arguments. Missing values default to the size of the template.
pub fn size(args: &SizeArgs, template: &str) -> anyhow::Result<SandboxSize> {
    // An invalid size is reported before a missing template.
    check_size(args)?;
    Ok(resolve_size(args, Host::open()?.default_size(template)?))
}

/// Selects the engine and opens the template. Builds a missing stock template, with a progress bar.
pub fn prepare(
    host: &Host,
    engine: EngineArgs,
    template: &str,
) -> anyhow::Result<(EngineName, PreparedTemplate)> {
    // An unusable engine is reported before a build that takes minutes, and an unknown template
    // before an unusable engine.
    host.check_template(template)?;
    let engine = engine.choose_usable(host)?;
    let mut bar = TemplateProgress::new(template);
    let prepared = host
        .prepare(template, &mut |p| bar.update(p))
        .with_context(|| format!("cannot open template `{template}`"))?;
    Ok((engine, prepared))
}

/// Parses environment options: `KEY=VALUE`, or `KEY` for the value in the environment of this
/// process.
pub fn environment(options: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    let mut env = BTreeMap::new();
    for option in options {
        let (key, value) = match option.split_once('=') {
            Some((key, value)) => (key, value.to_owned()),
            // As in `docker run`: a variable that is not set is omitted.
            None => match std::env::var(option) {
                Ok(value) => (option.as_str(), value),
                Err(std::env::VarError::NotPresent) => continue,
                Err(e) => anyhow::bail!("-e {option}: {e}"),
            },
        };
        anyhow::ensure!(
            !key.is_empty() && !key.contains('\0') && !value.contains('\0'),
            "invalid environment variable `{option}`: use KEY=VALUE with a name that is not empty, and \
             without NUL bytes"
        );
        env.insert(key.to_owned(), value);
    }
    Ok(env)
}

/// Signals that are forwarded to the command. From the creation of this value on, they no longer
/// terminate this process.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    /// Starts to capture the signals.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal and returns its number.
    pub async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => libc::SIGINT,
            _ = self.terminate.recv() => libc::SIGTERM,
            _ = self.hang_up.recv() => libc::SIGHUP,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_options_are_split_at_the_first_equals_sign() {
        let words = [
            "A=1".to_owned(),
            "B=x=y".to_owned(),
            "C=".to_owned(),
            "NO_SUCH_VARIABLE_HERE".to_owned(),
        ];
        let env = environment(&words).unwrap();
        let pairs: Vec<(&str, &str)> = env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(pairs, [("A", "1"), ("B", "x=y"), ("C", "")]);
        assert!(environment(&["=x".to_owned()]).is_err());
    }
}
