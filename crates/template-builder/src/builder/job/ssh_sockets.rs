//! Sockets in the sandbox of a build whose connections lead to SSH agents of the build's client.

use super::super::failure::BuildFailure;
use super::BuildJob;
use jiffy_proto::agent::{SOCKET_READY, SocketListener, TCP_OK, TCP_PORT};
use jiffy_sandbox_manager::Sandboxes;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Number of streams that wait for connections of programs. Each is replaced after a connection.
const WAITING_STREAMS: usize = 2;
/// Time limit for the agent to create a socket.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for a request of the client after a program has connected.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of an answer of the agent in bytes.
const MAX_ANSWER_BYTES: usize = 1024;

impl BuildJob {
    /// Creates a socket in a sandbox, and passes its connections to the SSH agent `name` of the
    /// client until the result is dropped.
    pub(super) async fn ssh_socket(
        &self,
        sandbox: &str,
        name: &str,
        listener: SocketListener,
    ) -> Result<JoinSet<()>, BuildFailure> {
        let sandboxes = &self.inner.sandboxes;
        // This stream retains the socket while no other stream waits.
        let retaining = SocketListener {
            only_retains: true,
            ..listener.clone()
        };
        let retaining = open(sandboxes, sandbox, &retaining).await;
        let retaining = retaining.map_err(|e| {
            BuildFailure::new(format!("cannot create the socket of an SSH agent: {e}"))
        })?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let _retaining = retaining;
            std::future::pending::<()>().await;
        });
        for _ in 0..WAITING_STREAMS {
            let (sandboxes, clients) = (sandboxes.clone(), self.ssh.clone());
            let (sandbox, listener) = (sandbox.to_owned(), listener.clone());
            let (name, log) = (name.to_owned(), Arc::clone(&self.log));
            tasks.spawn(async move {
                // An error means that the sandbox has ended, which the step reports.
                while let Ok(stream) = next_connection(&sandboxes, &sandbox, &listener).await {
                    if !clients.pass(&name, stream, CLIENT_TIMEOUT).await {
                        log.info(
                            None,
                            &format!(
                                "a program connected to the SSH agent `{name}`, which the client \
                                 of the build does not offer at this moment"
                            ),
                        );
                    }
                }
            });
        }
        Ok(tasks)
    }
}

/// Waits for a connection of a program to a socket. The stream then carries the connection.
async fn next_connection(
    sandboxes: &Sandboxes,
    sandbox: &str,
    listener: &SocketListener,
) -> Result<UnixStream, String> {
    let mut stream = open(sandboxes, sandbox, listener).await?;
    expect(&mut stream, TCP_OK).await?;
    Ok(stream)
}

/// Opens a stream to the agent of a sandbox that listens on a socket.
async fn open(
    sandboxes: &Sandboxes,
    sandbox: &str,
    listener: &SocketListener,
) -> Result<UnixStream, String> {
    let opening = async {
        let stream = sandboxes.connect(sandbox, TCP_PORT).await;
        let mut stream = stream.map_err(|e| e.to_string())?;
        let mut request = serde_json::to_vec(listener).map_err(|e| e.to_string())?;
        request.push(b'\n');
        let written = stream.write_all(&request).await;
        written.map_err(|e| e.to_string())?;
        expect(&mut stream, SOCKET_READY).await?;
        Ok(stream)
    };
    let late = |_| "the agent of the sandbox does not answer".to_owned();
    timeout(SOCKET_TIMEOUT, opening).await.map_err(late)?
}

/// Reads the line `expected`. Any other line is the error.
async fn expect(stream: &mut UnixStream, expected: &str) -> Result<(), String> {
    let mut line = Vec::new();
    // Read the line byte by byte, because later bytes belong to the connection.
    while line.last() != Some(&b'\n') {
        // The agent is not trusted: bound the memory for its answer.
        if line.len() == MAX_ANSWER_BYTES {
            return Err("the answer of the sandbox's agent is too long".to_owned());
        }
        line.push(stream.read_u8().await.map_err(|e| e.to_string())?);
    }
    if line == expected.as_bytes() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&line).trim_end().to_owned())
}
