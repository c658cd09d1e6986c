//! SSH agents of the client of a build. For each connection that a step makes to an agent, the
//! client holds an open request, which then carries the connection. Keys remain with the client.

use jiffy_api_types::{MAX_BUILD_SSH_AGENTS, MAX_SSH_ID_BYTES};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

/// Maximum number of requests of the client that wait for connections to one agent.
const MAX_WAITING: usize = 16;

/// Senders of the connections that requests of the client wait for.
type Waiting = Mutex<VecDeque<oneshot::Sender<UnixStream>>>;

/// SSH agents of a build by name.
#[derive(Debug, Default)]
pub struct SshClients {
    agents: BTreeMap<String, Waiting>,
    /// Notified when a request of the client arrives.
    arrived: Notify,
}

impl SshClients {
    /// Creates the agents of a build. The error is a message for the client.
    pub fn new(names: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut agents = BTreeMap::new();
        for name in names {
            let is_good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
            if name.is_empty() || name.len() > MAX_SSH_ID_BYTES || !name.bytes().all(is_good) {
                return Err(format!(
                    "the name of an SSH agent must have 1 to {MAX_SSH_ID_BYTES} letters, digits, \
                     `.`, `_` and `-`"
                ));
            }
            if agents.insert(name.clone(), Waiting::default()).is_some() {
                return Err(format!("the SSH agent `{name}` is given twice"));
            }
            if agents.len() > MAX_BUILD_SSH_AGENTS {
                return Err(format!(
                    "too many SSH agents: at most {MAX_BUILD_SSH_AGENTS}"
                ));
            }
        }
        Ok(Self {
            agents,
            arrived: Notify::new(),
        })
    }

    /// Returns whether the client offers this agent.
    pub(super) fn has(&self, name: &str) -> bool {
        self.agents.contains_key(name)
    }

    /// Adds a request of the client that waits for the next connection to an agent. `None` if the
    /// client does not offer the agent, or if too many requests wait.
    pub(super) fn wait(&self, name: &str) -> Option<oneshot::Receiver<UnixStream>> {
        let mut waiting = self.agents.get(name)?.lock();
        // Requests that the client has abandoned do not count.
        waiting.retain(|client| !client.is_closed());
        if waiting.len() >= MAX_WAITING {
            return None;
        }
        let (client, connection) = oneshot::channel();
        waiting.push_back(client);
        drop(waiting);
        self.arrived.notify_waiters();
        Some(connection)
    }

    /// Gives a connection of a program to the next request of the client. Returns false if no
    /// request arrives within `limit`: the connection is closed.
    pub(super) async fn pass(&self, name: &str, connection: UnixStream, limit: Duration) -> bool {
        let Some(waiting) = self.agents.get(name) else {
            return false;
        };
        let passing = async {
            let mut connection = connection;
            loop {
                // Register before the check, so that no arrival is missed.
                let arrived = self.arrived.notified();
                tokio::pin!(arrived);
                arrived.as_mut().enable();
                loop {
                    let client = waiting.lock().pop_front();
                    let Some(client) = client else { break };
                    match client.send(connection) {
                        Ok(()) => return,
                        // The client has abandoned the request.
                        Err(unsent) => connection = unsent,
                    }
                }
                arrived.await;
            }
        };
        timeout(limit, passing).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_connection_is_given_to_a_request_that_the_client_has_not_abandoned() {
        let clients = SshClients::new(["default".to_owned()]).unwrap();
        assert!(clients.has("default") && !clients.has("other"));
        assert!(clients.wait("other").is_none());
        drop(clients.wait("default").unwrap());
        let received = clients.wait("default").unwrap();
        let (mut program, guest) = UnixStream::pair().unwrap();
        assert!(clients.pass("default", guest, LONG).await);
        program.write_all(b"x").await.unwrap();
        assert_eq!(received.await.unwrap().read_u8().await.unwrap(), b'x');

        // Without a request, the connection is closed.
        let (mut program, guest) = UnixStream::pair().unwrap();
        let short = Duration::from_millis(10);
        assert!(!clients.pass("default", guest, short).await);
        assert!(program.read_u8().await.is_err());
        // A request may arrive after the connection.
        let (_program, guest) = UnixStream::pair().unwrap();
        let late = async {
            tokio::task::yield_now().await;
            clients.wait("default").unwrap().await.is_ok()
        };
        let passing = clients.pass("default", guest, LONG);
        assert_eq!(tokio::join!(passing, late), (true, true));
    }

    #[tokio::test]
    async fn agents_and_waiting_requests_are_bounded() {
        let named = |count: usize| SshClients::new((0..count).map(|n| n.to_string()));
        assert!(named(MAX_BUILD_SSH_AGENTS).is_ok() && named(MAX_BUILD_SSH_AGENTS + 1).is_err());
        for bad in ["", "a/b", &"x".repeat(MAX_SSH_ID_BYTES + 1)] {
            assert!(SshClients::new([bad.to_owned()]).is_err());
        }
        assert!(SshClients::new(["a".to_owned(), "a".to_owned()]).is_err());
        let clients = named(1).unwrap();
        let waiting: Vec<_> = (0..MAX_WAITING)
            .map(|_| clients.wait("0").unwrap())
            .collect();
        assert!(clients.wait("0").is_none());
        drop(waiting);
        assert!(clients.wait("0").is_some());
    }
}
