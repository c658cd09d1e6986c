//! Replaces text in a file of a sandbox, for the tool that edits files.

use crate::error::{ToolError, ToolResult};

/// Text after a replacement.
#[derive(Debug, PartialEq)]
pub struct Edited {
    /// New content of the file.
    pub content: String,
    /// Number of the first changed line, from 1.
    pub line: usize,
}

/// Replaces the only occurrence of `old` in `content` by `new`.
pub fn replace(content: &str, old: &str, new: &str) -> ToolResult<Edited> {
    if old.is_empty() {
        return Err(ToolError::new(
            "`old` is empty: use file_write to write a whole file",
        ));
    }
    if old == new {
        return Err(ToolError::new(
            "`old` and `new` are equal: nothing to change",
        ));
    }
    let Some(position) = content.find(old) else {
        return Err(ToolError::new(
            "`old` does not occur in the file: read the file with file_read and copy the text \
             exactly, with white space",
        ));
    };
    // Overlapping occurrences are ambiguous too: search from the next character.
    let next = content[position..].chars().next().map_or(1, char::len_utf8);
    if content[position + next..].contains(old) {
        return Err(ToolError::new(
            "`old` occurs more than once in the file: include surrounding lines that make it unique",
        ));
    }
    let end = position + old.len();
    Ok(Edited {
        content: [&content[..position], new, &content[end..]].concat(),
        line: content[..position].matches('\n').count() + 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_occurrence_is_replaced_and_its_line_is_returned() {
        let edited = replace("a\nb = 1\nc\n", "b = 1", "b = 2").unwrap();
        assert_eq!((&edited.content[..], edited.line), ("a\nb = 2\nc\n", 2));
        assert_eq!(replace("é", "é", "").unwrap().content, "");
    }

    #[test]
    fn ambiguous_missing_and_empty_texts_are_rejected() {
        for (content, old, new) in [
            ("a a", "a", "b"),
            ("aaa", "aa", "b"),
            ("ééé", "éé", "b"),
            ("a", "b", "c"),
            ("a", "", "c"),
            ("a", "a", "a"),
        ] {
            assert!(replace(content, old, new).is_err(), "{content} {old}");
        }
    }
}
