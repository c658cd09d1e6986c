//! [`ProcessInput`]: standard input of a process, to which clients send bytes.

use super::message::InputData;
use crate::rpc::{RpcCode, RpcError};
use crate::sys;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;

/// Writing end of a process's input.
pub enum InputSink {
    /// A pipe.
    Pipe(AsyncFd<OwnedFd>),
    /// The agent's side of a terminal.
    Pty(Rc<AsyncFd<OwnedFd>>),
    /// No input, or closed input.
    Closed,
}

/// Input of one process. A lock serialises the writers.
pub struct ProcessInput {
    sink: Mutex<InputSink>,
}

/// Returns the error for an input that cannot be used. `what` states the reason.
fn closed(what: &str) -> RpcError {
    RpcError::new(RpcCode::FailedPrecondition, what)
}

impl ProcessInput {
    /// Wraps a sink.
    pub fn new(sink: InputSink) -> Self {
        Self {
            sink: Mutex::new(sink),
        }
    }

    /// Writes all bytes. Waits while the process does not read.
    pub async fn write(&self, input: &InputData) -> Result<(), RpcError> {
        // The lock is held during the whole write, so that the bytes of two requests do not mix.
        let sink = self.sink.lock().await;
        let (fd, bytes) = match (&*sink, input) {
            (InputSink::Pipe(fd), InputData { stdin: Some(b), .. }) => (fd, b),
            (InputSink::Pty(fd), InputData { pty: Some(b), .. }) => (&**fd, b),
            (
                _,
                InputData {
                    stdin: None,
                    pty: None,
                },
            ) => return Ok(()),
            (InputSink::Pipe(_), _) => return Err(closed("the process has no terminal")),
            (InputSink::Pty(_), _) => {
                return Err(closed("the process reads from a terminal, not from stdin"));
            }
            (InputSink::Closed, _) => return Err(closed("stdin of the process is closed")),
        };
        write_all(fd, bytes)
            .await
            .map_err(|e| match e.raw_os_error() {
                Some(libc::EPIPE | libc::EIO) => closed("the process has closed its input"),
                _ => RpcError::io("cannot write to the process", &e),
            })
    }

    /// Closes the input. The process then reads the end of the input.
    pub async fn close(&self) -> Result<(), RpcError> {
        let mut sink = self.sink.lock().await;
        if matches!(*sink, InputSink::Pty(_)) {
            return Err(closed("a terminal cannot be closed, send it Ctrl-D"));
        }
        *sink = InputSink::Closed;
        Ok(())
    }

    /// Closes the descriptor after the process has exited.
    pub fn release(&self) {
        // A writer that still waits receives EPIPE, or is cancelled with its client's request.
        if let Ok(mut sink) = self.sink.try_lock() {
            *sink = InputSink::Closed;
        }
    }

    /// Returns the agent's side of the terminal, if the process has a terminal.
    pub async fn terminal(&self) -> Option<Rc<AsyncFd<OwnedFd>>> {
        match &*self.sink.lock().await {
            InputSink::Pty(fd) => Some(Rc::clone(fd)),
            _ => None,
        }
    }
}

/// Writes all bytes to a non-blocking descriptor.
async fn write_all(fd: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        // The first write does not wait for readiness, since most input fits at once.
        match sys::write(fd.as_raw_fd(), bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let mut ready = fd.writable().await?;
                if let Ok(result) = ready.try_io(|fd| sys::write(fd.as_raw_fd(), bytes)) {
                    bytes = &bytes[result?..];
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
