//! SSH agents that the client of a build offers to its steps (`jiffy template build --ssh`).
//!
//! The agent and its keys remain on this machine. The daemon passes the connections of the build's
//! programs to this process, which lets them list keys and sign, but not change the agent.

use anyhow::{Context, bail};
use jiffy_client::Client;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

/// Variable with the socket of the user's agent.
const SOCKET_VARIABLE: &str = "SSH_AUTH_SOCK";
/// Number of requests that wait for connections to one agent. Each is replaced after a connection.
const WAITING_REQUESTS: usize = 4;
/// Maximum length of a message, as in OpenSSH.
const MAX_MESSAGE_BYTES: u32 = 256 * 1024;

/// Numbers of messages (draft-ietf-sshm-ssh-agent, section 6.1).
const FAILURE: u8 = 5;
const REQUEST_IDENTITIES: u8 = 11;
const SIGN_REQUEST: u8 = 13;
const EXTENSION: u8 = 27;
/// Extension by which OpenSSH reports the server of a connection. Agents require it for keys that
/// are restricted to some servers.
const SESSION_BIND: &[u8] = b"session-bind@openssh.com";

/// Agent that steps of a build may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshAgent {
    /// Name that `RUN --mount=type=ssh,id=NAME` refers to.
    pub id: String,
    /// Socket of the agent.
    socket: PathBuf,
}

/// Reads the agents of a build in the form of `docker build --ssh`.
pub fn read_options(options: &[String]) -> anyhow::Result<Vec<SshAgent>> {
    let agent = |option: &String| {
        let (id, socket) = match option.split_once('=') {
            Some((id, socket)) => (id, PathBuf::from(socket)),
            None => {
                let socket = std::env::var_os(SOCKET_VARIABLE).filter(|socket| !socket.is_empty());
                let socket = socket.with_context(|| {
                    format!("--ssh {option}: {SOCKET_VARIABLE} is not set: start an SSH agent")
                })?;
                (option.as_str(), PathBuf::from(socket))
            }
        };
        if id.is_empty() {
            bail!("--ssh {option}: the id is missing: use default, or NAME=SOCKET");
        }
        // A failure is reported before the build starts.
        std::os::unix::net::UnixStream::connect(&socket).with_context(|| {
            format!(
                "--ssh {option}: cannot connect to the SSH agent at {}; files with keys must be \
                 added to an agent with ssh-add",
                socket.display()
            )
        })?;
        Ok(SshAgent {
            id: id.to_owned(),
            socket,
        })
    };
    options.iter().map(agent).collect()
}

/// Offers agents to the build at `path` until the result is dropped.
pub fn offer(client: &Client, path: &str, agents: &[SshAgent]) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for agent in agents {
        for _ in 0..WAITING_REQUESTS {
            let (client, path, agent) = (client.clone(), path.to_owned(), agent.clone());
            tasks.spawn(async move {
                // Dropping the set of a task closes its connections.
                let mut connections = JoinSet::new();
                // An error means that the build has ended, which its log shows.
                while let Ok(program) = client.build_ssh(&path, &agent.id).await {
                    let socket = agent.socket.clone();
                    connections.spawn(async move {
                        // Ignore the error: the program sees a closed connection.
                        let _ = serve(program, &socket).await;
                    });
                    while connections.try_join_next().is_some() {}
                }
                // Connections continue until the build ends.
                while connections.join_next().await.is_some() {}
            });
        }
    }
    tasks
}

/// Passes the permitted requests of a program to the agent, one after the other, as the protocol
/// requires.
async fn serve(
    mut program: impl AsyncRead + AsyncWrite + Unpin,
    socket: &Path,
) -> std::io::Result<()> {
    let mut agent = UnixStream::connect(socket).await?;
    while let Some(request) = read_message(&mut program).await? {
        if !is_permitted(&request) {
            write_message(&mut program, &[FAILURE]).await?;
            continue;
        }
        write_message(&mut agent, &request).await?;
        let Some(answer) = read_message(&mut agent).await? else {
            return Ok(());
        };
        write_message(&mut program, &answer).await?;
    }
    Ok(())
}

/// Returns whether a program of a build may send a request. Programs can list keys and sign.
fn is_permitted(request: &[u8]) -> bool {
    match request {
        [REQUEST_IDENTITIES | SIGN_REQUEST, ..] => true,
        [EXTENSION, a, b, c, d, rest @ ..] => {
            let length = u32::from_be_bytes([*a, *b, *c, *d]);
            usize::try_from(length).is_ok_and(|length| rest.get(..length) == Some(SESSION_BIND))
        }
        _ => false,
    }
}

/// Reads a message without its length. `None` at the end of the stream.
async fn read_message(from: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Option<Vec<u8>>> {
    let length = match from.read_u32().await {
        Ok(length) => length,
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e),
    };
    if !(1..=MAX_MESSAGE_BYTES).contains(&length) {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; usize::try_from(length).map_err(std::io::Error::other)?];
    from.read_exact(&mut message).await?;
    Ok(Some(message))
}

async fn write_message(to: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> std::io::Result<()> {
    let length = u32::try_from(message.len()).map_err(std::io::Error::other)?;
    // One write, so that the message is not sent in two packets.
    to.write_all(&[&length.to_be_bytes()[..], message].concat())
        .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    #[test]
    fn agents_are_named_by_options_and_must_answer() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let read = |option: String| read_options(&[option]);
        let agents = read(format!("work={}", socket.display())).unwrap();
        let work = SshAgent {
            id: "work".to_owned(),
            socket,
        };
        assert_eq!(agents, [work]);
        for bad in ["default=/nowhere", "=/nowhere", "x="] {
            let message = read(bad.to_owned()).unwrap_err().to_string();
            assert!(message.contains("--ssh"), "{message}");
        }
    }

    #[tokio::test]
    async fn programs_list_keys_and_sign_but_do_not_change_the_agent() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent");
        let listener = UnixListener::bind(&socket).unwrap();
        // The agent repeats each request with the number 14.
        tokio::spawn(async move {
            let (mut agent, _) = listener.accept().await.unwrap();
            while let Some(mut request) = read_message(&mut agent).await.unwrap() {
                request[0] = 14;
                write_message(&mut agent, &request).await.unwrap();
            }
        });
        let (mut program, server) = UnixStream::pair().unwrap();
        let served = tokio::spawn(async move { serve(server, &socket).await });
        let extension = |name: &[u8]| {
            let length = u32::try_from(name.len()).unwrap().to_be_bytes();
            [&[EXTENSION][..], &length, name, b"rest"].concat()
        };
        let permitted = [
            vec![REQUEST_IDENTITIES],
            vec![SIGN_REQUEST, 1, 2],
            extension(SESSION_BIND),
        ];
        // 17 adds a key, 19 removes all, 22 locks the agent.
        let rejected = [
            vec![17, 1],
            vec![19],
            vec![22],
            extension(b"query"),
            vec![EXTENSION, 255, 255, 255, 255],
        ];
        for (requests, is_passed) in [(&permitted[..], true), (&rejected[..], false)] {
            for request in requests {
                write_message(&mut program, request).await.unwrap();
                let answer = read_message(&mut program).await.unwrap().unwrap();
                let expected = if is_passed {
                    [&[14][..], &request[1..]].concat()
                } else {
                    vec![FAILURE]
                };
                assert_eq!(answer, expected);
            }
        }
        program.write_u32(MAX_MESSAGE_BYTES + 1).await.unwrap();
        assert!(served.await.unwrap().is_err());
    }
}
