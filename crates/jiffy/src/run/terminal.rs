//! Our terminal while the guest's command has one: raw, and put back whatever happens.

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use std::io::{IsTerminal, stdin, stdout};

/// Columns and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// Size of the terminal on standard output, or 80 by 24 where there is none.
pub fn size() -> Size {
    // SAFETY: an all-zero winsize is a valid value.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: TIOCGWINSZ fills the winsize it is given.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    if result == 0 && size.ws_col > 0 && size.ws_row > 0 {
        Size {
            cols: size.ws_col,
            rows: size.ws_row,
        }
    } else {
        Size { cols: 80, rows: 24 }
    }
}

/// Raw mode for as long as it lives. Does nothing where standard input is no terminal.
pub struct RawMode(Option<Termios>);

impl RawMode {
    /// Switches to raw mode.
    pub fn enter() -> nix::Result<Self> {
        if !stdin().is_terminal() || !stdout().is_terminal() {
            return Ok(Self(None));
        }
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(stdin(), SetArg::TCSADRAIN, &raw)?;
        Ok(Self(Some(before)))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(stdin(), SetArg::TCSADRAIN, before);
        }
    }
}
