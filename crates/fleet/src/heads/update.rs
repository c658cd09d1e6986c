//! Executes changes of a head that involve no guest. The head of a sandbox is the record in the
//! store that decides which host may run the sandbox. The changes are:
//! - kill of a sandbox, and confirmation of a kill
//! - adoption of a sandbox by its host, after the host has returned to the fleet
//! - release of a sandbox that its host has claimed but does not run
//!
//! The state machine `jiffy_fleet_core::HeadUpdate` decides the steps. This module performs its
//! reads and writes.

use super::file::HeadFile;
use super::{HeadError, MAX_REPEAT_PAUSE, REPEAT_PAUSE};
use crate::node::{BootClock, Clock};
use jiffy_fleet_core::record::Head;
use jiffy_fleet_core::{Digest, HeadUpdate, Purpose, UpdateEffect, UpdateEvent};
use std::time::{Duration, SystemTime};

/// Maximum number of writes of one change, unless the change is repeated without limit. A change
/// needs more writes only if other hosts change the head at the same time.
const ATTEMPTS: usize = 8;

/// Result of a change.
#[derive(Debug)]
pub(super) enum Updated {
    /// The change was written. For a kill, with the root (the id in the store) of the snapshot that
    /// is no longer needed.
    Stored(Box<Head>, Option<Digest>),
    /// The change was not needed, or is not possible.
    Unchanged(Option<Box<Head>>),
}

/// Executes a change, and returns when its outcome is known. With `repeat`, temporary failures are
/// retried without limit. Otherwise the first failure is returned.
///
/// # Errors
/// [`HeadError`] of the first failure, or of a permanent failure.
pub(super) async fn run(
    file: &mut HeadFile,
    purpose: Purpose,
    repeat: bool,
) -> Result<Updated, HeadError> {
    file.restart();
    let (mut update, first) = HeadUpdate::new(file.id, purpose);
    let mut effects = vec![first];
    let mut pause = REPEAT_PAUSE;
    let mut attempts = 0;
    let mut result = None;
    let mut retracted = None;
    loop {
        let mut event = UpdateEvent::Timer;
        for effect in std::mem::take(&mut effects) {
            match effect {
                UpdateEffect::ReadHead => event = UpdateEvent::HeadRead(file.read().await),
                UpdateEffect::WriteHead(write) => {
                    // Check the limit before the write: the outcome of a write that was sent must
                    // not be ignored.
                    if !repeat && attempts == ATTEMPTS {
                        return Err(HeadError::contended(&file.id.to_string()));
                    }
                    attempts += 1;
                    let outcome = file.write(&write).await;
                    let write = write.write;
                    event = UpdateEvent::HeadWritten { write, outcome };
                }
                UpdateEffect::Stored { head, .. } => result = Some(Updated::Stored(head, None)),
                UpdateEffect::Unchanged(head) => result = Some(Updated::Unchanged(head)),
                UpdateEffect::Retract(root) => retracted = Some(root),
                UpdateEffect::Finished => {
                    let result = result.ok_or_else(|| file.take_error())?;
                    return Ok(match result {
                        Updated::Stored(head, _) => Updated::Stored(head, retracted),
                        unchanged @ Updated::Unchanged(_) => unchanged,
                    });
                }
            }
        }
        update.handle(BootClock.now(), wall_ms(), event, &mut effects);
        if !effects.is_empty() {
            continue;
        }
        // Without effects, the last access has failed or its outcome is unknown (its error is in
        // `file`), and the state machine waits to repeat it.
        let error = file.take_error();
        if !repeat || !error.is_temporary() {
            return Err(error);
        }
        tracing::debug!(sandbox = %file.id, %error, "repeating a change of a head");
        while effects.is_empty() {
            let now = BootClock.now();
            let due = update.wake_at().map_or(0, |at| at.since(now));
            tokio::time::sleep(pause.max(Duration::from_millis(due))).await;
            update.handle(BootClock.now(), wall_ms(), UpdateEvent::Timer, &mut effects);
        }
        pause = (pause * 2).min(MAX_REPEAT_PAUSE);
    }
}

/// Returns the wall clock in milliseconds since 1970.
fn wall_ms() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    time.map_or(0, |time| time.as_millis() as u64)
}
