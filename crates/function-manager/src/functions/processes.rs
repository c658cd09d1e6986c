//! Processes of owners: started on demand, restarted after an exit, and stopped when idle. A
//! process may outlive the daemon, and the next daemon adopts it: it continues to use the process.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway. A *slot* is address space for the memory of one instance,
//! which requests use one after the other. The *reset* cleans a slot after a request.

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

/// Part of a process's memory limit for the runtime and the compiled modules, in bytes.
/// [`TenantLimits::memory_bytes`] limits the memory of requests.
const MEMORY_OVERHEAD_BYTES: u64 = 1 << 30;
/// Maximum number of threads and processes in the control group of a process.
const MAX_TASKS: u64 = 256;
/// Maximum time for which a request waits for the next start.
const MAX_START_WAIT: Duration = Duration::from_secs(1);

impl Owner {
    fn current(&self) -> Option<Arc<RunningProcess>> {
        self.running.read().clone()
    }

    /// Reads the log and metrics of a process, and stops it. Blocks until the process has exited.
    pub(super) fn stop(&self, running: Arc<RunningProcess>, shared: &Shared) {
        running.close();
        read_from_process(&self.states(), &running);
        self.remove_process(running, shared);
    }

    /// Removes a closed process and kills it. Blocks until the process has exited.
    pub(super) fn remove_process(&self, running: Arc<RunningProcess>, shared: &Shared) {
        let id = running.process.id();
        running.process.kill_and_wait();
        // Close the connection over which the daemon passes direct connections to the process.
        running.close_direct();
        *self.running.write() = None;
        // The drop reaps the process if no request holds it any longer.
        drop(running);
        if let Some(cgroups) = &shared.settings.cgroups {
            cgroups.remove_group(id);
        }
        for state in self.states() {
            state.record_process_exit();
        }
    }
}

/// Reads the logs and metrics of functions that ran since the last pass. Blocks.
fn read_from_process(states: &[Arc<FunctionState>], running: &RunningProcess) {
    for state in states {
        if state.ran.load(Ordering::Acquire) {
            state.read_from_process(&running.process);
        }
    }
}

impl Functions {
    /// Returns a use of an owner's process, which is started if necessary.
    pub(super) async fn process(&self, owner: &Arc<Owner>) -> Result<ProcessUse, FunctionError> {
        // The common case does not wait for the lock `starting`.
        if let Some(in_use) = usable(owner.current()) {
            return Ok(in_use);
        }
        // Only one request starts the process; the others wait here and use it.
        let mut backoff = owner.starting.lock().await;
        let before = owner.current();
        if let Some(in_use) = usable(before.clone()) {
            return Ok(in_use);
        }
        if let Some(exited) = before {
            backoff.record_exit(exited.started.elapsed());
            tracing::warn!(
                owner = owner::process_owner(owner.key.as_deref()),
                pid = exited.process.id(),
                "function process has exited; restarting it"
            );
            let (owner, shared) = (owner.clone(), self.0.clone());
            blocking(move || {
                owner.remove_process(exited, &shared);
                Ok(())
            })
            .await?;
        }
        // A longer delay is reported, so that clients are not blocked.
        let wait = backoff.wait();
        if wait > MAX_START_WAIT {
            let message = "the process has exited several times in a row".to_owned();
            return Err(FunctionError::Unavailable(message));
        }
        tokio::time::sleep(wait).await;
        let started = self.start(owner).await;
        if started.is_err() {
            backoff.record_exit(Duration::ZERO);
        }
        let running = started?;
        *owner.running.write() = Some(running.clone());
        // The process may have exited since its start.
        let exited = || FunctionError::Unavailable("the process has just exited".to_owned());
        running.enter().ok_or_else(exited)
    }

    /// Starts the process of an owner. The caller must hold the lock `starting`.
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

    /// Moves a process into its control group. This takes about 15 ms, and runs concurrently with
    /// the first request of the process.
    fn limit(&self, running: &Arc<RunningProcess>) {
        let Some(cgroups) = self.0.settings.cgroups.clone() else {
            return;
        };
        let limits = group_limits(&self.0.settings.limits);
        let running = running.clone();
        tokio::task::spawn_blocking(move || {
            // A process without limits must not continue to run.
            if let Err(e) = cgroups.limit(running.process.id(), limits) {
                let pid = running.process.id();
                tracing::error!(pid, error = %e, "cannot limit a function process; killing it");
                running.close();
                running.process.kill();
            }
        });
    }

