//! [`UnassignedMicroVm`]: a restored microVM that has no identity yet. A warm pool holds such
//! guests ready.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used.

use crate::boot_error::{BOOT_TIMEOUT, BootError};
use crate::boot_steps::BootStep;
use crate::vm::MicroVm;
use crate::vm::restore::RestoreSpec;
use jiffy_engine_api::steps::{self, StepGuard};
use jiffy_proto::agent::Identity;
use std::time::Instant;
use tokio::sync::mpsc;

/// Restored guest whose agent has greeted and waits for its identity, or is taking it. The guest
/// must not be used before [`Self::assign_identity`] because it still has the identity of the
/// snapshot. Dropping it terminates the guest.
#[derive(Debug)]
pub struct UnassignedMicroVm {
    vm: MicroVm,
    /// Steps of the boot after the greeting.
    steps: mpsc::Receiver<BootStep>,
    /// Identity that was sent to the agent when it greeted.
    sent_identity: Option<Identity>,
}

impl MicroVm {
    /// Starts a VMM, restores the guest, and returns when its agent has greeted. If `sent_identity`
    /// is given, it is sent to the agent at once. The identity in `spec` is ignored.
    pub async fn restore_unassigned(
        spec: RestoreSpec,
        sent_identity: Option<Identity>,
    ) -> Result<UnassignedMicroVm, BootError> {
        let mut step = steps::begin("spawn");
        let (mut vm, mut boot) = Self::begin_restore(&spec, sent_identity.clone())?;
        step.next("restore");
        vm.wait_for_hello_in_time(&mut boot, &mut step).await?;
        Ok(UnassignedMicroVm {
            vm,
            steps: boot,
            sent_identity,
        })
    }

    /// Waits for the first message of the agent, for at most [`BOOT_TIMEOUT`].
    async fn wait_for_hello_in_time(
        &mut self,
        steps: &mut mpsc::Receiver<BootStep>,
        step: &mut StepGuard,
    ) -> Result<(), BootError> {
        let result = tokio::time::timeout(BOOT_TIMEOUT, self.wait_for_hello(steps, step)).await;
        result.unwrap_or_else(|_| {
            Err(BootError::Timeout {
                console: self.console_tail(),
            })
        })
    }

    /// Waits until the agent has sent its greeting, after which it waits for an identity.
    async fn wait_for_hello(
        &mut self,
        steps: &mut mpsc::Receiver<BootStep>,
        step: &mut StepGuard,
    ) -> Result<(), BootError> {
        loop {
            match steps.recv().await {
                Some(BootStep::Hello { hello }) => {
                    self.context.lock().await.hello = Some(hello);
                    return Ok(());
                }
                Some(BootStep::Running) => step.next("greeting"),
                // Confirmation of an identity that was withdrawn meanwhile.
                Some(BootStep::Ready { greeted: Ok(_), .. }) => {}
                Some(BootStep::Ready {
                    greeted: Err(source),
                    ..
                }) => {
                    return Err(BootError::Greeting {
                        source,
                        console: self.console_tail(),
                    });
                }
                None => {
                    return Err(BootError::Ended {
                        end: self.ended().await,
                        console: self.console_tail(),
                    });
                }
            }
        }
    }
}

impl UnassignedMicroVm {
    /// Returns whether the guest still waits. An ended guest does not.
    pub fn is_waiting(&self) -> bool {
        self.vm.end().is_none()
    }

    /// Assigns the identity and returns when it is in effect. Does not send the identity again if
    /// the agent received it when it greeted.
    pub async fn assign_identity(mut self, identity: Identity) -> Result<MicroVm, BootError> {
        let mut step = steps::begin("identity");
        let requested_at = Instant::now();
        let is_sent = match self.sent_identity.take() {
            None => false,
            // Compare the identities without their entropy, which is always new.
            Some(mut sent) => {
                sent.entropy.clone_from(&identity.entropy);
                let is_same = sent == identity;
                if !is_same {
                    self.withdraw_identity().await?;
                }
                is_same
            }
        };
        if !is_sent {
            self.vm.set_identity(identity);
        }
        let Self {
            mut vm, mut steps, ..
        } = self;
        vm.wait_until_up_in_time(requested_at, &mut steps, &mut step)
            .await?;
        Ok(vm)
    }

    /// Assigns `identity` temporarily, so that the guest can be used once before its first real
    /// use. The pages that this use touches are private to the guest afterwards.
    /// [`Self::withdraw_identity`] must be called before the final identity is assigned.
    pub async fn rehearse(&mut self, identity: Identity) -> Result<&MicroVm, BootError> {
        self.vm.set_identity(identity);
        let mut step = steps::begin("rehearsal");
        let up = self
            .vm
            .wait_until_up_in_time(Instant::now(), &mut self.steps, &mut step);
        up.await?;
        Ok(&self.vm)
    }

    /// Withdraws the identity of the rehearsal, or the identity that was sent when the agent
    /// greeted. Returns when the agent has sent a new greeting. The agent closes all of its
    /// connections.
    pub async fn withdraw_identity(&mut self) -> Result<(), BootError> {
        self.vm.withdraw_identity().await;
        let mut step = steps::begin("greeting");
        self.vm
            .wait_for_hello_in_time(&mut self.steps, &mut step)
            .await
    }
}
