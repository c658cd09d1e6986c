//! Text for a terminal.
//!
//! Names, logs and errors come from sandboxes, tenants, stores and other hosts. A terminal obeys
//! control characters in them: it moves its cursor, hides text, or types text as its user. All that
//! commands print passes through this module, but for bytes that a command exists to pass on:
//! output of processes, files, archives and responses. A lint rejects `println` in this crate and
//! in `jiffy`.

use serde::Serialize;
use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::io;

/// Exit code of a command that cannot print its result.
const FAILURE_EXIT_CODE: i32 = 1;
const BOLD: &str = "\u{1b}[1m";
const PLAIN: &str = "\u{1b}[0m";

/// Returns whether a terminal may obey a character instead of showing it. Of characters for layout,
/// those are meant that change the direction of text and so its apparent order.
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        // Writing to a String does not fail.
        let _ = match c {
            c if !is_escaped(c) => write!(shown, "{c}"),
            '\n' | '\r' | '\t' => write!(shown, "{}", c.escape_default()),
            c if c.is_ascii() => write!(shown, "\\x{:02x}", u32::from(c)),
            c => write!(shown, "\\u{{{:x}}}", u32::from(c)),
        };
    }
    Cow::Owned(shown)
}

/// Text of others within one line: all control characters are escaped, ends of lines among them.
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(text, is_obeyed)
}

/// Text of several lines: control characters but ends of lines and tabs are escaped.
pub fn text(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_obeyed(c) && c != '\n' && c != '\t')
}

/// Text without sequences that choose colours and fonts (`ESC [ 1 ; 31 m`), which are no harm and
/// frequent in output of builds. Other sequences stay, for [`text`] to escape.
pub fn without_colours(text: &str) -> Cow<'_, str> {
    let mut rest = text;
    let mut shown = String::new();
    while let Some((before, behind)) = rest.split_once("\u{1b}[") {
        shown.push_str(before);
        let end = behind.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        match end.strip_prefix('m') {
            Some(end) => rest = end,
            None => {
                shown.push_str("\u{1b}[");
                rest = behind;
            }
        }
    }
    match shown.is_empty() && rest.len() == text.len() {
        true => Cow::Borrowed(text),
        false => Cow::Owned(shown + rest),
    }
}

/// A value as JSON, in which all control characters are escaped.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(escaped_json(serde_json::to_string_pretty(value)?))
}

/// The same in one line.
pub fn json_line(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(escaped_json(serde_json::to_string(value)?))
}

/// `serde_json` escapes what JSON demands, which is not all that terminals obey.
fn escaped_json(json: String) -> String {
    let is_escaped = |c: char| is_obeyed(c) && c != '\n';
    if !json.chars().any(is_escaped) {
        return json;
    }
    let mut shown = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        let _ = match is_escaped(c) {
            // None of them is beyond the first plane.
            true => write!(shown, "\\u{:04x}", u32::from(c)),
            false => write!(shown, "{c}"),
        };
    }
    shown
}

/// Prints text on standard output. A reader that has seen enough is no error; another failure ends
/// the program. Used by the macros `out` and `outln`.
pub fn print(args: fmt::Arguments<'_>, end: &str) {
    let written = write(io::stdout().lock(), &text(&args.to_string()), end);
    match written {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            print_error(format_args!("jiffy: cannot write to standard output: {e}"));
            std::process::exit(FAILURE_EXIT_CODE);
        }
        _ => {}
    }
}

/// Prints a line on standard error. Failures are ignored because standard error is the place to
/// report them. Used by the macro `errln`.
pub fn print_error(args: fmt::Arguments<'_>) {
    let _ = write(io::stderr().lock(), &text(&args.to_string()), "\n");
}

/// Prints a bold line on standard error, which must be a terminal.
pub fn print_bold_error(line: &str) {
    let line = text(line);
    let _ = write(io::stderr().lock(), &format!("{BOLD}{line}{PLAIN}"), "\n");
}

fn write(mut to: impl io::Write, text: &str, end: &str) -> io::Result<()> {
    // At once: another process may write to the same terminal.
    to.write_all(format!("{text}{end}").as_bytes())?;
    to.flush()
}

/// Prints text on standard output, with control characters escaped.
#[macro_export]
macro_rules! out {
    ($($arg:tt)*) => { $crate::terminal::print(::std::format_args!($($arg)*), "") };
}

/// Prints a line on standard output, with control characters escaped.
#[macro_export]
macro_rules! outln {
    ($($arg:tt)*) => { $crate::terminal::print(::std::format_args!($($arg)*), "\n") };
}

/// Prints a line on standard error, with control characters escaped.
#[macro_export]
macro_rules! errln {
    ($($arg:tt)*) => { $crate::terminal::print_error(::std::format_args!($($arg)*)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets a title, moves the cursor, types an answer; the second byte sequence is a CSI as well.
    const HOSTILE: &str = "a\u{1b}]0;x\u{7}b\u{9b}2Jc\r\nd\u{202e}e\tf\u{7f}";

    #[test]
    fn no_control_character_reaches_a_terminal_and_all_else_does() {
        let shown = line(HOSTILE);
        assert_eq!(
            shown,
            "a\\x1b]0;x\\x07b\\u{9b}2Jc\\r\\nd\\u{202e}e\\tf\\x7f"
        );
        let shown = text(HOSTILE);
        assert!(
            shown.contains("c\\r\nd") && shown.contains("e\tf"),
            "{shown}"
        );
        for control in (0..=0x9f)
            .filter_map(char::from_u32)
            .filter(|c| c.is_control())
        {
            let word = format!("a{control}b");
            assert!(!line(&word).contains(control), "{control:?}");
            assert_eq!(
                text(&word).contains(control),
                matches!(control, '\n' | '\t')
            );
        }
        for kept in ["", "größer, 漢字 🙂 %s \\x1b", "e\u{301}"] {
            assert!(matches!(line(kept), Cow::Borrowed(same) if same == kept));
        }
    }

    #[test]
    fn json_stays_json_and_says_the_same() {
        let value = serde_json::json!({ HOSTILE: [HOSTILE, 1] });
        for json in [json(&value).unwrap(), json_line(&value).unwrap()] {
            let obeyed = |c: char| is_obeyed(c) && c != '\n';
            assert!(!json.contains(obeyed), "{json:?}");
            let read: serde_json::Value = serde_json::from_str(&json).unwrap();
            assert_eq!(read, value);
        }
        assert!(!json_line(&value).unwrap().contains('\n'));
    }

    #[test]
    fn colours_are_left_out_and_nothing_else() {
        assert_eq!(without_colours("\u{1b}[1;31mred\u{1b}[0m"), "red");
        assert_eq!(without_colours("\u{1b}[m"), "");
        for kept in [
            "plain",
            "\u{1b}[2J",
            "\u{1b}[",
            "\u{1b}]0;m",
            "\u{1b}[1\u{1b}",
        ] {
            assert_eq!(without_colours(kept), kept);
        }
        assert_eq!(without_colours("\u{1b}[1\u{1b}[3mx"), "\u{1b}[1x");
    }
}
