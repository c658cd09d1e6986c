//! Full-screen mode of the terminal. The previous mode is restored when the guard is dropped, and
//! before a panic is reported.

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use parking_lot::Mutex;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Once;

/// Switches to the alternate screen, marks pasted text, hides the cursor, and clears the screen.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?2004h\x1b[?25l\x1b[2J";
/// Reverses [`ENTER`], and resets colours.
pub const LEAVE: &[u8] = b"\x1b[0m\x1b[?2004l\x1b[?25h\x1b[?1049l";

/// Terminal in full-screen mode and its previous mode.
struct Saved {
    input: File,
    output: File,
    mode: Termios,
}

/// Terminal in full-screen mode. `None` in the normal mode.
static SAVED: Mutex<Option<Saved>> = Mutex::new(None);
/// Guard of the panic hook, which is installed once.
static HOOK: Once = Once::new();

/// Guard of full-screen mode. At most one exists at a time.
#[derive(Debug)]
pub struct Screen(());

impl Screen {
    /// Switches the terminal to full-screen mode. `input` and `output` are the same terminal.
    pub fn enter(input: &File, output: &File) -> io::Result<Self> {
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // The report would be on the alternate screen, which disappears.
                restore();
                report(panic);
            }));
        });
        let mode = tcgetattr(input)?;
        let mut raw = mode.clone();
        cfmakeraw(&mut raw);
        *SAVED.lock() = Some(Saved {
            input: input.try_clone()?,
            output: output.try_clone()?,
            mode,
        });
        // Restores the mode if a later step fails.
        let screen = Self(());
        tcsetattr(input, SetArg::TCSADRAIN, &raw)?;
        let mut output = output;
        output.write_all(ENTER)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the previous mode, if the terminal is in full-screen mode.
fn restore() {
    // The thread that panics may hold the lock.
    let Some(mut saved) = SAVED.try_lock() else {
        return;
    };
    if let Some(mut saved) = saved.take() {
        // The terminal may be closed. No further action is possible.
        let _ = tcsetattr(&saved.input, SetArg::TCSANOW, &saved.mode);
        let _ = saved.output.write_all(LEAVE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::pty::{OpenptyResult, openpty};
    use nix::sys::termios::LocalFlags;
    use std::io::Read;

    /// Reads from a terminal until `end` follows.
    fn read_until(terminal: &mut File, end: &[u8]) -> Vec<u8> {
        let mut read = Vec::new();
        let mut byte = [0];
        while !read.ends_with(end) {
            terminal.read_exact(&mut byte).unwrap();
            read.extend(byte);
        }
        read
    }

    // One test, because the process has one guard and one hook.
    #[test]
    fn the_terminal_is_restored_after_the_guard_and_after_a_panic() {
        let OpenptyResult { master, slave } = openpty(None, None).unwrap();
        let (mut master, slave) = (File::from(master), File::from(slave));
        let before = tcgetattr(&slave).unwrap();
        assert!(
            before
                .local_flags
                .contains(LocalFlags::ICANON | LocalFlags::ECHO)
        );
        for panics in [false, true] {
            let result = std::panic::catch_unwind(|| {
                let screen = Screen::enter(&slave, &slave).unwrap();
                let raw = tcgetattr(&slave).unwrap();
                assert!(!raw.local_flags.contains(LocalFlags::ICANON));
                if panics {
                    // The hook restores the terminal: with `abort`, no destructor runs.
                    std::mem::forget(screen);
                    panic!("expected by the test");
                }
            });
            assert_eq!(result.is_err(), panics);
            let output = read_until(&mut master, LEAVE);
            assert!(output.starts_with(ENTER), "{output:?}");
            let after = tcgetattr(&slave).unwrap();
            assert_eq!(after.local_flags, before.local_flags);
            assert_eq!(after.input_flags, before.input_flags);
            assert_eq!(after.output_flags, before.output_flags);
        }
    }
}
