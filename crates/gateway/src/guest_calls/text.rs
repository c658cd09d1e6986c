//! Bounded, escaped texts of commands and paths for the audit log. They come from clients.

use std::fmt::Write;

/// Maximum length of a recorded command in bytes.
pub const MAX_COMMAND_BYTES: usize = 1024;
/// Maximum length of all recorded paths of a call in bytes.
pub const MAX_PATHS_BYTES: usize = 4096;
/// Maximum length of a recorded path in bytes.
const MAX_PATH_BYTES: usize = 1024;
/// Maximum number of recorded paths of a call.
const MAX_PATHS: usize = 8;
/// Follows a text that is incomplete, and replaces names that were not recorded.
pub(crate) const OMITTED: &str = "…";

/// Returns a command in one line: arguments with special characters in quotation marks, control
/// characters escaped, at most [`MAX_COMMAND_BYTES`] and an ellipsis.
#[must_use]
pub fn bounded_command<T: AsRef<str>>(arguments: &[T]) -> String {
    let mut line = String::new();
    for argument in arguments {
        if line.len() > MAX_COMMAND_BYTES {
            break;
        }
        if !line.is_empty() {
            line.push(' ');
        }
        let argument = argument.as_ref();
        let is_plain = |c: char| c.is_alphanumeric() || "_@%+=:,./-…".contains(c);
        if !argument.is_empty() && argument.chars().all(is_plain) {
            line.push_str(bounded_start(argument, MAX_COMMAND_BYTES + 1));
        } else {
            line.push('\'');
            let start = bounded_start(argument, MAX_COMMAND_BYTES + 1);
            line.push_str(&start.replace('\'', r"'\''"));
            line.push('\'');
        }
    }
    escaped(&line, MAX_COMMAND_BYTES)
}

/// Returns at most 8 paths with control characters escaped, together at most [`MAX_PATHS_BYTES`].
/// An ellipsis replaces further paths.
#[must_use]
pub fn bounded_paths<T: AsRef<str>>(paths: &[T]) -> Vec<String> {
    let mut recorded: Vec<String> = Vec::new();
    let mut total = 0;
    for path in paths {
        let path = escaped(path.as_ref(), MAX_PATH_BYTES);
        total += path.len();
        if recorded.len() >= MAX_PATHS || total > MAX_PATHS_BYTES {
            recorded.push(OMITTED.to_owned());
            break;
        }
        recorded.push(path);
    }
    recorded
}

/// Escapes control characters and characters that change the direction of text, up to `max` bytes.
/// An ellipsis replaces the remainder.
fn escaped(text: &str, max: usize) -> String {
    let mut line = String::with_capacity(text.len().min(max));
    for c in text.chars() {
        let length = line.len();
        if is_control(c) {
            // Writing to a string does not fail.
            let _ = write!(line, "{}", c.escape_default());
        } else {
            line.push(c);
        }
        if line.len() > max {
            line.truncate(length);
            line.push_str(OMITTED);
            break;
        }
    }
    line
}

fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns the first `max` bytes of a text, cut at the end of a character.
fn bounded_start(text: &str, max: usize) -> &str {
    text.get(..text.floor_char_boundary(max)).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_one_bounded_line() {
        let line = bounded_command(&["sh", "-c", "echo 'a'\n\u{1b}[2J\u{202e}", ""]);
        assert_eq!(line, r"sh -c 'echo '\''a'\''\n\u{1b}[2J\u{202e}' ''");
        let long = bounded_command(&["x".repeat(5000), "y".to_owned()]);
        assert_eq!(long.len(), MAX_COMMAND_BYTES + OMITTED.len());
        assert!(bounded_command(&["ä'".repeat(5000)]).len() <= MAX_COMMAND_BYTES + 3);
    }

    #[test]
    fn paths_are_bounded_in_number_and_size() {
        let many = bounded_paths(&["/a"; 100]);
        assert_eq!((many.len(), &*many[8]), (9, OMITTED));
        let long = bounded_paths(&vec!["/a\n".repeat(2000); 10]);
        let total: usize = long.iter().map(String::len).sum();
        assert!(total <= MAX_PATHS_BYTES + OMITTED.len(), "{total}");
        assert!(long[0].starts_with(r"/a\n/a\n"));
    }
}
