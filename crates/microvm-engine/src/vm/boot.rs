//! Boot of a guest, from the start of its VMM to the agent's confirmation.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used.

use super::MicroVm;
use super::launch::{LaunchSpec, console_ring};
use crate::boot_error::{BOOT_TIMEOUT, BootError};
use crate::boot_steps::BootStep;
use crate::host_kvm;
use crate::spec::BootSpec;
use crate::vmm_limits::VmmLimits;
use jiffy_engine_api::steps::{self, StepGuard};
use jiffy_engine_api::{BootMode, BootReport};
use jiffy_proto::vm::Request;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

impl MicroVm {
    /// Starts a VMM, boots the guest, and returns when its agent has taken its identity.
    pub async fn boot(mut spec: BootSpec) -> Result<Self, BootError> {
        let requested_at = Instant::now();
        let parent = spec.disk.as_mut().and_then(|disk| disk.parent.take());
        let mut step = steps::begin("spawn");
        let kvm = host_kvm::open()?;
        let console = console_ring()?;
        let host = |source| BootError::Host {
            what: "cannot duplicate a descriptor",
            source,
        };
        let shared = console.fd().try_clone_to_owned().map_err(host)?;
        let boot = spec.request(&kvm, shared.as_fd());
        let request = Request::Start(Box::new(boot.config));
        let launch = LaunchSpec {
            vmm: &spec.vmm,
            limits: VmmLimits {
                memory: u64::from(spec.size.memory_mib) << 20,
            },
            identity: Some(spec.identity.clone()),
            mode: BootMode::Cold,
            parent,
            net: spec.net.is_some(),
            modules: spec.modules.as_ref().map(|image| image.sha256.clone()),
        };
        let overlay = spec.overlay.try_clone().map_err(host)?;
        let (mut vm, mut steps) = Self::launch(launch, &request, &boot.fds, console, overlay)?;
        drop(boot.fds);
        step.next("start");
        vm.wait_until_up_in_time(requested_at, &mut steps, &mut step)
            .await?;
        Ok(vm)
    }

    /// Waits until the agent has its identity, for at most [`BOOT_TIMEOUT`], and then until the VMM
    /// is limited.
    pub(crate) async fn wait_until_up_in_time(
        &mut self,
        requested_at: Instant,
        steps: &mut mpsc::Receiver<BootStep>,
        step: &mut StepGuard,
    ) -> Result<(), BootError> {
        let up = self.wait_until_up(requested_at, steps, step);
        match tokio::time::timeout(BOOT_TIMEOUT, up).await {
            Ok(report) => {
                self.report = report?;
                self.wait_for_limits().await
            }
            Err(_) => Err(BootError::Timeout {
                console: self.console_tail(),
            }),
        }
    }

    /// Waits until the VMM is in its control groups.
    async fn wait_for_limits(&mut self) -> Result<(), BootError> {
        // Without a task, the process is not limited, or was limited already.
        let Some(limit_task) = self.limit_task.take() else {
            return Ok(());
        };
        let done = limit_task.await.map_err(|e| BootError::Host {
            what: "cannot limit the VMM",
            source: io::Error::other(e),
        })?;
        Ok(done?)
    }

    /// Waits until the agent has confirmed the guest's identity. Returns the durations of the
    /// steps.
    async fn wait_until_up(
        &mut self,
        requested_at: Instant,
        steps: &mut mpsc::Receiver<BootStep>,
        step: &mut StepGuard,
    ) -> Result<BootReport, BootError> {
        let mut running = requested_at;
        let mut hello = None;
        loop {
            match steps.recv().await {
                Some(BootStep::Running) => {
                    step.next("greeting");
                    running = Instant::now();
                }
                Some(BootStep::Hello { hello: agent_hello }) => {
                    step.next("identity");
                    // The clock of a restored guest counts from its original boot, so its times are
                    // meaningless here.
                    let init_us = match self.report.mode {
                        BootMode::Cold => agent_hello.hello_us.saturating_sub(agent_hello.init_us),
                        _ => 0,
                    };
                    hello = Some((Instant::now(), init_us));
                    self.context.lock().await.hello = Some(agent_hello);
                }
                // Confirmation of an identity that was withdrawn meanwhile.
                Some(BootStep::Ready { id: Some(id), .. }) if !self.has_identity(&id) => {}
                Some(BootStep::Ready {
                    greeted: Ok(greeting),
                    ..
                }) => {
                    self.context.lock().await.greeting = greeting;
                    // `hello` is `None` if the guest greeted earlier, for example while unassigned.
                    let (hello_at, init_us) = hello.unwrap_or((Instant::now(), 0));
                    let to_hello = micros(hello_at - running);
                    // The two clocks may differ slightly, so the guest's time must not exceed the
                    // host's.
                    let init_us = init_us.min(to_hello);
                    let vmm_us = micros(running - requested_at);
                    let agent_us = micros(hello_at.elapsed());
                    return Ok(BootReport {
                        mode: self.report.mode,
                        vmm_us,
                        kernel_us: to_hello - init_us,
                        init_us,
                        agent_us,
                        total_us: vmm_us + to_hello + agent_us,
                    });
                }
                Some(BootStep::Ready {
                    greeted: Err(source),
                    ..
                }) => {
                    return Err(BootError::Greeting {
                        source,
                        console: self.console_tail(),
                    });
                }
                // The driver dropped the sender: the VMM has exited.
                None => {
                    let end = self.ended().await;
                    return Err(BootError::Ended {
                        end,
                        console: self.console_tail(),
                    });
                }
            }
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
