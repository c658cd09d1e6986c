//! Terminal of a program: a pseudo terminal, and the screen that its output produces.

use super::LIMIT;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{Termios, tcgetattr};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Program on a terminal. It is killed when this value is dropped.
pub struct Terminal {
    pub child: Child,
    master: File,
    /// Keeps the terminal open after the program, so that its mode can be read.
    slave: File,
    /// Output that is not interpreted yet.
    pending: Vec<u8>,
    /// All output.
    pub output: Vec<u8>,
    screen: Vec<Vec<char>>,
    row: usize,
    column: usize,
}

fn winsize(columns: u16, rows: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

fn blank(columns: u16, rows: u16) -> Vec<Vec<char>> {
    vec![vec![' '; columns.into()]; rows.into()]
}

impl Terminal {
    /// Starts a program on a terminal of this size.
    pub fn start(mut command: Command, columns: u16, rows: u16) -> Self {
        let OpenptyResult { master, slave } = openpty(Some(&winsize(columns, rows)), None).unwrap();
        let child = command
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .stdin(Stdio::from(slave.try_clone().unwrap()))
            .stdout(Stdio::from(slave.try_clone().unwrap()))
            .stderr(Stdio::from(slave.try_clone().unwrap()))
            .spawn()
            .unwrap();
        Self {
            child,
            master: File::from(master),
            slave: File::from(slave),
            pending: Vec::new(),
            output: Vec::new(),
            screen: blank(columns, rows),
            row: 0,
            column: 0,
        }
    }

    /// Returns the mode of the terminal.
    pub fn mode(&self) -> Termios {
        tcgetattr(&self.slave).unwrap()
    }

    /// Sends keys to the program.
    pub fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Sends a signal to the program.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    /// Changes the size of the terminal.
    pub fn resize(&mut self, columns: u16, rows: u16) {
        self.screen = blank(columns, rows);
        (self.row, self.column) = (0, 0);
        let size = winsize(columns, rows);
        // SAFETY: TIOCSWINSZ reads the given winsize.
        let result = unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &size) };
        assert_eq!(result, 0);
        // The terminal controls no process, so that the kernel sends no signal.
        self.signal(Signal::SIGWINCH);
    }

    /// Returns the lines of the screen without trailing spaces.
    pub fn lines(&self) -> Vec<String> {
        let line = |line: &Vec<char>| line.iter().collect::<String>().trim_end().to_owned();
        self.screen.iter().map(line).collect()
    }

    /// Returns the line that contains `text`.
    pub fn line(&self, text: &str) -> Option<String> {
        self.lines().into_iter().find(|line| line.contains(text))
    }

    /// Waits until the screen satisfies a condition.
    pub fn wait_for(&mut self, what: &str, is_met: impl Fn(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !is_met(self) {
            assert!(
                Instant::now() < end && self.child.try_wait().unwrap().is_none(),
                "no {what} on the screen:\n{}",
                self.lines().join("\n")
            );
            self.read();
        }
    }

    /// Waits until the program has exited. Returns its exit code.
    pub fn finish(&mut self) -> Option<i32> {
        let end = Instant::now() + LIMIT;
        let status = loop {
            self.read();
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "{}", self.lines().join("\n"));
        };
        while self.read() {}
        status.code()
    }

    /// Interprets the output that arrives within 50 ms. Returns false if none does.
    fn read(&mut self) -> bool {
        let timeout = PollTimeout::from(50u8);
        let mut polled = [PollFd::new(self.master.as_fd(), PollFlags::POLLIN)];
        if poll(&mut polled, timeout).unwrap() == 0 {
            return false;
        }
        let mut buffer = [0; 4096];
        let length = self.master.read(&mut buffer).unwrap();
        self.output.extend_from_slice(&buffer[..length]);
        self.pending.extend_from_slice(&buffer[..length]);
        while let Some(length) = self.interpret() {
            self.pending.drain(..length);
        }
        length > 0
    }

    /// Interprets the first character or sequence. Returns its length, if it is complete.
    fn interpret(&mut self) -> Option<usize> {
        let first = *self.pending.first()?;
        match (first, self.pending.get(1)) {
            (0x1b, None) => return None,
            (0x1b, Some(b'[')) => {
                let end = self.pending[2..]
                    .iter()
                    .position(|b| (0x40..=0x7e).contains(b))?;
                let parameters = String::from_utf8_lossy(&self.pending[2..2 + end]).into_owned();
                let last = self.pending[2 + end];
                self.sequence(&parameters, last);
                return Some(end + 3);
            }
            // A title or the clipboard.
            (0x1b, Some(b']')) => {
                let end = self.pending.iter().position(|&b| b == 0x07)?;
                return Some(end + 1);
            }
            (0x1b, Some(_)) => return Some(2),
            (b'\r', _) => self.column = 0,
            (b'\n', _) => self.line_feed(),
            (0x08, _) => self.column = self.column.saturating_sub(1),
            (0x00..=0x1f, _) => {}
            _ => return self.character(),
        }
        Some(1)
    }

    /// Shows the first character at the cursor. Returns its length, if it is complete.
    fn character(&mut self) -> Option<usize> {
        let start = &self.pending[..self.pending.len().min(4)];
        let valid = match std::str::from_utf8(start) {
            Ok(text) => text,
            Err(e) => std::str::from_utf8(&start[..e.valid_up_to()]).unwrap(),
        };
        let c = valid.chars().next()?;
        if self.column >= self.screen[0].len() {
            self.column = 0;
            self.line_feed();
        }
        self.screen[self.row][self.column] = c;
        self.column += 1;
        Some(c.len_utf8())
    }

    fn line_feed(&mut self) {
        if self.row + 1 < self.screen.len() {
            self.row += 1;
        } else {
            let columns = self.screen[0].len();
            self.screen.remove(0);
            self.screen.push(vec![' '; columns]);
        }
    }

    /// Interprets the control sequences that move the cursor or clear the screen.
    fn sequence(&mut self, parameters: &str, last: u8) {
        let numbers: Vec<usize> = parameters
            .split(';')
            .map(|n| n.parse().unwrap_or(0))
            .collect();
        let (rows, columns) = (self.screen.len(), self.screen[0].len());
        match (last, parameters) {
            (b'H', _) => {
                let at = |index: usize, limit: usize| {
                    let number = numbers.get(index).copied().unwrap_or(1).max(1);
                    (number - 1).min(limit - 1)
                };
                (self.row, self.column) = (at(0, rows), at(1, columns));
            }
            (b'J', "2") | (b'h' | b'l', "?1049") => {
                self.screen = vec![vec![' '; columns]; rows];
            }
            (b'J', _) => {
                self.screen[self.row][self.column.min(columns)..].fill(' ');
                self.screen[self.row + 1..]
                    .iter_mut()
                    .for_each(|line| line.fill(' '));
            }
            (b'K', _) => self.screen[self.row][self.column.min(columns)..].fill(' '),
            _ => {}
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
