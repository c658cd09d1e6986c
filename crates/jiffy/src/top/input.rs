//! Reads the input of the terminal for `jiffy top`.

use super::keys::{Key, KeyDecoder};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Time after which an escape character without further input is a key. Terminals send the rest of
/// a sequence at once, but a network may delay it.
const ESCAPE_DELAY: Duration = Duration::from_millis(50);

/// Reader of a terminal. It reads only while [`Self::next`] is called, so that a shell on the same
/// terminal receives all of its input.
pub struct Input {
    terminal: AsyncFd<File>,
    decoder: KeyDecoder,
}

impl Input {
    /// Creates a reader of a terminal. Its file description remains in blocking mode, because
    /// other processes share it.
    pub fn new(terminal: File) -> io::Result<Self> {
        Ok(Self {
            // SAFETY: the file is owned by the result, and is open until it is dropped.
            terminal: unsafe { AsyncFd::register_with_interest(terminal, Interest::READABLE) }?,
            decoder: KeyDecoder::default(),
        })
    }

    /// Waits for keys. Dropping the future loses no input.
    ///
    /// # Errors
    /// `UnexpectedEof` if the terminal was closed.
    pub async fn next(&mut self) -> io::Result<Vec<Key>> {
        loop {
            let ready = self.terminal.readable();
            let mut guard = if self.decoder.is_incomplete() {
                match tokio::time::timeout(ESCAPE_DELAY, ready).await {
                    Ok(guard) => guard?,
                    Err(_) => return Ok(self.decoder.flush().into_iter().collect()),
                }
            } else {
                ready.await?
            };
            let mut buffer = [0; 1024];
            let Some(length) = read_available(guard.get_inner(), &mut buffer)? else {
                guard.clear_ready();
                continue;
            };
            if length < buffer.len() {
                guard.clear_ready();
            }
            let keys = self.decoder.feed(&buffer[..length]);
            if !keys.is_empty() {
                return Ok(keys);
            }
        }
    }
}

/// Reads input that has arrived. Returns `None` if none has. Never waits.
fn read_available(terminal: &File, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let mut polled = [PollFd::new(terminal.as_fd(), PollFlags::POLLIN)];
    if poll(&mut polled, PollTimeout::ZERO)? == 0 {
        return Ok(None);
    }
    match nix::unistd::read(terminal, buffer) {
        // The other side of a pseudo terminal was closed.
        Ok(0) | Err(Errno::EIO) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(length) => Ok(Some(length)),
        Err(Errno::EINTR | Errno::EAGAIN) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::pty::openpty;
    use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
    use std::io::Write;

    #[tokio::test]
    async fn keys_are_read_until_the_terminal_is_closed() {
        let pty = openpty(None, None).unwrap();
        let (mut master, slave) = (File::from(pty.master), File::from(pty.slave));
        let mut raw = tcgetattr(&slave).unwrap();
        cfmakeraw(&mut raw);
        tcsetattr(&slave, SetArg::TCSANOW, &raw).unwrap();
        let mut input = Input::new(slave).unwrap();
        master.write_all(b"q").unwrap();
        assert_eq!(input.next().await.unwrap(), [Key::Char('q')]);
        master.write_all(b"\x1b").unwrap();
        assert_eq!(input.next().await.unwrap(), [Key::Escape]);
        // More input than one read returns.
        master.write_all(&[b'j'; 3000]).unwrap();
        let mut count = 0;
        while count < 3000 {
            count += input.next().await.unwrap().len();
        }
        drop(master);
        let error = input.next().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
