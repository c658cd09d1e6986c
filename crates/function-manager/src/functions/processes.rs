//! Processes of owners: started when they are needed, restarted, ended when idle.

use super::{Functions, Owner, Shared};
use crate::blocking::blocking;
use crate::function_error::FunctionError;
use crate::function_state::FunctionState;
use crate::owner;
use crate::running_process::{ProcessUse, RunningProcess};
use crate::tenant_process::{ProcessSettings, TenantProcess};
use jiffy_confinement::GroupLimits;
use jiffy_proto::function::TenantLimits;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Memory of a process besides that of its guests, in bytes: its own, and compiled modules.
const MEMORY_OVERHEAD_BYTES: u64 = 1 << 30;
/// Threads and processes.
const MAX_TASKS: u64 = 256;
/// Maximum time for which a request waits for the next start.
const MAX_START_WAIT: Duration = Duration::from_secs(1);

impl Owner {
    fn current(&self) -> Option<Arc<RunningProcess>> {
        self.running.read().clone()
    }

    /// Ends a process; its log and counts are taken first. Blocks until it has ended.
    pub(super) fn end(&self, running: Arc<RunningProcess>, shared: &Shared) {
        running.close();
        pull(&self.states(), &running);
        self.retire(running, shared);
    }

    /// Takes a process that is over out of use. Blocks until it has ended.
    pub(super) fn retire(&self, running: Arc<RunningProcess>, shared: &Shared) {
        let id = running.process.id();
        running.process.end();
        running.close_direct();
        *self.running.write() = None;
        drop(running);
        if let Some(cgroups) = &shared.settings.cgroups {
            cgroups.remove_group(id);
        }
        for state in self.states() {
            state.end_process();
        }
    }
}

/// Takes logs and counts of functions that ran since the last time. Blocks.
fn pull(states: &[Arc<FunctionState>], running: &RunningProcess) {
    for state in states {
        if state.ran.load(Ordering::Acquire) {
            state.pull(&running.process);
        }
    }
}

impl Functions {
    /// Uses the process of an owner, which is started if it does not run.
    pub(super) async fn process(&self, owner: &Arc<Owner>) -> Result<ProcessUse, FunctionError> {
        if let Some(in_use) = usable(owner.current()) {
            return Ok(in_use);
        }
        let mut backoff = owner.starting.lock().await;
        let before = owner.current();
        if let Some(in_use) = usable(before.clone()) {
            return Ok(in_use);
        }
        if let Some(over) = before {
            backoff.ended(over.started.elapsed());
            tracing::warn!(
                owner = owner::process_owner(owner.key.as_deref()),
                "the process {} of functions has ended; it is started again",
                over.process.id()
            );
            let (owner, shared) = (owner.clone(), self.0.clone());
            blocking(move || {
                owner.retire(over, &shared);
                Ok(())
            })
            .await?;
        }
        let wait = backoff.wait();
        if wait > MAX_START_WAIT {
            let message = "their process has ended several times in a row".to_owned();
            return Err(FunctionError::Unavailable(message));
        }
        tokio::time::sleep(wait).await;
        let started = self.start(owner).await;
        if started.is_err() {
            backoff.ended(Duration::ZERO);
        }
        let running = started?;
        *owner.running.write() = Some(running.clone());
        let over = || FunctionError::Unavailable("their process has just ended".to_owned());
        running.enter().ok_or_else(over)
    }

    async fn start(&self, owner: &Arc<Owner>) -> Result<Arc<RunningProcess>, FunctionError> {
        let (owner, shared) = (owner.clone(), self.0.clone());
        let running = blocking(move || {
            let settings = &shared.settings;
            let program = settings.program.as_deref();
            let mut started = TenantProcess::start(
                &ProcessSettings {
                    program: program.ok_or(FunctionError::NotInstalled)?,
                    owner: &owner::process_owner(owner.key.as_deref()),
                    limits: settings.limits,
                    jailed: settings.jailed,
                    grace: settings.grace,
                },
                owner.store.directory(),
            )?;
            started.set_egress(settings.egress.clone());
            owner.store.prepare_engine(started.engine())?;
            Ok(RunningProcess::new(started, owner.store.directory()))
        });
        let running = Arc::new(running.await?);
        self.limit(&running);
        Ok(running)
    }

