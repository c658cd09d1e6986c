//! [`Claim`]: ownership of a sandbox while its guest is being restored.
//!
//! The head of a sandbox is the record in the store that decides which host may run the sandbox. A
//! resume of a stored sandbox first writes this host into the head as the owner (it claims the
//! head), and restores the guest at the same time. If the restore fails, the claim is dropped,
//! which releases the head: any host may resume the sandbox again.

use super::file::HeadFile;
use super::{Authority, HeadError, MAX_REPEAT_PAUSE, REPEAT_PAUSE, REPEATEDLY, update};
use crate::node::{BootClock, Clock};
use jiffy_fleet_core::{
    HeadWrite, Owner, Purpose, Resume, ResumeAnswer, ResumeEffect, ResumeEvent, ResumeInput,
    Revision,
};
use std::sync::Arc;

/// Claimed sandbox. Dropping the claim releases the sandbox, unless [`Self::retain`] was called.
#[must_use]
pub struct Claim {
    /// `None` after the sandbox was retained or released.
    held: Option<Held>,
}

/// Parts of a claim, until it is confirmed or released.
struct Held {
    resume: Resume,
    file: HeadFile,
    host: Arc<dyn Authority>,
    owner: Owner,
    /// Revision with which the sandbox runs, after [`Claim::confirm`].
    revision: Option<Revision>,
}

impl std::fmt::Debug for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let held = self.held.as_ref().map(|held| held.file.id);
        f.debug_struct("Claim").field("held", &held).finish()
    }
}

impl Claim {
    pub(super) fn new(
        resume: Resume,
        file: HeadFile,
        host: Arc<dyn Authority>,
        owner: Owner,
    ) -> Self {
        let revision = None;
        Self {
            held: Some(Held {
                resume,
                file,
                host,
                owner,
                revision,
            }),
        }
    }

    /// Called when the guest is restored, before it receives its identity (host name, entropy,
    /// clock) and can communicate. Must not be called again after an error. Returns the revision of
    /// the head.
    ///
    /// # Errors
    /// [`HeadError::NoAuthority`] if this host has lost the authority of the claim. The sandbox is
    /// released then.
    pub fn confirm(&mut self) -> Result<Revision, HeadError> {
        let Some(held) = &mut self.held else {
            return Ok(Revision(0));
        };
        if let Some(revision) = held.revision {
            return Ok(revision);
        }
        let effects = step(&mut held.resume, &*held.host, ResumeEvent::Restored);
        for effect in &effects {
            if let ResumeEffect::AssignIdentity { revision, .. } = effect {
                held.revision = Some(*revision);
                return Ok(*revision);
            }
        }
        let sandbox = held.file.id.to_string();
        if let Some(held) = self.held.take() {
            spawn_finish(held.resume, held.file, held.host, effects);
        }
        Err(HeadError::NoAuthority { sandbox })
    }

    /// Retains the ownership, because the guest runs.
    pub fn retain(mut self) {
        self.held = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some(mut held) = self.held.take() else {
            return;
        };
        if held.revision.is_some() {
            // The claim was confirmed, but the caller has dropped the guest since.
            let purpose = Purpose::Release(held.owner);
            tokio::spawn(async move {
                if let Err(e) = update::run(&mut held.file, purpose, REPEATEDLY).await {
                    tracing::warn!(sandbox = %held.file.id, error = %e, "cannot release a sandbox");
                }
            });
            return;
        }
        let effects = step(&mut held.resume, &*held.host, ResumeEvent::RestoreFailed);
        spawn_finish(held.resume, held.file, held.host, effects);
    }
}

/// Reports an event to the state machine of a resume. Returns the effects that the caller must
/// execute.
pub(super) fn step(
    resume: &mut Resume,
    host: &dyn Authority,
    event: ResumeEvent,
) -> Vec<ResumeEffect> {
    let mut effects = Vec::new();
    let is_dead = |owner| host.is_dead(owner);
    let input = ResumeInput {
        now: BootClock.now(),
        member: host.member(),
        authority: host.owner(),
        is_dead: &is_dead,
    };
    resume.handle(&input, event, &mut effects);
    effects
}

/// Returns the write among effects.
pub(super) fn write_of(effects: &[ResumeEffect]) -> Option<HeadWrite> {
    effects.iter().find_map(|effect| match effect {
        ResumeEffect::WriteHead(write) => Some(write.clone()),
        _ => None,
    })
}

/// Returns the answer among effects.
pub(super) fn answer_of(effects: &[ResumeEffect]) -> Option<ResumeAnswer> {
    effects.iter().find_map(|effect| match effect {
        ResumeEffect::Answer(answer) => Some(*answer),
        _ => None,
    })
}

/// Completes a resume whose guest was dropped, in the background.
pub(super) fn spawn_finish(
    mut resume: Resume,
    mut file: HeadFile,
    host: Arc<dyn Authority>,
    mut effects: Vec<ResumeEffect>,
) {
    tokio::spawn(async move {
        let mut pause = REPEAT_PAUSE;
        while !effects.contains(&ResumeEffect::Finished) {
            let event = match write_of(&effects) {
                Some(write) => ResumeEvent::HeadWritten {
                    write: write.write,
                    outcome: file.write(&write).await,
                },
                None => {
                    // The outcome of the last write is unknown. Wait, and report the time: the
                    // state machine then repeats the write.
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(MAX_REPEAT_PAUSE);
                    ResumeEvent::Timer
                }
            };
            effects = step(&mut resume, &*host, event);
        }
    });
}
