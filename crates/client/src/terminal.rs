//! Output to the terminal, with control characters escaped.
//!
//! Names, logs and errors come from sandboxes, tenants, stores and other hosts. Control characters
//! in them could move the cursor, hide text or send input on behalf of the user. All output of
//! commands is printed through this module, except for raw data of processes, files, archives and
//! responses. A lint rejects `println` in this crate and in `jiffy`.

use serde::Serialize;
use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::io;

/// Exit code of a command that cannot print its result.
const FAILURE_EXIT_CODE: i32 = 1;
const BOLD: &str = "\u{1b}[1m";
const PLAIN: &str = "\u{1b}[0m";

/// Returns whether a terminal may interpret a character instead of displaying it. Includes
/// characters that change the text direction, and thereby the visible order of text.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes the characters that `is_escaped` selects. Does not copy a text without them.
fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        // Writing to a string cannot fail.
        let _ = match c {
            c if !is_escaped(c) => write!(shown, "{c}"),
            // Escapes in the notation of Rust strings.
            '\n' | '\r' | '\t' => write!(shown, "{}", c.escape_default()),
            c if c.is_ascii() => write!(shown, "\\x{:02x}", u32::from(c)),
            c => write!(shown, "\\u{{{:x}}}", u32::from(c)),
        };
    }
    Cow::Owned(shown)
}

/// Escapes all control characters, including line feeds.
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(text, is_control)
}

/// Escapes control characters except for line feeds and tabs.
pub fn text(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_control(c) && c != '\n' && c != '\t')
}

/// Removes escape sequences for colours and fonts (`ESC [ 1 ; 31 m`), which are frequent in output
/// of builds. Other sequences remain, and are escaped by [`text`].
pub fn without_colours(text: &str) -> Cow<'_, str> {
    let mut rest = text;
    let mut shown = String::new();
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        shown.push_str(before);
        let end = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        match end.strip_prefix('m') {
            Some(end) => rest = end,
            // Not a sequence for colours: retain it for `text` to escape.
            None => {
                shown.push_str("\u{1b}[");
                rest = after;
            }
        }
    }
    if shown.is_empty() && rest.len() == text.len() {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(shown + rest)
    }
}

/// Formats a value as indented JSON with all control characters escaped.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(escaped_json(serde_json::to_string_pretty(value)?))
}

/// Formats a value as JSON in one line with all control characters escaped.
pub fn json_line(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(escaped_json(serde_json::to_string(value)?))
}

/// Escapes control characters that JSON permits in strings.
fn escaped_json(json: String) -> String {
    let is_escaped = |c: char| is_control(c) && c != '\n';
    if !json.chars().any(is_escaped) {
        return json;
    }
    let mut shown = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        let _ = if is_escaped(c) {
            // All of these characters have at most four hexadecimal digits.
            write!(shown, "\\u{:04x}", u32::from(c))
        } else {
            write!(shown, "{c}")
        };
    }
    shown
}

/// Prints text on standard output. Ignores a closed pipe, and exits the process on other errors.
/// Used by the macros `out` and `outln`.
pub fn print(args: fmt::Arguments<'_>, end: &str) {
    let result = write(io::stdout().lock(), &text(&args.to_string()), end);
    match result {
        // A reader such as `head` may close the pipe early, which is not an error.
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            print_error(format_args!("jiffy: cannot write to standard output: {e}"));
            // A caller cannot continue without its output.
            std::process::exit(FAILURE_EXIT_CODE);
        }
        _ => {}
    }
}

/// Prints a line on standard error. Errors are ignored, because they cannot be reported elsewhere.
/// Used by the macro `errln`.
pub fn print_error(args: fmt::Arguments<'_>) {
    let _ = write(io::stderr().lock(), &text(&args.to_string()), "\n");
}

/// Prints a bold line on standard error, which must be a terminal.
pub fn print_bold_error(line: &str) {
    let line = text(line);
    let _ = write(io::stderr().lock(), &format!("{BOLD}{line}{PLAIN}"), "\n");
}

fn write(mut to: impl io::Write, text: &str, end: &str) -> io::Result<()> {
    // The text is written with one call, because other processes may write to the same terminal.
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

    /// Sets a title, moves the cursor and inserts text. U+009B is the 8-bit form of `ESC [`.
    const HOSTILE: &str = "a\u{1b}]0;x\u{7}b\u{9b}2Jc\r\nd\u{202e}e\tf\u{7f}";

    #[test]
    fn only_control_characters_are_escaped() {
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
        for plain in ["", "größer, 漢字 🙂 %s \\x1b", "e\u{301}"] {
            assert!(matches!(line(plain), Cow::Borrowed(same) if same == plain));
        }
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let value = serde_json::json!({ HOSTILE: [HOSTILE, 1] });
        for json in [json(&value).unwrap(), json_line(&value).unwrap()] {
            let is_raw = |c: char| is_control(c) && c != '\n';
            assert!(!json.contains(is_raw), "{json:?}");
            let read: serde_json::Value = serde_json::from_str(&json).unwrap();
            assert_eq!(read, value);
        }
        assert!(!json_line(&value).unwrap().contains('\n'));
    }

    #[test]
    fn only_colours_are_removed() {
        assert_eq!(without_colours("\u{1b}[1;31mred\u{1b}[0m"), "red");
        assert_eq!(without_colours("\u{1b}[m"), "");
        for text in [
            "plain",
            "\u{1b}[2J",
            "\u{1b}[",
            "\u{1b}]0;m",
            "\u{1b}[1\u{1b}",
        ] {
            assert_eq!(without_colours(text), text);
        }
        assert_eq!(without_colours("\u{1b}[1\u{1b}[3mx"), "\u{1b}[1x");
    }
}
