//! Events of sandboxes for clients. Each change of a sandbox is recorded in the event log of the
//! host, after the commit of the change and before the caller receives the result.

use super::{OperationError, Sandboxes};
use crate::operation_error::ErrorKind;
use crate::sandbox::Sandbox;
use jiffy_api_types::{EventType, PauseCause, SandboxState};
use jiffy_engine_api::{now_ms, steps};
use jiffy_event_log::{Event, EventFeed};

/// Cause of a pause or kill at the deadline of a sandbox.
const TIMEOUT: &str = "timeout";
/// Cause of a pause after the idle timeout of a sandbox.
pub(super) const IDLE: &str = "idle";
/// Cause of a failure whose message may name files of the host.
const INTERNAL: &str = "internal error of the host; see the log of the daemon for the cause";

/// Returns an event of the operation in flight, with its caller.
fn event(kind: EventType, sandbox: &Sandbox) -> Event {
    let owner = || Event::HOST_OWNER.to_owned();
    let request = steps::request();
    let caller = |request: &steps::ServedRequest| {
        let caller = request.caller.as_ref();
        caller.map_or_else(owner, |caller| caller.to_string())
    };
    Event {
        owner: sandbox.settings.owner.clone(),
        caller: request.as_deref().map(caller),
        request: request.and_then(|request| request.id.as_ref().map(|id| id.to_string())),
        sandbox: Some(sandbox.id.clone()),
        name: sandbox.name.clone(),
        template: Some(sandbox.template.clone()),
        ..Event::new(kind)
    }
}

/// Returns the cause of a pause or a kill. If `cause` is `None`, no request is in flight, and the
/// deadline of `before` has passed, the timeout is the cause.
fn end_cause(before: &Sandbox, cause: Option<&'static str>) -> Option<&'static str> {
    let is_over = before
        .deadline_ms
        .is_some_and(|deadline| deadline <= now_ms());
    let is_timeout = is_over && steps::request().is_none();
    cause.or(is_timeout.then_some(TIMEOUT))
}

/// Returns the cause of a pause for the record of the sandbox. `None` for a request.
pub(super) fn pause_cause(before: &Sandbox, cause: Option<&'static str>) -> Option<PauseCause> {
    match end_cause(before, cause)? {
        TIMEOUT => Some(PauseCause::Timeout),
        IDLE => Some(PauseCause::Idle),
        _ => None,
    }
}

impl Sandboxes {
    /// Returns the events of this host.
    pub fn events(&self) -> &EventFeed {
        &self.0.events
    }

    /// Records an event with the fields that events of its type have.
    pub(super) fn report(&self, kind: EventType, sandbox: &Sandbox) {
        self.report_with(kind, sandbox, |event| match kind {
            EventType::SandboxCreated => event.forked_from.clone_from(&sandbox.forked_from),
            EventType::SandboxReady | EventType::SandboxResumed => {
                event.snapshot.clone_from(&sandbox.snapshot);
                event.deadline_ms = sandbox.deadline_ms;
            }
            EventType::SandboxRolledBack => event.snapshot.clone_from(&sandbox.snapshot),
            _ => {}
        });
    }

    /// Records an event with the fields that `complete` sets.
    pub(super) fn report_with(
        &self,
        kind: EventType,
        sandbox: &Sandbox,
        complete: impl FnOnce(&mut Event),
    ) {
        let mut event = event(kind, sandbox);
        complete(&mut event);
        self.0.events.append(event);
    }

    /// Records a pause or a kill. If `cause` is `None`, no request is in flight, and the deadline
    /// has passed, the event names the timeout as the cause.
    pub(super) fn report_end(
        &self,
        kind: EventType,
        before: &Sandbox,
        sandbox: &Sandbox,
        cause: Option<&'static str>,
    ) {
        let cause = end_cause(before, cause);
        self.report_with(kind, sandbox, |event| {
            event.cause = cause.map(str::to_owned);
            if kind == EventType::SandboxPaused {
                event.snapshot.clone_from(&sandbox.snapshot);
            }
        });
    }

    /// Records a new deadline.
    pub(super) fn report_deadline(&self, sandbox: &Sandbox) {
        self.report_with(EventType::SandboxTimeoutChanged, sandbox, |event| {
            event.deadline_ms = sandbox.deadline_ms;
        });
    }

    /// Records that a sandbox could not be started.
    pub(super) fn report_failed(&self, sandbox: &Sandbox, error: &OperationError) {
        let cause = match error.kind() {
            ErrorKind::Failed => INTERNAL.to_owned(),
            _ => error.to_string(),
        };
        let event = event(EventType::SandboxFailed, sandbox).because(&cause);
        self.0.events.append(event);
    }

    /// Records that a sandbox has lost its guest.
    pub(super) fn report_broken(&self, sandbox: &Sandbox) {
        if let SandboxState::Broken { cause, .. } = &sandbox.state {
            let event = event(EventType::SandboxFailed, sandbox).because(cause);
            self.0.events.append(event);
        }
    }

    /// Records the operations that an earlier daemon did not complete.
    pub(super) fn report_recovered(&self, changed: &[Sandbox]) {
        for sandbox in changed {
            match sandbox.state {
                SandboxState::Paused => {
                    self.report_end(EventType::SandboxPaused, sandbox, sandbox, None);
                }
                _ => self.report_broken(sandbox),
            }
        }
    }
}
