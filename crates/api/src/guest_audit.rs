//! Records commands and file paths of clients' calls to agents in the audit log, if the owner of
//! the host enables it.

use crate::app::App;
use crate::audit::{CLIENT_CLOSED, ConsoleSession, set_caller};
use crate::caller::{Caller, ClientAddress};
use jiffy_event_log::{AuditLog, AuditedCall};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// Names in a call on a guest: commands and file paths, bounded and escaped. The code that parses
/// the call adds them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestNames {
    /// Sandbox.
    pub sandbox: Option<String>,
    /// Command that the call starts.
    pub command: Option<String>,
    /// Paths that the call accesses.
    pub paths: Vec<String>,
}

/// Names in a call on a guest. Clones share the names.
#[derive(Debug, Clone, Default)]
pub struct SharedGuestNames(Arc<Mutex<GuestNames>>);

impl SharedGuestNames {
    /// Changes the names.
    pub fn update(&self, change: impl FnOnce(&mut GuestNames)) {
        change(&mut self.0.lock());
    }
}

/// Terminal of a sandbox that a user of the console has started or attached, and the result.
#[derive(Debug, Clone)]
pub struct TerminalAudit {
    /// Call, as the log records it.
    pub call: &'static str,
    /// Sandbox, as the caller named it, bounded.
    pub sandbox: String,
    /// Id of the terminal. `None` if it could not be started.
    pub terminal: Option<String>,
    /// Command of a started terminal, bounded and escaped.
    pub command: Option<String>,
    /// Status of the response.
    pub status: u16,
    /// Error code of the response.
    pub error: Option<&'static str>,
}

/// Call on a guest whose response has not begun. The drop of this value records the call, also if
/// the client closes the connection. Calls without names are not recorded.
#[derive(Debug)]
pub struct PendingGuestAudit {
    log: AuditLog,
    call: AuditedCall,
    names: SharedGuestNames,
    start: Instant,
}

impl PendingGuestAudit {
    /// Records the call with the status of its response.
    pub fn complete(mut self, status: u16) {
        self.call.status = status;
    }
}

impl Drop for PendingGuestAudit {
    fn drop(&mut self) {
        let names = self.names.0.lock().clone();
        if names.command.is_none() && names.paths.is_empty() {
            return;
        }
        let ms = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.log.record(AuditedCall {
            sandbox: names.sandbox,
            command: names.command,
            paths: names.paths,
            ms,
            ..self.call.clone()
        });
    }
}

impl App {
    /// Records commands and file paths of calls on guests in the audit log.
    #[must_use]
    pub fn with_audited_commands(mut self) -> Self {
        self.audits_commands = true;
        self
    }

    /// Records that a user of the console has started or attached a terminal. The command is
    /// recorded only if commands and paths are.
    pub fn record_terminal(
        &self,
        caller: &Caller,
        session: &ConsoleSession,
        from: ClientAddress,
        terminal: TerminalAudit,
    ) {
        let Some(log) = &self.audit else { return };
        let mut call = AuditedCall::new(terminal.call.to_owned(), terminal.status);
        set_caller(&mut call, caller);
        log.record(AuditedCall {
            session: Some(session.0.clone()),
            address: Some(from.0.to_string()),
            sandbox: Some(terminal.sandbox),
            object: terminal.terminal,
            command: terminal.command.filter(|_| self.audits_commands),
            error: terminal.error.map(str::to_owned),
            ..call
        });
    }

    /// Begins the record of a call on a guest that does not pass through the gateway. `None` if
    /// commands and paths are not recorded.
    #[must_use]
    pub fn begin_guest_audit(
        &self,
        call: String,
        caller: &Caller,
        session: &ConsoleSession,
        from: ClientAddress,
        names: SharedGuestNames,
    ) -> Option<PendingGuestAudit> {
        let log = self.audit.clone().filter(|_| self.audits_commands)?;
        let mut call = AuditedCall::new(call, CLIENT_CLOSED);
        set_caller(&mut call, caller);
        call.session = Some(session.0.clone());
        call.address = Some(from.0.to_string());
        Some(PendingGuestAudit {
            log,
            call,
            names,
            start: Instant::now(),
        })
    }
}
