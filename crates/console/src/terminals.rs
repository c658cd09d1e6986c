//! [`Terminals`]: the terminals that browsers have opened in sandboxes, and their limits. A
//! *viewer* is a browser tab that shows a terminal.

use crate::files::Guest;
use crate::refusal::Refusal;
use crate::terminal::{NewTerminal, Status, Terminal};
use axum::http::StatusCode;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of terminals of a sandbox.
const MAX_PER_SANDBOX: usize = 32;
/// Maximum number of terminals of the host.
const MAX_TOTAL: usize = 500;
/// Maximum number of terminals of a sandbox that are retained after their shell has exited.
const MAX_EXITED: usize = 8;
/// Time for which a terminal without viewers is retained.
const RETENTION: Duration = Duration::from_secs(600);

/// Terminals of the host.
#[derive(Default)]
pub(crate) struct Terminals(Mutex<Vec<Arc<Terminal>>>);

impl Terminals {
    /// Starts a terminal.
    pub async fn start(
        self: &Arc<Self>,
        guest: Guest,
        new: NewTerminal,
    ) -> Result<Arc<Terminal>, Refusal> {
        self.collect();
        {
            let terminals = self.0.lock();
            let is_running = |t: &&Arc<Terminal>| t.status() == Status::Running;
            let running = terminals.iter().filter(is_running);
            let own = running.clone().filter(|t| t.sandbox == guest.id).count();
            if own >= MAX_PER_SANDBOX || running.count() >= MAX_TOTAL {
                return Err(Refusal::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "limit",
                    format!(
                        "too many terminals: a sandbox may have {MAX_PER_SANDBOX} and the host \
                         {MAX_TOTAL}"
                    ),
                ));
            }
        }
        let terminals = self.clone();
        // A separate task does this, so that a caller that stops waiting cannot leave a terminal
        // that runs but is not in the list.
        let started = tokio::spawn(async move {
            let terminal = Terminal::start(guest, new).await?;
            terminals.0.lock().push(terminal.clone());
            terminals.watch(terminal.clone());
            Ok(terminal)
        });
        started.await.map_err(Refusal::internal)?
    }

    /// Returns the terminal of a sandbox.
    pub fn find(&self, sandbox: &str, id: &str) -> Option<Arc<Terminal>> {
        let terminals = self.0.lock();
        let found = terminals
            .iter()
            .find(|t| t.sandbox == sandbox && t.id == id);
        found.cloned()
    }

    /// Returns the terminals of a sandbox, the oldest first.
    pub fn of(&self, sandbox: &str) -> Vec<Arc<Terminal>> {
        let terminals = self.0.lock();
        terminals
            .iter()
            .filter(|t| t.sandbox == sandbox)
            .cloned()
            .collect()
    }

    /// Removes a terminal from the list.
    pub fn forget(&self, terminal: &Arc<Terminal>) {
        self.0.lock().retain(|t| !Arc::ptr_eq(t, terminal));
    }

    /// Stops the shell and removes the terminal after [`RETENTION`] without viewers.
    fn watch(self: Arc<Self>, terminal: Arc<Terminal>) {
        tokio::spawn(async move {
            loop {
                let remaining = match terminal.unwatched_for() {
                    Some(unwatched) if unwatched >= RETENTION => break,
                    Some(unwatched) => RETENTION - unwatched,
                    None => RETENTION,
                };
                tokio::time::sleep(remaining).await;
                if self.find(&terminal.sandbox, &terminal.id).is_none() {
                    return;
                }
            }
            if terminal.status() == Status::Running {
                terminal.hang_up().await;
            }
            self.forget(&terminal);
        });
    }

    /// Removes terminals without viewers whose shell has exited, except the newest [`MAX_EXITED`]
    /// of each sandbox.
    fn collect(&self) {
        let mut terminals = self.0.lock();
        let mut exited: Vec<(String, usize)> = Vec::new();
        // From the newest to the oldest.
        terminals.reverse();
        terminals.retain(|terminal| {
            if terminal.status() == Status::Running || terminal.unwatched_for().is_none() {
                return true;
            }
            match exited.iter_mut().find(|(id, _)| *id == terminal.sandbox) {
                Some((_, count)) => {
                    *count += 1;
                    *count <= MAX_EXITED
                }
                None => {
                    exited.push((terminal.sandbox.clone(), 1));
                    true
                }
            }
        });
        terminals.reverse();
    }
}
