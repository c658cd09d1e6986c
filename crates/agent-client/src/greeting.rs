//! The host's half of the greeting: see `jiffy_proto::agent`. Blocking, so that it needs no runtime.

use jiffy_proto::agent::{Hello, Identity, MAX_GREETING, Ready};
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Why a guest was not greeted.
#[derive(Debug, thiserror::Error)]
pub enum GreetError {
    /// The agent closed the connection.
    #[error("the agent closed the connection during the greeting")]
    Closed,
    /// The agent did not answer in time.
    #[error("the agent did not answer within {0:?}")]
    Timeout(Duration),
    /// A line was longer than [`MAX_GREETING`].
    #[error("the agent sent a line of more than {MAX_GREETING} bytes")]
    TooLong,
    /// A line was not what the protocol asks for.
    #[error("the agent's greeting is not understood: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The agent could not take the identity; the sandbox must not be handed out.
    #[error("the sandbox could not take its identity: {0}")]
    Refused(String),
    /// The socket failed.
    #[error("greeting: {0}")]
    Io(#[from] io::Error),
}

struct Lines<'a> {
    stream: &'a UnixStream,
    began: Instant,
    limit: Duration,
    buffer: Vec<u8>,
}

impl Lines<'_> {
    /// Reads a line. The limit is for the whole greeting: a guest that drips bytes does not extend it.
    fn read<T: DeserializeOwned>(&mut self) -> Result<T, GreetError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(serde_json::from_slice(&line)?);
            }
            if self.buffer.len() > MAX_GREETING {
                return Err(GreetError::TooLong);
            }
            let left = self
                .limit
                .checked_sub(self.began.elapsed())
                .filter(|left| !left.is_zero())
                .ok_or(GreetError::Timeout(self.limit))?;
            self.stream.set_read_timeout(Some(left))?;
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(GreetError::Closed),
                Ok(n) => self.buffer.extend_from_slice(&piece[..n]),
                Err(e) => match e.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        return Err(GreetError::Timeout(self.limit));
                    }
                    io::ErrorKind::ConnectionReset => return Err(GreetError::Closed),
                    _ => return Err(e.into()),
                },
            }
        }
    }
}

/// Greets an agent that connected: takes its [`Hello`], sends the identity and waits for [`Ready`], all within
/// `limit`. An identity whose `time_ns` is 0 gets the time of sending. The stream stays usable; keep it open.
pub fn greet(
    stream: &UnixStream,
    identity: &Identity,
    limit: Duration,
) -> Result<(Hello, Ready), GreetError> {
    let mut lines = Lines {
        stream,
        began: Instant::now(),
        limit,
        buffer: Vec::new(),
    };
    let hello: Hello = lines.read()?;
    let mut identity = identity.clone();
    if identity.time_ns == 0 {
        identity.time_ns = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
    }
    let mut line = serde_json::to_vec(&identity)?;
    line.push(b'\n');
    if line.len() > MAX_GREETING {
        return Err(GreetError::Io(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("the identity is longer than {MAX_GREETING} bytes"),
        )));
    }
    stream.set_write_timeout(Some(limit))?;
    match (&mut &*stream).write_all(&line) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Err(GreetError::Closed),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(GreetError::Timeout(limit)),
        other => other?,
    }
    let ready: Ready = lines.read()?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    match ready.error {
        Some(reason) => Err(GreetError::Refused(reason)),
        None => Ok((hello, ready)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const LIMIT: Duration = Duration::from_millis(500);
    const HELLO: &[u8] = b"{\"version\":\"1\",\"kernel\":\"6\",\"init_us\":1,\"hello_us\":2}\n";

    fn against(
        script: impl FnOnce(UnixStream) + Send + 'static,
    ) -> Result<(Hello, Ready), GreetError> {
        let (host, guest) = UnixStream::pair().unwrap();
        let guest = thread::spawn(move || script(guest));
        let outcome = greet(&host, &Identity::default(), LIMIT);
        drop(host);
        guest.join().unwrap();
        outcome
    }

    fn read_line(guest: &mut UnixStream) -> Vec<u8> {
        let (mut line, mut byte) = (Vec::new(), [0]);
        while byte != *b"\n" && guest.read(&mut byte).unwrap() == 1 {
            line.push(byte[0]);
        }
        line
    }

    #[test]
    fn a_good_guest_gets_its_identity_with_the_time() {
        let (hello, ready) = against(|mut guest| {
            guest.write_all(HELLO).unwrap();
            let identity: Identity = serde_json::from_slice(&read_line(&mut guest)).unwrap();
            assert!(identity.time_ns > 0);
            guest.write_all(b"{\"ready_us\":9}\n").unwrap();
        })
        .unwrap();
        assert_eq!((hello.init_us, ready.ready_us), (1, 9));
    }

    #[test]
    fn a_guest_without_identity_is_refused() {
        let outcome = against(|mut guest| {
            guest.write_all(HELLO).unwrap();
            read_line(&mut guest);
            guest
                .write_all(b"{\"ready_us\":9,\"error\":\"no entropy\"}\n")
                .unwrap();
        });
        assert!(matches!(outcome, Err(GreetError::Refused(why)) if why == "no entropy"));
    }

    #[test]
    fn endless_slow_closed_and_garbled_greetings_are_told_apart() {
        let endless = against(|mut guest| {
            let _ = guest.write_all(&vec![b'x'; 2 * MAX_GREETING]);
        });
        assert!(matches!(endless, Err(GreetError::TooLong)));
        let drip = against(|mut guest| {
            while guest.write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(50));
            }
        });
        assert!(matches!(drip, Err(GreetError::Timeout(_))));
        assert!(matches!(against(drop), Err(GreetError::Closed)));
        let garbled = against(|mut guest| guest.write_all(b"hello\n").unwrap());
        assert!(matches!(garbled, Err(GreetError::Malformed(_))));
    }
}
