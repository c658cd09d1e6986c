//! MicroVM without an identity.

use crate::boot_error::{BOOT_TIMEOUT, BootError};
use crate::boot_steps::BootStep;
use crate::restore::RestoreSpec;
use crate::vm::MicroVm;
use jiffy_engine_api::steps::{self, StepGuard};
use jiffy_proto::agent::Identity;
use std::time::Instant;
use tokio::sync::mpsc;

/// Restored guest whose agent has greeted and waits for its identity, or is taking it. It must not
/// be used before [`Self::assign_identity`], because it still has the identity of the snapshot.
/// Dropping it ends it.
#[derive(Debug)]
pub struct UnassignedMicroVm {
    vm: MicroVm,
    /// Steps of its boot, from the greeting on.
    steps: mpsc::Receiver<BootStep>,
    /// Identity that the agent was given when it greeted.
    known: Option<Identity>,
}

impl MicroVm {
    /// Starts a VMM, restores the guest, and returns when its agent has greeted. It is given
    /// `known` at once; the identity in `spec` is not sent.
    pub async fn restore_unassigned(
        spec: RestoreSpec,
        known: Option<Identity>,
    ) -> Result<UnassignedMicroVm, BootError> {
        let mut step = steps::begin("spawn");
        let (mut vm, mut boot) = Self::begin_restore(&spec, known.clone())?;
        step.next("restore");
        vm.wait_for_hello_in_time(&mut boot, &mut step).await?;
        Ok(UnassignedMicroVm {
            vm,
            steps: boot,
            known,
        })
    }

    async fn wait_for_hello_in_time(
        &mut self,
        steps: &mut mpsc::Receiver<BootStep>,
        step: &mut StepGuard,
    ) -> Result<(), BootError> {
        let heard = tokio::time::timeout(BOOT_TIMEOUT, self.wait_for_hello(steps, step)).await;
        heard.unwrap_or_else(|_| {
            Err(BootError::Timeout {
                console: self.console_tail(),
            })
        })
    }

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
                // An identity that is ready was taken back since.
                Some(BootStep::Running) => step.next("greeting"),
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
    /// Returns true if it still waits; an ended guest does not.
    pub fn is_waiting(&self) -> bool {
        self.vm.end().is_none()
    }

    /// Sends the agent its identity, unless it was given that when it greeted; returns when it is
    /// in effect.
    pub async fn assign_identity(mut self, identity: Identity) -> Result<MicroVm, BootError> {
        let mut step = steps::begin("identity");
        let asked = Instant::now();
        let is_known = match self.known.take() {
            None => false,
            // Apart from their fresh entropy.
            Some(mut known) => {
                known.entropy.clone_from(&identity.entropy);
                let is_same = known == identity;
                if !is_same {
                    self.wait_again().await?;
                }
                is_same
            }
        };
        if !is_known {
            self.vm.set_identity(identity);
        }
        let Self {
            mut vm, mut steps, ..
        } = self;
        vm.wait_until_up_in_time(asked, &mut steps, &mut step)
            .await?;
        Ok(vm)
    }

    /// Gives the agent `identity` for a while, so that the guest can be used once before its first
    /// real use: the pages that this touches are its own afterwards. [`Self::wait_again`] must
    /// follow before it is assigned its identity.
    pub async fn rehearse(&mut self, identity: Identity) -> Result<&MicroVm, BootError> {
        self.vm.set_identity(identity);
        let mut step = steps::begin("rehearsal");
        let up = self
            .vm
            .wait_until_up_in_time(Instant::now(), &mut self.steps, &mut step);
        up.await?;
        Ok(&self.vm)
    }

    /// Takes the identity of the rehearsal back, and returns when the agent has greeted anew. It
    /// keeps none of its connections.
    pub async fn wait_again(&mut self) -> Result<(), BootError> {
        self.vm.take_identity_back().await;
        let mut step = steps::begin("greeting");
        self.vm
            .wait_for_hello_in_time(&mut self.steps, &mut step)
            .await
    }
}
