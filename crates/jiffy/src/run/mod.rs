//! `jiffy run`: a fresh guest, one command, its output and exit code, and nothing left.

mod apart;
pub mod outcome;
mod place;
pub mod session;
mod streams;
mod terminal;

use crate::cli::{RunArgs, SizeArgs};
use crate::progress::Bar;
use crate::serve::engine::EngineArgs;
use anyhow::Context;
pub use apart::Apart;
use jiffy_engine::{SandboxSize, Startup};
use jiffy_host::{CreateError, EngineName, Host, Prepared, SandboxSpec, start_up};
use outcome::Outcome;
pub use place::{OwnGuest, Place, agent};
use std::collections::BTreeMap;
use std::future::Future;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Runs the command and returns its exit code. Errors are Jiffy's own.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let size = size(&args.size, &args.template)?;
    let env = environment(&args.exec.env)?;
    let host = Host::open()?;
    let (engine, prepared) = prepare(&host, args.engine, &args.template)?;
    let runtime = crate::runtime()?;
    let run = Run {
        args,
        startup: prepared.template().manifest.startup.clone(),
        size,
        env,
    };
    let outcome = runtime.block_on(run.on(engine, &host, prepared))?;
    // A thread may still wait for our standard input: the runtime must not wait for it in turn.
    runtime.shutdown_background();
    outcome.report(args.exec.json, began)
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

/// The engine as it was asked for, and the template opened; a stock one that is missing is built, with a bar.
pub fn prepare(
    host: &Host,
    engine: EngineArgs,
    template: &str,
) -> anyhow::Result<(EngineName, Prepared)> {
    // Known before anything is built for minutes in vain; an unknown template is the nearer mistake, though.
    host.knows(template)?;
    let engine = engine.choose_usable(host)?;
    let mut bar = Bar::new(template);
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

/// What is to be run.
struct Run<'a> {
    args: &'a RunArgs,
    startup: Startup,
    size: SandboxSize,
    env: BTreeMap<String, String>,
}

impl Run<'_> {
    async fn on(
        self,
        engine: EngineName,
        host: &Host,
        prepared: Prepared,
    ) -> anyhow::Result<Outcome> {
        let signals = Signals::new()?;
        let size = self.size;
        match engine {
            EngineName::MicroVm => {
                let spec = SandboxSpec {
                    size,
                    ..SandboxSpec::default()
                };
                let booting = async {
                    prepared.boot(&spec).await.map_err(|e| match e {
                        CreateError::Boot(e) => outcome::boot_failure(e),
                        e => e.into(),
                    })
                };
                self.within(booting, signals).await
            }
            EngineName::Gvisor => {
                let apart = Apart::open(host, &self.args.template, prepared).await?;
                let booting = async { Ok(apart.boot(size).await?) };
                let outcome = self.within(booting, signals).await;
                apart.close().await;
                outcome
            }
        }
    }

    /// Runs it in the guest that is booting, and ends that.
    async fn within<G: OwnGuest>(
        self,
        booting: impl Future<Output = anyhow::Result<G>>,
        mut signals: Signals,
    ) -> anyhow::Result<Outcome> {
        let guest = tokio::select! {
            booted = booting => Arc::new(booted?),
            // Nothing runs yet that could handle it: dropping the boot ends the guest.
            number = signals.next() => return Ok(Outcome::interrupted(number)),
        };
        let outcome = self.session(&guest, signals).await;
        guest.stop().await;
        outcome
    }

    async fn session<G: OwnGuest>(
        self,
        guest: &Arc<G>,
        mut signals: Signals,
    ) -> anyhow::Result<Outcome> {
        if !self.startup.is_empty() {
            let starting = guest.clone();
            let starting = start_up(&self.startup, move |port| {
                let guest = starting.clone();
                async move { guest.connect(port).await }
            });
            let started = tokio::select! {
                started = starting => started.map_err(anyhow::Error::from),
                end = guest.ended() => Err(anyhow::anyhow!(outcome::end(&end, &guest.console_tail()))),
                number = signals.next() => return Ok(Outcome::interrupted(number)),
            };
            started.with_context(|| format!("cannot start template `{}`", self.args.template))?;
        }
        let place = place::Local::new(guest.clone(), self.size.memory_mib);
        let mut outcome = session::run(&self.args.exec, &place, self.env, signals).await?;
        outcome.boot = Some(guest.report());
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_words_are_taken_apart_at_the_first_equals_sign() {
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