    /// Limits a process while its first request is on the way: moving one takes some 15 ms.
    fn limit(&self, running: &Arc<RunningProcess>) {
        let Some(cgroups) = self.0.settings.cgroups.clone() else {
            return;
        };
        let limits = group_limits(&self.0.settings.limits);
        let running = running.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(e) = cgroups.limit(running.process.id(), limits) {
                tracing::error!("ending a process of functions, which has no limits: {e}");
                running.close();
                running.process.kill();
            }
        });
    }

    /// Ends the process of an owner if it was idle for `idle`; its log and counts are taken first.
    async fn end_idle(&self, owner: &Arc<Owner>, running: Arc<RunningProcess>, idle: Duration) {
        // Requests wait here for the next process.
        let _starting = owner.starting.lock().await;
        if !running.close_if_idle(idle) {
            return;
        }
        let (owner, shared) = (owner.clone(), self.0.clone());
        let ended = blocking(move || {
            owner.end(running, &shared);
            Ok(())
        });
        if let Err(e) = ended.await {
            tracing::error!("{e}");
        }
    }

    /// Ends the process of an owner if it is idle, and takes logs and counts of functions that ran.
    pub(super) async fn upkeep(&self, owner: &Arc<Owner>) {
        let Some(running) = owner.current() else {
            return;
        };
        if running.process.has_ended() {
            // The next request starts another; those that wait for this one are told now.
            running.close();
            return;
        }
        let is_without_functions = owner.functions.read().is_empty();
        let idle = match is_without_functions {
            true => Duration::ZERO,
            false => self.0.settings.idle,
        };
        self.end_idle(owner, running.clone(), idle).await;
        running.mark_direct();
        let states = owner.states();
        if states.iter().any(|state| state.ran.load(Ordering::Acquire)) && !running.is_over() {
            // A failure shows as the end of the process.
            let pulled = blocking(move || {
                pull(&states, &running);
                Ok(())
            });
            let _ = pulled.await;
        }
    }

    /// Leaves the processes to the next daemon.
    pub async fn leave(&self) {
        for owner in self.owners() {
            let _starting = owner.starting.lock().await;
            let Some(running) = owner.current() else {
                continue;
            };
            running.close();
            running.close_direct();
            *owner.running.write() = None;
            // Uses of it may still hold it for a moment.
            let _ = blocking(move || {
                running.process.leave();
                Ok(())
            })
            .await;
        }
    }

    /// Ends all processes.
    pub async fn stop_all(&self) {
        for owner in self.owners() {
            let _starting = owner.starting.lock().await;
            if let Some(running) = owner.current() {
                running.close();
                let (owner, shared) = (owner.clone(), self.0.clone());
                let ended = blocking(move || {
                    owner.retire(running, &shared);
                    Ok(())
                });
                let _ = ended.await;
            }
        }
    }

    /// Process ids of the processes that run, by owner.
    #[must_use]
    pub fn process_ids(&self) -> Vec<(Option<String>, u32)> {
        let owners = self.owners().into_iter();
        let running = owners.filter_map(|owner| {
            let running = owner.current().filter(|running| !running.is_over())?;
            Some((owner.key.clone(), running.process.id()))
        });
        running.collect()
    }
}

/// Limits of a process with all that its requests and its slots may have.
fn group_limits(limits: &TenantLimits) -> GroupLimits {
    GroupLimits {
        memory_bytes: limits.memory_bytes + limits.kept_bytes() + MEMORY_OVERHEAD_BYTES,
        max_tasks: MAX_TASKS,
        swap: false,
    }
}

fn usable(running: Option<Arc<RunningProcess>>) -> Option<ProcessUse> {
    let running = running.filter(|running| !running.is_over())?;
    running.enter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_proto::function::SlotReset;

    #[test]
    fn a_group_has_room_for_what_its_reset_keeps() {
        let limits = |reset| TenantLimits {
            slots: 10,
            memory_bytes: 1 << 30,
            reset,
            ..TenantLimits::default()
        };
        let strict = group_limits(&limits(SlotReset::Strict)).memory_bytes;
        assert_eq!(strict, 2 << 30);
        let fast = group_limits(&limits(SlotReset::Fast)).memory_bytes;
        assert_eq!(fast, strict + (80 << 20));
    }
}
