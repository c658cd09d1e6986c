//! The host's side of the greeting (see `jiffy_proto::agent`). The guest's messages are hostile:
//! bounded in size, parsed strictly.

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
    /// The agent closed it or exceeded the length of a line.
    #[error("the guest agent said nothing that ends in a line")]
    NoLine,
    /// The agent violated the protocol.
    #[error("the guest agent said something that is not a greeting: {0}")]
    Malformed(#[from] JsonError),
    /// The host's clock is out of range.
    #[error("the host's clock is not between 1970 and 2554: set it")]
    Clock,
    /// The agent could not take its identity.
    #[error("the guest agent could not take its identity: {0}")]
    Refused(String),
}

/// An agent that waits for its identity.
#[derive(Debug)]
pub struct Greeting {
    stream: BufReader<UnixStream>,
    /// The agent's first message.
    pub hello: Hello,
}

/// An agent that was sent its identity.
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
        let hello = serde_json::from_slice(&line(&mut stream).await?)?;
        Ok(Self { stream, hello })
    }

    /// Assigns the identity to an agent that greets in this moment: it finds it there once it has
    /// said its first message, and nothing goes back and forth in between. For agents that have
    /// started before: one that boots takes its identity much later, and the clock with it.
    pub async fn receive_assigned(
        mut stream: UnixStream,
        identity: &Identity,
    ) -> Result<AssignedGreeting, GreetingError> {
        send(&mut stream, identity).await?;
        let Self { stream, hello } = Self::receive(stream).await?;
        Ok(AssignedGreeting { stream, hello })
    }

    /// Assigns the identity and waits until it is in force. The stream must be kept: when it
    /// closes, the agent greets again.
    pub async fn answer(self, identity: &Identity) -> Result<(UnixStream, Ready), GreetingError> {
        let Self { mut stream, hello } = self;
        send(stream.get_mut(), identity).await?;
        AssignedGreeting { stream, hello }.ready().await
    }
}

impl AssignedGreeting {
    /// Waits until the identity is in force. The stream must be kept: when it closes, the agent
    /// greets again.
    pub async fn ready(mut self) -> Result<(UnixStream, Ready), GreetingError> {
        let ready: Ready = serde_json::from_slice(&line(&mut self.stream).await?)?;
        match &ready.error {
            Some(error) => Err(GreetingError::Refused(error.clone())),
            None => Ok((self.stream.into_inner(), ready)),
        }
    }
}

/// Sends an identity with the present time: the guest may have booted since the sandbox was
/// requested.
async fn send(stream: &mut UnixStream, identity: &Identity) -> Result<(), GreetingError> {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).ok();
    let time_ns = since_epoch.and_then(|t| u64::try_from(t.as_nanos()).ok());
    let mut words = serde_json::to_vec(&Identity {
        time_ns: time_ns.ok_or(GreetingError::Clock)?,
        ..identity.clone()
    })?;
    words.push(b'\n');
    Ok(stream.write_all(&words).await?)
}

async fn line(stream: &mut BufReader<UnixStream>) -> Result<Vec<u8>, GreetingError> {
    let mut bytes = Vec::new();
    stream
        .take(MAX_GREETING as u64)
        .read_until(b'\n', &mut bytes)
        .await?;
    if bytes.pop() == Some(b'\n') {
        Ok(bytes)
    } else {
        Err(GreetingError::NoLine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn greet(words: &'static [u8]) -> Result<(UnixStream, Ready), GreetingError> {
        let (host, mut guest) = UnixStream::pair().unwrap();
        let agent = tokio::spawn(async move {
            // The host may close the connection in the middle of a rejected message.
            let _ = guest.write_all(words).await;
            let mut heard = String::new();
            let _ = BufReader::new(guest).read_line(&mut heard).await;
            heard
        });
        let identity = Identity {
            id: "abc".into(),
            ..Identity::default()
        };
        let result = match Greeting::receive(host).await {
            Ok(greeting) => greeting.answer(&identity).await,
            Err(e) => Err(e),
        };
        let heard = agent.await.unwrap();
        if result.is_ok() {
            assert!(heard.contains("\"id\":\"abc\""));
        }
        result
    }

    const HELLO: &str = r#"{"version":"1","kernel":"6","init_us":1,"hello_us":2}"#;

    #[tokio::test]
    async fn an_agent_that_took_its_identity_is_ready() {
        let words = format!("{HELLO}\n{{\"ready_us\":3}}\n").leak();
        assert_eq!(greet(words.as_bytes()).await.unwrap().1.ready_us, 3);
    }

    #[tokio::test]
    async fn an_agent_that_refuses_its_identity_is_an_error() {
        let words = format!("{HELLO}\n{{\"ready_us\":3,\"error\":\"no entropy\"}}\n").leak();
        let error = greet(words.as_bytes()).await.unwrap_err();
        assert!(matches!(error, GreetingError::Refused(e) if e == "no entropy"));
    }

    #[tokio::test]
    async fn an_agent_that_is_known_finds_its_identity_there_when_it_greets() {
        let (host, guest) = UnixStream::pair().unwrap();
        let identity = Identity {
            id: "abc".into(),
            ..Identity::default()
        };
        let agent = async move {
            let mut guest = BufReader::new(guest);
            let mut heard = String::new();
            guest.read_line(&mut heard).await.unwrap();
            let words = format!("{HELLO}\n{{\"ready_us\":3}}\n");
            guest.write_all(words.as_bytes()).await.unwrap();
            heard
        };
        let host = async {
            let greeting = Greeting::receive_assigned(host, &identity).await.unwrap();
            assert_eq!(greeting.hello.hello_us, 2);
            greeting.ready().await.unwrap().1
        };
        let (ready, heard) = tokio::join!(host, agent);
        assert_eq!(ready.ready_us, 3);
        let heard: Identity = serde_json::from_str(&heard).unwrap();
        assert_eq!(heard.id, "abc");
        assert_ne!(heard.time_ns, 0, "without the time of the host's clock");
    }

    #[tokio::test]
    async fn endless_or_malformed_greetings_are_refused() {
        assert!(matches!(
            greet(b"not json\n").await,
            Err(GreetingError::Malformed(_))
        ));
        let flood: &[u8] = vec![b'x'; MAX_GREETING + 1].leak();
        assert!(matches!(greet(flood).await, Err(GreetingError::NoLine)));
    }
}
