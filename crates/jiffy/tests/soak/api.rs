//! Calls of clients whose daemon may be killed at any time.

use super::model::locked;
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Timeout of answers, also of guests whose programs wait 15 s. A killed daemon closes its
/// connections at once.
const ANSWER_LIMIT: Duration = Duration::from_secs(45);

/// Outcome of a call.
#[derive(Debug, Clone)]
pub enum Reply {
    /// Status and body of the answer.
    Answered(u16, Value),
    /// The connection to the daemon failed, or its answer was incomplete.
    Lost(String),
}

impl Reply {
    /// Returns whether the call succeeded.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Answered(200..300, _))
    }

    /// Returns whether the call was rejected because of the request or the sandbox's state.
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Answered(400..500, _))
    }

    /// Returns whether the host has insufficient capacity.
    pub fn is_capacity_exceeded(&self) -> bool {
        matches!(self, Self::Answered(429 | 503, body) if body["error_code"] == "host_busy")
    }

    pub fn body(&self) -> &Value {
        match self {
            Self::Answered(_, body) => body,
            Self::Lost(_) => &Value::Null,
        }
    }

    /// Returns a short description for the history.
    pub fn short(&self) -> String {
        match self {
            Self::Answered(status @ 200..300, _) => status.to_string(),
            Self::Answered(status, body) => format!("{status} {}", body["message"]),
            Self::Lost(why) => format!("lost: {why}"),
        }
    }
}

/// Socket of a daemon.
pub struct Api {
    pub socket: PathBuf,
    /// Calls without an answer within [`ANSWER_LIMIT`].
    pub unanswered: Mutex<Vec<String>>,
}

impl Api {
    /// Calls the control plane.
    pub fn call(&self, method: &str, path: &str, body: &Value) -> Reply {
        self.ask(method, path, "Content-Type: application/json\r\n", body)
    }

    /// Sends a request to a port of a guest.
    pub fn guest(&self, id: &str, port: u16, method: &str, path: &str) -> Reply {
        let headers = format!("E2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n");
        self.ask(method, path, &headers, &Value::Null)
    }

    /// Sends a request. Records the call if its answer took too long.
    fn ask(&self, method: &str, path: &str, headers: &str, body: &Value) -> Reply {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\n{headers}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let began = Instant::now();
        let reply = match self.exchange(&request) {
            Ok(answer) => parsed(&answer),
            Err(e) => Reply::Lost(e.to_string()),
        };
        let took = began.elapsed();
        if took > ANSWER_LIMIT {
            let head = request.lines().take(4).collect::<Vec<_>>().join(", ");
            let description = format!("{head}: {took:?} until {}", reply.short());
            locked(&self.unanswered).push(description);
        }
        reply
    }

    fn exchange(&self, request: &str) -> std::io::Result<String> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

/// Parses an answer. An answer with an incomplete body is lost.
fn parsed(answer: &str) -> Reply {
    let lost = || Reply::Lost(format!("connection lost after {answer:?}"));
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        return lost();
    };
    let length = head
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse().ok());
    if length.is_some_and(|length: usize| length != body.len()) {
        return lost();
    }
    let Some(Ok(status)) = head.split(' ').nth(1).map(str::parse) else {
        return lost();
    };
    let text = || Value::String(body.to_owned());
    Reply::Answered(
        status,
        serde_json::from_str(body).unwrap_or_else(|_| text()),
    )
}
