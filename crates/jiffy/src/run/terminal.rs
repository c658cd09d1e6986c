//! Raw mode of the terminal of this process while a command in the guest has a terminal.

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use std::io::{IsTerminal, stdin, stdout};

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// Returns the size of the terminal on standard output. Defaults to 80 by 24 without a terminal.
pub fn size() -> Size {
    // SAFETY: an all-zero winsize is a valid value.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: TIOCGWINSZ writes to the winsize that the pointer refers to.
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

/// Guard of raw mode, which restores the previous mode when it is dropped. Has no effect if
/// standard input or output is not a terminal.
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
            // The terminal may be closed. No further action is possible in a destructor.
            let _ = tcsetattr(stdin(), SetArg::TCSADRAIN, before);
        }
    }
}
