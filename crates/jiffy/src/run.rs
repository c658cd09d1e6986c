//! `jiffy run`: a fresh guest, one command, its output and exit code, and nothing left.
//!
//! With a daemon the guest is a sandbox of its (`remote.rs`), else it is a child of this
//! process; `source.rs` decides.

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
use tokio::signal::unix::{Signal, SignalKind, signal};
use volume::Volumes;

/// Runs the command and returns its exit code. Errors are Jiffy's own.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    check_size(&args.size)?;
    let env = environment(&args.exec.env)?;
    let runtime = crate::runtime()?;
    let prepared = PreparedCommand {
        args,
        env,
        // Looked at before there is a guest: mistakes in them are the nearer ones.
        volumes: Volumes::open(&args.volumes)?,
        listeners: runtime.block_on(Listeners::open(&args.publish))?,
    };
    let outcome = match runtime.block_on(source::choose(args))? {
        GuestSource::Daemon { client, engine } => {
            runtime.block_on(remote::run(prepared, &client, engine))
        }
        GuestSource::ThisProcess => local::run(prepared, &runtime),
    };
    // A thread may still wait for our standard input: the runtime must not wait for it in turn.
    runtime.shutdown_background();
    outcome?.report(args.exec.json, began)
}

/// A command with all that is to be around it.
struct PreparedCommand<'a> {
    args: &'a RunArgs,
    env: BTreeMap<String, String>,
    volumes: Volumes,
    listeners: Listeners,
}

impl PreparedCommand<'_> {
    /// Runs the command in a guest that is ready: volumes are copied into it before and back
    /// afterwards, and ports lead into it meanwhile.
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
                copied = volumes.copy_in(&agent, user) => copied?,
                number = signals.next() => return Ok(Outcome::interrupted(number)),
            }
        }
        let published = listeners.forward_to(&target.ports());
        let mut outcome = session::run(&args.exec, target, env, signals).await?;
        published.close().await;
        if !volumes.are_copied_back() {
            return Ok(outcome);
        }
        let back = match outcome.finished {
            true => tokio::select! {
                copied = volumes.copy_back(&agent, user) => copied,
                _ = signals.next() => Err(anyhow::anyhow!("interrupted while volumes were copied back")),
            },
            false => Err(anyhow::anyhow!("no volume was copied back")),
        };
        if let Err(e) = back {
            let before = outcome.message.take();
            let before =
                before.unwrap_or_else(|| format!("the command ended with {}", outcome.code));
            outcome.message = Some(format!("{before}; {e:#}"));
            if outcome.finished {
                outcome.code = crate::FAILURE_EXIT_CODE;
            }
        }
        Ok(outcome)
    }
}

/// The size asked for, with what of `usual` is not.
fn sized(args: &SizeArgs, usual: SandboxSize) -> SandboxSize {
    SandboxSize {
        vcpus: args.cpus.unwrap_or(usual.vcpus),
        memory_mib: args.memory.unwrap_or(usual.memory_mib),
        disk_mib: args.disk.unwrap_or(usual.disk_mib),
    }
}

/// Refuses sizes out of bounds.
pub fn check_size(args: &SizeArgs) -> anyhow::Result<()> {
    Ok(sized(args, SandboxSize::default()).check()?)
}

/// The size asked for; what is not asked for is the template's to say.
pub fn size(args: &SizeArgs, template: &str) -> anyhow::Result<SandboxSize> {
    // A size out of bounds is the nearer mistake than a template that is not there.
    check_size(args)?;
    Ok(sized(args, Host::open()?.default_size(template)?))
}

/// The engine as it was asked for, and the template opened; a stock one that is missing is built,
/// with a bar.
pub fn prepare(
    host: &Host,
    engine: EngineArgs,
    template: &str,
) -> anyhow::Result<(EngineName, PreparedTemplate)> {
    // Known before anything is built for minutes in vain; an unknown template is the nearer
    // mistake, though.
    host.knows(template)?;
    let engine = engine.choose_usable(host)?;
    let mut bar = TemplateProgress::new(template);
    let prepared = host
        .prepare(template, &mut |p| bar.update(p))
        .with_context(|| format!("cannot use template `{template}`"))?;
    Ok((engine, prepared))
}

/// `KEY=VALUE` as it is, `KEY` from our own environment.
pub fn environment(given: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    let mut env = BTreeMap::new();
    for word in given {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) => (key, value.to_owned()),
            None => match std::env::var(word) {
                Ok(value) => (word.as_str(), value),
                Err(std::env::VarError::NotPresent) => continue,
                Err(e) => anyhow::bail!("-e {word}: {e}"),
            },
        };
        anyhow::ensure!(
            !key.is_empty() && !key.contains('\0') && !value.contains('\0'),
            "-e {word}: write it as KEY=VALUE"
        );
        env.insert(key.to_owned(), value);
    }
    Ok(env)
}

/// Signals that are the command's to handle, from the moment we begin.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    /// From now on.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// The number of the next one.
    async fn next(&mut self) -> i32 {
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
