//! Handshake with the agent, after which a stream is connected to a TCP port of the guest. The
//! agent's side is described at `jiffy_proto::agent::TCP_PORT`.

use crate::sandboxes::OpenError;
use jiffy_proto::agent::TCP_OK;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum number of bytes of the agent's reply.
const MAX_REPLY_BYTES: usize = 256;

/// Requests a port on a new stream to the agent's forwarding port. Afterwards the stream carries
/// the TCP connection. The caller must set a timeout.
///
/// # Errors
/// [`OpenError::PortClosed`] if the agent could not connect, [`OpenError::Unavailable`] if its
/// reply is invalid.
pub async fn tcp_handshake<T>(stream: &mut T, port: u16) -> Result<(), OpenError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let failed = |e: std::io::Error| {
        OpenError::Unavailable(format!("no reply from the agent for port {port}: {e}"))
    };
    stream
        .write_all(format!("{port}\n").as_bytes())
        .await
        .map_err(failed)?;
    let mut line = Vec::new();
    // Read the line byte by byte, because bytes after the line belong to the TCP connection.
    while line.last() != Some(&b'\n') {
        // The agent is not trusted: bound the memory for its reply.
        if line.len() == MAX_REPLY_BYTES {
            return Err(OpenError::Unavailable(format!(
                "the agent's reply for port {port} is too long"
            )));
        }
        line.push(stream.read_u8().await.map_err(failed)?);
    }
    if line == TCP_OK.as_bytes() {
        Ok(())
    } else if line.starts_with(b"ERR ") {
        Err(OpenError::PortClosed)
    } else {
        Err(OpenError::Unavailable(format!(
            "the agent's reply for port {port} is malformed"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixStream;

    /// Performs the handshake with an agent that sends `answer`. Returns the result, the request,
    /// and the data after the handshake.
    async fn answered(answer: &'static [u8]) -> (Result<(), OpenError>, Vec<u8>, Vec<u8>) {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let agent = tokio::spawn(async move {
            let mut asked = vec![0; 5];
            theirs.read_exact(&mut asked).await.unwrap();
            theirs.write_all(answer).await.unwrap();
            asked
        });
        let result = tcp_handshake(&mut ours, 8080).await;
        let asked = agent.await.unwrap();
        let mut rest = Vec::new();
        ours.read_to_end(&mut rest).await.unwrap();
        (result, asked, rest)
    }

    #[tokio::test]
    async fn bytes_after_the_agents_reply_belong_to_the_connection() {
        let (result, asked, rest) = answered(b"OK\nhello").await;
        assert_eq!(
            (result, &asked[..], &rest[..]),
            (Ok(()), &b"8080\n"[..], &b"hello"[..])
        );
    }

    #[tokio::test]
    async fn a_refusal_means_that_the_port_is_closed() {
        let (result, ..) = answered(b"ERR cannot connect to port 8080: refused\n").await;
        assert_eq!(result, Err(OpenError::PortClosed));
    }

    #[tokio::test]
    async fn an_agent_with_another_reply_is_unavailable() {
        for answer in [&b"OK \n"[..], b"O", b"", b"\n", &[b'x'; 1000]] {
            let (result, ..) = answered(answer).await;
            assert!(
                matches!(result, Err(OpenError::Unavailable(_))),
                "{answer:?}"
            );
        }
    }
}
