//! Host side of the greeting, in which an agent receives the identity of its sandbox (see
//! `jiffy_proto::agent`). The guest's messages are not trusted: their size is bounded, and they are
//! parsed strictly.

use jiffy_proto::agent::{Hello, Identity, MAX_GREETING, Ready};
use serde_json::Error as JsonError;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// Error of a greeting.
#[derive(Debug, thiserror::Error)]
pub enum GreetingError {
    /// The connection broke.
    #[error("the connection to the guest agent broke: {0}")]
    Io(#[from] io::Error),
    /// The agent closed the connection, or exceeded the maximum length of a line.
    #[error("the guest agent closed the connection, or sent a line that is too long")]
    NoLine,
    /// The agent violated the protocol.
    #[error("the guest agent sent an invalid greeting: {0}")]
    Malformed(#[from] JsonError),
    /// The host's clock is out of range.
    #[error("the host's clock is not between 1970 and 2554: correct the clock")]
    Clock,
    /// The agent could not apply its identity.
    #[error("the guest agent could not apply its identity: {0}")]
    Refused(String),
}

/// Agent that has greeted and waits for its identity.
#[derive(Debug)]
pub struct Greeting {
    stream: BufReader<UnixStream>,
    /// The agent's first message.
    pub hello: Hello,
}

/// Agent to which the identity was sent, but which has not confirmed it.
#[derive(Debug)]
pub struct AssignedGreeting {
    stream: BufReader<UnixStream>,
    /// The agent's first message.
    pub hello: Hello,
}

impl Greeting {
    /// Receives the agent's first message.
    pub async fn receive(stream: UnixStream) -> Result<Self, GreetingError> {
        let mut stream = BufReader::new(stream);
        let hello = serde_json::from_slice(&read_line(&mut stream).await?)?;
        Ok(Self { stream, hello })
    }

    /// Sends the identity to an agent that is greeting at this moment, before its first message
    /// arrives. This saves a round trip. Must only be used for agents that were started earlier: an
    /// agent that is booting would read the identity, and the time in it, much later.
    pub async fn receive_assigned(
        mut stream: UnixStream,
        identity: &Identity,
    ) -> Result<AssignedGreeting, GreetingError> {
        send(&mut stream, identity).await?;
        // The agent sends its greeting in any case.
        let Self { stream, hello } = Self::receive(stream).await?;
        Ok(AssignedGreeting { stream, hello })
    }

    /// Sends the identity and waits until it is applied. The caller must retain the stream: when it
    /// is closed, the agent greets again.
    pub async fn answer(self, identity: &Identity) -> Result<(UnixStream, Ready), GreetingError> {
        let Self { mut stream, hello } = self;
        send(stream.get_mut(), identity).await?;
        AssignedGreeting { stream, hello }.ready().await
    }
}

impl AssignedGreeting {
    /// Waits until the identity is applied. The caller must retain the stream: when it is closed,
    /// the agent greets again.
    pub async fn ready(mut self) -> Result<(UnixStream, Ready), GreetingError> {
        let ready: Ready = serde_json::from_slice(&read_line(&mut self.stream).await?)?;
        match &ready.error {
            Some(error) => Err(GreetingError::Refused(error.clone())),
            None => Ok((self.stream.into_inner(), ready)),
        }
    }
}

/// Sends an identity with the current time. The `time_ns` of `identity` is not used: it would be
/// too old if the guest booted since `identity` was created.
async fn send(stream: &mut UnixStream, identity: &Identity) -> Result<(), GreetingError> {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).ok();
    let time_ns = since_epoch.and_then(|t| u64::try_from(t.as_nanos()).ok());
    let mut bytes = serde_json::to_vec(&Identity {
        // 64 bits of nanoseconds since 1970 last until 2554.
        time_ns: time_ns.ok_or(GreetingError::Clock)?,
        ..identity.clone()
    })?;
    bytes.push(b'\n');
    Ok(stream.write_all(&bytes).await?)
}

/// Reads a line of at most `MAX_GREETING` bytes, without the line feed.
async fn read_line(stream: &mut BufReader<UnixStream>) -> Result<Vec<u8>, GreetingError> {
    let mut bytes = Vec::new();
    stream
        // Bounds the memory for a line of a hostile guest.
        .take(MAX_GREETING as u64)
        .read_until(b'\n', &mut bytes)
        .await?;
    // Without a line feed, the connection was closed or the line is too long.
    if bytes.pop() == Some(b'\n') {
        Ok(bytes)
    } else {
        Err(GreetingError::NoLine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn greet(bytes: &'static [u8]) -> Result<(UnixStream, Ready), GreetingError> {
        let (host, mut guest) = UnixStream::pair().unwrap();
        let agent = tokio::spawn(async move {
            // The host may close the connection in the middle of a rejected message.
            let _ = guest.write_all(bytes).await;
            let mut received = String::new();
            let _ = BufReader::new(guest).read_line(&mut received).await;
            received
        });
        let identity = Identity {
            id: "abc".into(),
            ..Identity::default()
        };
        let result = match Greeting::receive(host).await {
            Ok(greeting) => greeting.answer(&identity).await,
            Err(e) => Err(e),
        };
        let received = agent.await.unwrap();
        if result.is_ok() {
            assert!(received.contains("\"id\":\"abc\""));
        }
        result
    }

    const HELLO: &str = r#"{"version":"1","kernel":"6","init_us":1,"hello_us":2}"#;

    #[tokio::test]
    async fn an_agent_that_took_its_identity_is_ready() {
        let bytes = format!("{HELLO}\n{{\"ready_us\":3}}\n").leak();
        assert_eq!(greet(bytes.as_bytes()).await.unwrap().1.ready_us, 3);
    }

    #[tokio::test]
    async fn an_agent_that_cannot_apply_its_identity_is_an_error() {
        let bytes = format!("{HELLO}\n{{\"ready_us\":3,\"error\":\"no entropy\"}}\n").leak();
        let error = greet(bytes.as_bytes()).await.unwrap_err();
        assert!(matches!(error, GreetingError::Refused(e) if e == "no entropy"));
    }

    #[tokio::test]
    async fn an_identity_can_be_sent_before_the_agent_greets() {
        let (host, guest) = UnixStream::pair().unwrap();
        let identity = Identity {
            id: "abc".into(),
            ..Identity::default()
        };
        let agent = async move {
            let mut guest = BufReader::new(guest);
            let mut received = String::new();
            guest.read_line(&mut received).await.unwrap();
            let bytes = format!("{HELLO}\n{{\"ready_us\":3}}\n");
            guest.write_all(bytes.as_bytes()).await.unwrap();
            received
        };
        let host = async {
            let greeting = Greeting::receive_assigned(host, &identity).await.unwrap();
            assert_eq!(greeting.hello.hello_us, 2);
            greeting.ready().await.unwrap().1
        };
        let (ready, received) = tokio::join!(host, agent);
        assert_eq!(ready.ready_us, 3);
        let received: Identity = serde_json::from_str(&received).unwrap();
        assert_eq!(received.id, "abc");
        assert_ne!(received.time_ns, 0, "the identity has no time");
    }

    #[tokio::test]
    async fn endless_or_malformed_greetings_are_rejected() {
        assert!(matches!(
            greet(b"not json\n").await,
            Err(GreetingError::Malformed(_))
        ));
        let flood: &[u8] = vec![b'x'; MAX_GREETING + 1].leak();
        assert!(matches!(greet(flood).await, Err(GreetingError::NoLine)));
    }
}
