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
        match tokio::time::timeout(BOOT_LIMIT, vm.hear_hello(&mut steps)).await {
            Ok(result) => result?,
            Err(_) => {
                return Err(BootError::Timeout {
                    console: vm.console_tail(),
                });
            }
        }
        Ok(Waiting { vm, steps })
    }

    async fn hear_hello(&mut self, steps: &mut mpsc::Receiver<Step>) -> Result<(), BootError> {
        loop {
            match steps.recv().await {
                Some(Step::Hello { hello }) => {
                    self.saving.lock().await.hello = Some(hello);
                    return Ok(());
                }
                Some(Step::Running) => {}
                Some(Step::Ready(Err(source))) => {
                    return Err(BootError::Greeting {
                        source,
                        console: self.console_tail(),
                    });
                }
                Some(Step::Ready(Ok(_))) | None => {
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
        let Self { mut vm, steps } = self;
        vm.tell(identity);
        vm.come_up_in_time(asked, steps).await?;
        Ok(vm)
    }
}