    /// Stops the process of an owner if it was idle for `idle`, after reading its log and metrics.
    async fn end_idle(&self, owner: &Arc<Owner>, running: Arc<RunningProcess>, idle: Duration) {
        // Requests wait for this lock before they start the next process.
        let _starting = owner.starting.lock().await;
        // After this call, no request can start to use the process.
        if !running.close_if_idle(idle) {
            return;
        }
        let (owner, shared) = (owner.clone(), self.0.clone());
        let pid = running.process.id();
        let ended = blocking(move || {
            owner.stop(running, &shared);
            Ok(())
        });
        if let Err(e) = ended.await {
            tracing::error!(pid, error = %e, "cannot stop an idle function process");
        }
    }

    /// Stops the process of an owner if it is idle. Otherwise reads the logs and metrics of
    /// functions that ran.
    pub(super) async fn maintain_process(&self, owner: &Arc<Owner>) {
        let Some(running) = owner.current() else {
            return;
        };
        if running.process.has_exited() {
            // Reject further uses. The next request removes this process and starts another one.
            running.close();
            return;
        }
        // A failed deployment can leave a process without functions.
        let is_without_functions = owner.functions.read().is_empty();
        let idle = if is_without_functions {
            Duration::ZERO
        } else {
            self.0.settings.idle
        };
        self.end_idle(owner, running.clone(), idle).await;
        // The daemon does not see requests of direct connections. Functions with such connections
        // therefore count as run.
        running.mark_direct();
        let states = owner.states();
        if states.iter().any(|state| state.ran.load(Ordering::Acquire)) && !running.is_over() {
            // A process that does not answer is killed, which the next pass detects.
            let pulled = blocking(move || {
                read_from_process(&states, &running);
                Ok(())
            });
            let _ = pulled.await;
        }
    }

    /// Detaches the processes, so that the next daemon can adopt them.
    pub async fn detach_all(&self) {
        for owner in self.owners() {
            // The lock prevents requests from starting another process meanwhile.
            let _starting = owner.starting.lock().await;
            let Some(running) = owner.current() else {
                continue;
            };
            running.close();
            // The process closes its direct connections, each after the request in flight.
            running.close_direct();
            *owner.running.write() = None;
            // The last reference would kill the process when it is dropped. Other uses may still
            // hold references, so the process is marked as detached, which prevents the kill.
            let _ = blocking(move || {
                // The process survives the daemon: the next daemon finds it by its record.
                running.process.detach();
                Ok(())
            })
            .await;
        }
    }

    /// Stops all processes.
    pub async fn stop_all(&self) {
        for owner in self.owners() {
            let _starting = owner.starting.lock().await;
            if let Some(running) = owner.current() {
                running.close();
                let (owner, shared) = (owner.clone(), self.0.clone());
                let ended = blocking(move || {
                    owner.remove_process(running, &shared);
                    Ok(())
                });
                // The closure returns no error; the task fails only at shutdown.
                let _ = ended.await;
            }
        }
    }

    /// Returns the ids of running processes by owner.
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

/// Returns the limits of a process, including the memory of its requests and slots.
fn group_limits(limits: &TenantLimits) -> GroupLimits {
    GroupLimits {
        // The reset `fast` retains pages in idle slots, in addition to the memory of requests.
        memory_bytes: limits.memory_bytes + limits.retained_bytes() + MEMORY_OVERHEAD_BYTES,
        max_tasks: MAX_TASKS,
        swap: false,
    }
}

/// Counts a use of a process. `None` if the process does not run or is about to stop.
fn usable(running: Option<Arc<RunningProcess>>) -> Option<ProcessUse> {
    let running = running.filter(|running| !running.is_over())?;
    running.enter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_proto::function::SlotReset;

    #[test]
    fn the_memory_limit_includes_pages_that_the_reset_retains() {
        let limits = |reset| TenantLimits {
            slots: 10,
            memory_bytes: 1 << 30,
            reset,
            ..TenantLimits::default()
        };
        let strict = group_limits(&limits(SlotReset::Strict)).memory_bytes;
        assert_eq!(strict, 2 << 30);
        let fast = group_limits(&limits(SlotReset::Fast)).memory_bytes;
        // 10 slots of 2 memories, each of which retains up to 4 MiB.
        assert_eq!(fast, strict + (80 << 20));
    }
}
