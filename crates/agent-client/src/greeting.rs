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

impl Greeting {
    /// Receives the agent's first message.
    pub async fn receive(stream: UnixStream) -> Result<Self, GreetingError> {
        let mut stream = BufReader::new(stream);
        let hello = serde_json::from_slice(&line(&mut stream).await?)?;
        Ok(Self { stream, hello })
    }

    /// Assigns the identity and waits until it is in force. The stream must be kept: when it
    /// closes, the agent greets again.
    pub async fn answer(
        mut self,
        identity: &Identity,
    ) -> Result<(UnixStream, Ready), GreetingError> {
        // The present time: the guest may have booted since the sandbox was requested.
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        let time_ns = since_epoch.and_then(|t| u64::try_from(t.as_nanos()).ok());
        let mut words = serde_json::to_vec(&Identity {
            time_ns: time_ns.ok_or(GreetingError::Clock)?,
            ..identity.clone()
        })?;
        words.push(b'\n');
        self.stream.write_all(&words).await?;
        let ready: Ready = serde_json::from_slice(&line(&mut self.stream).await?)?;
        match &ready.error {
            Some(error) => Err(GreetingError::Refused(error.clone())),
            None => Ok((self.stream.into_inner(), ready)),
        }
    }
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
    async fn endless_or_malformed_greetings_are_refused() {
        assert!(matches!(
            greet(b"not json\n").await,
            Err(GreetingError::Malformed(_))
        ));
        let flood: &[u8] = vec![b'x'; MAX_GREETING + 1].leak();
        assert!(matches!(greet(flood).await, Err(GreetingError::NoLine)));
    }
}
