//! `jiffy run`: a fresh guest, one command, its output and exit code, and nothing left.

pub mod outcome;
mod place;
pub mod session;
mod streams;
mod terminal;

use crate::cli::{RunArgs, SizeArgs};
use crate::progress::Bar;
use anyhow::Context;
use jiffy_engine::SandboxSize;
use jiffy_host::{CreateError, Host, Prepared, SandboxSpec, start_up};
use jiffy_microvm::host_kvm;
use outcome::Outcome;
pub use place::Place;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Runs the command and returns its exit code. Errors are Jiffy's own.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let size = size(&args.size, &args.template)?;
    let spec = SandboxSpec {
        size,
        ..SandboxSpec::default()
    };
    let env = environment(&args.exec.env)?;
    let prepared = prepare(&args.template)?;
    let runtime = crate::runtime()?;
    let outcome = runtime.block_on(boot_and_run(args, &prepared, spec, env))?;
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

pub fn prepare(template: &str) -> anyhow::Result<Prepared> {
    // Known before anything is built for minutes in vain; an unknown template is the nearer mistake, though.
    let host = Host::open()?;
    host.knows(template)?;
    host_kvm::open()?;
    let mut bar = Bar::new(template);
    host.prepare(template, &mut |p| bar.update(p))
        .with_context(|| format!("cannot use template `{template}`"))
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

async fn boot_and_run(
    args: &RunArgs,
    prepared: &Prepared,
    spec: SandboxSpec,
    env: BTreeMap<String, String>,
) -> anyhow::Result<Outcome> {
    let mut signals = Signals::new()?;
    let booted = tokio::select! {
        booted = prepared.boot(&spec) => booted,
        // Nothing runs yet that could handle it: dropping the boot ends the guest.
        number = signals.next() => return Ok(Outcome::interrupted(number)),
    };
    let vm = booted.map_err(|e| match e {
        CreateError::Boot(e) => outcome::boot_failure(e),
        e => e.into(),
    })?;
    let startup = &prepared.template().manifest.startup;
    if !startup.is_empty() {
        let connector = vm.connector();
        let starting = start_up(startup, move |port| {
            let connector = connector.clone();
            async move { connector.connect(port).await.map_err(std::io::Error::other) }
        });
        let started = tokio::select! {
            started = starting => started.map_err(anyhow::Error::from),
            end = vm.ended() => Err(anyhow::anyhow!(outcome::end(&end, &vm.console_tail()))),
            number = signals.next() => {
                vm.stop().await;
                return Ok(Outcome::interrupted(number));
            }
        };
        if let Err(e) = started {
            vm.stop().await;
            return Err(e.context(format!("cannot start template `{}`", args.template)));
        }
    }
    let mut outcome = session::run(
        &args.exec,
        &place::Local::new(&vm, spec.size.memory_mib),
        env,
        signals,
    )
    .await;
    if let Ok(outcome) = &mut outcome {
        outcome.boot = Some(vm.report());
    }
    vm.stop().await;
    outcome
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
