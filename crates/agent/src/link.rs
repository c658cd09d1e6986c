//! The agent's ports where there is no vsock: see `jiffy_proto::agent::LINK_PORT`.
//!
//! Only the host knows the key. Whoever does not show it gets neither an answer nor a reason.

use crate::settings::same_secret;
use crate::state::Agent;
use jiffy_proto::agent::{ENVD_PORT, HELLO_PORT, LINK_KEY_DIGITS, LINK_PORT, TCP_PORT};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::{TcpListener, UnixStream};
use tokio::time::timeout;

/// In which a connection has to say its first line.
const PREFACE_TIME: Duration = Duration::from_secs(10);
/// Where the port begins in the first line.
const PORT_AT: usize = LINK_KEY_DIGITS + 1;
/// Least and most digits of a port of ours.
const PORT_DIGITS: (usize, usize) = (4, 5);

/// Whether a text has the form of a key.
pub fn is_key(text: &str) -> bool {
    text.len() == LINK_KEY_DIGITS && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The listening port.
pub struct LinkListener(TcpListener);

impl LinkListener {
    /// Listens.
    pub fn bind() -> io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, LINK_PORT))?;
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener).map(Self)
    }

    /// The next connection, which is yet to be [admitted](admit).
    pub async fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.0.accept().await?;
        stream.set_nodelay(true)?;
        // As with vsock: only what all stream sockets can do is asked of it.
        let socket = OwnedFd::from(stream.into_std()?);
        UnixStream::from_std(std::os::unix::net::UnixStream::from(socket))
    }
}

/// Reads the first line of a connection. Returns the port that it names, if it begins with the key that is in force.
pub async fn admit(agent: &Agent, mut stream: UnixStream) -> Option<(u32, UnixStream)> {
    let (given, port) = timeout(PREFACE_TIME, preface(&mut stream)).await.ok()??;
    let settings = agent.settings.borrow();
    let key = settings.link_key.as_deref()?;
    same_secret(&given, key).then_some((port, stream))
}

/// Key and port of the first line. What follows it is not read.
async fn preface(stream: &mut (impl AsyncRead + Unpin)) -> Option<(String, u32)> {
    // As much as the shortest line has, and the rest byte by byte.
    let mut line = vec![0; PORT_AT + PORT_DIGITS.0];
    stream.read_exact(&mut line).await.ok()?;
    loop {
        match stream.read_u8().await.ok()? {
            b'\n' => break,
            byte if line.len() < PORT_AT + PORT_DIGITS.1 => line.push(byte),
            _ => return None,
        }
    }
    let line = String::from_utf8(line).ok()?;
    let (key, port) = line.split_once(' ')?;
    let port = [HELLO_PORT, ENVD_PORT, TCP_PORT]
        .into_iter()
        .find(|known| known.to_string() == port)?;
    is_key(key).then(|| (key.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;
    use tokio::io::AsyncWriteExt;

    const KEY: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    /// What a connection that begins with `words` leads to.
    async fn begin(words: &[u8]) -> Option<(u32, UnixStream)> {
        let agent = Agent::new(Settings {
            link_key: Some(KEY.to_owned()),
            ..Settings::default()
        })
        .unwrap();
        let (mut host, stream) = UnixStream::pair().unwrap();
        host.write_all(words).await.unwrap();
        drop(host);
        admit(&agent, stream).await
    }

    #[tokio::test]
    async fn the_key_leads_to_each_port_and_what_follows_the_line_stays() {
        for port in [HELLO_PORT, ENVD_PORT, TCP_PORT] {
            let words = format!("{KEY} {port}\nGET /health\n");
            let (found, mut stream) = begin(words.as_bytes()).await.unwrap();
            assert_eq!(found, port);
            let mut rest = String::new();
            stream.read_to_string(&mut rest).await.unwrap();
            assert_eq!(rest, "GET /health\n");
        }
    }

    #[tokio::test]
    async fn anything_else_leads_nowhere() {
        let wrong = KEY.replace('0', "1");
        let upper = KEY.to_uppercase();
        let long = "0".repeat(10_000);
        for words in [
            String::new(),
            "\n".to_owned(),
            "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody who knows no key\r\n\r\n"
                .to_owned(),
            format!("{wrong} 49983\n"),
            format!("{upper} 49983\n"),
            format!("{KEY} 80\n"),
            format!("{KEY} 8080\n"),
            format!("{KEY} +1024\n"),
            format!("{KEY} 01024\n"),
            format!("{KEY} 1024\r\n"),
            format!("{KEY}  1024\n"),
            format!("{KEY} 499830\n"),
            format!("{KEY} 49983"),
            format!("{KEY}0 1024\n"),
            format!(" {KEY} 1024\n"),
            KEY.to_owned(),
            long,
        ] {
            assert!(begin(words.as_bytes()).await.is_none(), "{words}");
        }
        assert!(begin(&[0xff; 100]).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_that_does_not_end_in_time_leads_nowhere() {
        let agent = Agent::new(Settings {
            link_key: Some(KEY.to_owned()),
            ..Settings::default()
        })
        .unwrap();
        let (mut host, stream) = UnixStream::pair().unwrap();
        host.write_all(KEY.as_bytes()).await.unwrap();
        assert!(admit(&agent, stream).await.is_none());
        drop(host);
    }

    #[test]
    fn a_key_is_64_hexadecimal_digits() {
        assert!(is_key(KEY));
        assert!(!is_key(&KEY[1..]));
        assert!(!is_key(&KEY.replace('0', "g")));
    }
}
