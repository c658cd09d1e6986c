//! Host side of the greeting, in which an agent receives the identity of its sandbox (see
//! `jiffy_proto::agent`). The guest's messages are not trusted: their size is bounded, and they are
//! parsed strictly.
//!
//! A *hook* is an executable in the guest that the agent runs before the state of the guest is
//! stored, and after the guest continues.

use crate::clock_correction::{ClockCorrection, HostTime};
use jiffy_proto::agent::{ClockReading, ClockStep, Hello, Identity, MAX_GREETING, Ready};
use serde::Serialize;
use serde_json::Error as JsonError;
use std::io;
use std::time::Duration;
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
    /// Time at which the identity was sent.
    sent: HostTime,
}

/// Agent whose identity is in effect.
#[derive(Debug)]
pub struct ReadyAgent {
    /// Connection of the greeting. The caller must retain it: when it is closed, the agent greets
    /// again.
    pub stream: UnixStream,
    /// The agent's last message.
    pub ready: Ready,
    /// Set if the agent has reported since then that a directory for hooks was created.
    pub has_new_hooks: bool,
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
        let sent = send_identity(&mut stream, identity).await?;
        // The agent sends its greeting in any case.
        let Self { stream, hello } = Self::receive(stream).await?;
        Ok(AssignedGreeting {
            stream,
            hello,
            sent,
        })
    }

    /// Sends the identity and waits until it is applied.
    pub async fn answer(self, identity: &Identity) -> Result<ReadyAgent, GreetingError> {
        let Self { mut stream, hello } = self;
        let sent = send_identity(stream.get_mut(), identity).await?;
        let assigned = AssignedGreeting {
            stream,
            hello,
            sent,
        };
        assigned.ready().await
    }
}

impl AssignedGreeting {
    /// Waits until the identity is applied, and corrects the guest's clock if the transfer of the
    /// identity took long.
    pub async fn ready(self) -> Result<ReadyAgent, GreetingError> {
        let (mut stream, sent) = (self.stream, self.sent);
        let ready: Ready = serde_json::from_slice(&read_line(&mut stream).await?)?;
        if let Some(error) = ready.error {
            return Err(GreetingError::Refused(error));
        }
        let mut has_new_hooks = false;
        if let Some(applied_us) = ready.applied_us {
            let transfer = sent.elapsed();
            let transfer = transfer.saturating_sub(Duration::from_micros(applied_us));
            let mut correction = ClockCorrection::after_transfer(transfer);
            while let Some(step_ns) = correction.next_step() {
                let sent = HostTime::now().ok_or(GreetingError::Clock)?;
                send(stream.get_mut(), &ClockStep { step_ns }).await?;
                let mut line = read_line(&mut stream).await?;
                // An empty line is the report of new hooks, which may arrive at any time.
                if line.is_empty() {
                    has_new_hooks = true;
                    line = read_line(&mut stream).await?;
                }
                let reading: ClockReading = serde_json::from_slice(&line)?;
                correction.on_reading(step_ns, sent, reading.time_ns);
            }
        }
        has_new_hooks |= !stream.buffer().is_empty();
        Ok(ReadyAgent {
            stream: stream.into_inner(),
            ready,
            has_new_hooks,
        })
    }
}

/// Sends an identity with the current time, and returns that time. The `time_ns` of `identity` is
/// not used: it would be too old if the guest booted since `identity` was created.
async fn send_identity(
    stream: &mut UnixStream,
    identity: &Identity,
) -> Result<HostTime, GreetingError> {
    let now = HostTime::now().ok_or(GreetingError::Clock)?;
    let identity = Identity {
        time_ns: now.since_epoch_ns(),
        ..identity.clone()
    };
    send(stream, &identity).await?;
    Ok(now)
}

/// Sends a message in a line.
async fn send(stream: &mut UnixStream, message: &impl Serialize) -> Result<(), GreetingError> {
    let mut bytes = serde_json::to_vec(message)?;
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

    async fn greet(bytes: &'static [u8]) -> Result<ReadyAgent, GreetingError> {
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
        let agent = greet(bytes.as_bytes()).await.unwrap();
        assert_eq!(agent.ready.ready_us, 3);
        assert!(!agent.has_new_hooks);
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
            greeting.ready().await.unwrap().ready
        };
        let (ready, received) = tokio::join!(host, agent);
        assert_eq!(ready.ready_us, 3);
        let received: Identity = serde_json::from_str(&received).unwrap();
        assert_eq!(received.id, "abc");
        assert_ne!(received.time_ns, 0, "the identity has no time");
    }

    /// Runs a greeting with an agent whose clock is wrong by `error_ns`, and which reports that it
    /// applied its identity in `applied_us`. The agent reports new hooks before its first reading.
    /// Returns the remaining error, the number of readings and the host's result.
    async fn correct(error_ns: i64, applied_us: u64) -> (i64, usize, ReadyAgent) {
        let (host, guest) = UnixStream::pair().unwrap();
        let agent = tokio::spawn(async move {
            let mut guest = BufReader::new(guest);
            let mut line = String::new();
            guest.read_line(&mut line).await.unwrap();
            let ready = format!("{HELLO}\n{{\"ready_us\":3,\"applied_us\":{applied_us}}}\n");
            guest.write_all(ready.as_bytes()).await.unwrap();
            let (mut error_ns, mut readings) = (error_ns, 0);
            loop {
                line.clear();
                if guest.read_line(&mut line).await.unwrap() == 0 {
                    return (error_ns, readings);
                }
                let step: ClockStep = serde_json::from_str(&line).unwrap();
                error_ns += step.step_ns;
                let now = HostTime::now().unwrap().since_epoch_ns();
                let reading = ClockReading {
                    time_ns: now.saturating_add_signed(error_ns),
                };
                let hooks = if readings == 0 { "\n" } else { "" };
                let reading = serde_json::to_string(&reading).unwrap();
                let reading = format!("{hooks}{reading}\n");
                guest.write_all(reading.as_bytes()).await.unwrap();
                readings += 1;
            }
        });
        let identity = Identity::default();
        let greeting = Greeting::receive_assigned(host, &identity).await.unwrap();
        // The time of this delay is the transfer that the host observes.
        tokio::time::sleep(Duration::from_millis(30)).await;
        let mut ready = greeting.ready().await.unwrap();
        ready.stream.shutdown().await.unwrap();
        let (error_ns, readings) = agent.await.unwrap();
        (error_ns, readings, ready)
    }

    #[tokio::test]
    async fn a_clock_that_was_set_late_is_corrected_before_the_guest_is_ready() {
        let (error_ns, readings, ready) = correct(-20_000_000, 0).await;
        assert!(error_ns.abs() < 5_000_000, "{error_ns} after {readings}");
        assert!(readings >= 2 && ready.has_new_hooks, "{readings}");
    }

    #[tokio::test]
    async fn a_clock_that_was_set_in_time_costs_no_exchange() {
        // Applying the identity took the whole time, not its transfer.
        let (error_ns, readings, ready) = correct(0, 30_000_000).await;
        assert_eq!((error_ns, readings, ready.has_new_hooks), (0, 0, false));
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
