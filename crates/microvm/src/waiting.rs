//! A microVM whose agent waits to be told who it is.

use crate::driver::Step;
use crate::restore::RestoreSpec;
use crate::vm::{BOOT_LIMIT, BootError, MicroVm};
use jiffy_proto::agent::Identity;
use std::time::Instant;
use tokio::sync::mpsc;

/// A restored guest that has greeted and is nobody yet: whatever it was before the snapshot, it must not be used before
/// [`Self::welcome`]. Dropping it ends it.
#[derive(Debug)]
pub struct Waiting {
    vm: MicroVm,
    /// What happens on its way up, from the greeting on.
    steps: mpsc::Receiver<Step>,
}

impl MicroVm {
    /// Starts a VMM, restores the guest, and returns when its agent has greeted. The identity in `spec` is not told to it.
    pub async fn restore_waiting(spec: RestoreSpec) -> Result<Waiting, BootError> {
        let (mut vm, mut steps) = Self::begin_restore(&spec, None)?;
        vm.hear_hello_in_time(&mut steps).await?;
        Ok(Waiting { vm, steps })
    }

    async fn hear_hello_in_time(
        &mut self,
        steps: &mut mpsc::Receiver<Step>,
    ) -> Result<(), BootError> {
        let heard = tokio::time::timeout(BOOT_LIMIT, self.hear_hello(steps)).await;
        heard.unwrap_or_else(|_| {
            Err(BootError::Timeout {
                console: self.console_tail(),
            })
        })
    }

    async fn hear_hello(&mut self, steps: &mut mpsc::Receiver<Step>) -> Result<(), BootError> {
        loop {
            match steps.recv().await {
                Some(Step::Hello { hello }) => {
                    self.saving.lock().await.hello = Some(hello);
                    return Ok(());
                }
                // An identity that is ready was taken back since.
                Some(Step::Running | Step::Ready { greeted: Ok(_), .. }) => {}
                Some(Step::Ready {
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

impl Waiting {
    /// Whether it still waits; one that has ended does not.
    pub fn waits(&self) -> bool {
        self.vm.end().is_none()
    }

    /// Tells the agent who it is and returns when that is in force.
    pub async fn welcome(self, identity: Identity) -> Result<MicroVm, BootError> {
        let asked = Instant::now();
        let Self { mut vm, mut steps } = self;
        vm.tell(identity);
        vm.come_up_in_time(asked, &mut steps).await?;
        Ok(vm)
    }

    /// Tells the agent to be `identity` for a while, so that the guest can be used once before its
    /// first real use: the pages that this touches are its own afterwards. [`Self::wait_again`] must
    /// follow before it is welcomed.
    pub async fn rehearse(&mut self, identity: Identity) -> Result<&MicroVm, BootError> {
        self.vm.tell(identity);
        let up = self.vm.come_up_in_time(Instant::now(), &mut self.steps);
        up.await?;
        Ok(&self.vm)
    }

    /// Takes the identity of the rehearsal back, and returns when the agent has greeted anew. It
    /// keeps none of its connections.
    pub async fn wait_again(&mut self) -> Result<(), BootError> {
        self.vm.untell().await;
        self.vm.hear_hello_in_time(&mut self.steps).await
    }
}
