//! Changes of JSON files with comments, as editors use them. All other text of the file is
//! preserved.

/// Member of an object: positions in the text.
struct Member<'a> {
    key: &'a str,
    /// End of the previous token, `{` or `,`.
    start: usize,
    value: usize,
    end: usize,
    /// Position after the comma that follows the value.
    comma: Option<usize>,
}

/// Returns the position of the next token: skips white space and comments.
fn skip(text: &str, mut at: usize) -> usize {
    loop {
        let rest = &text[at..];
        let trimmed = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
        at += rest.len() - trimmed.len();
        let comment = if trimmed.starts_with("//") {
            trimmed.find('\n').unwrap_or(trimmed.len())
        } else if trimmed.starts_with("/*") {
            trimmed.find("*/").map_or(trimmed.len(), |end| end + 2)
        } else {
            return at;
        };
        at += comment;
    }
}

/// Returns the position after the string that starts at `at`.
fn string_end(text: &str, at: usize) -> Option<usize> {
    let mut escaped = false;
    for (offset, byte) in text.bytes().enumerate().skip(at + 1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return Some(offset + 1),
            _ => {}
        }
    }
    None
}

/// Returns the position after the value that starts at `at`.
fn value_end(text: &str, mut at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    loop {
        at = skip(text, at);
        match text.as_bytes().get(at)? {
            b'"' => at = string_end(text, at)?,
            b'{' | b'[' => (depth, at) = (depth + 1, at + 1),
            b'}' | b']' => (depth, at) = (depth.checked_sub(1)?, at + 1),
            b',' | b':' if depth > 0 => at += 1,
            b',' | b':' => return None,
            _ => {
                let ends = |c: char| c.is_whitespace() || "{}[]\",:/".contains(c);
                let length = text[at..].find(ends).unwrap_or(text.len() - at);
                // A single slash is neither a comment nor a value.
                at += Some(length).filter(|length| *length > 0)?;
            }
        }
        if depth == 0 {
            return Some(at);
        }
    }
}

/// Returns the members of the object that starts at `at`.
fn members(text: &str, at: usize) -> Option<Vec<Member<'_>>> {
    if text.as_bytes().get(at)? != &b'{' {
        return None;
    }
    let mut found = Vec::new();
    let mut start = at + 1;
    loop {
        let key = skip(text, start);
        if text.as_bytes().get(key)? == &b'}' {
            return Some(found);
        }
        if text.as_bytes()[key] != b'"' {
            return None;
        }
        let key_end = string_end(text, key)?;
        let colon = skip(text, key_end);
        if text.as_bytes().get(colon)? != &b':' {
            return None;
        }
        let value = skip(text, colon + 1);
        let end = value_end(text, value)?;
        let next = skip(text, end);
        let comma = (text.as_bytes().get(next)? == &b',').then_some(next + 1);
        found.push(Member {
            key: &text[key + 1..key_end - 1],
            start,
            value,
            end,
            comma,
        });
        match comma {
            Some(after) => start = after,
            None if text.as_bytes()[next] == b'}' => return Some(found),
            None => return None,
        }
    }
}

/// Sets `section.name` to the JSON text `entry`. Returns `None` if the text is not a JSON object.
pub fn set(text: &str, section: &str, name: &str, entry: &str) -> Option<String> {
    let text = if text.trim().is_empty() { "{}\n" } else { text };
    let root = skip(text, 0);
    let all = members(text, root)?;
    let insert = |at: usize, new: String, is_empty: bool, indent: &str| {
        let end = if is_empty {
            format!("\n{indent}")
        } else {
            ",".to_owned()
        };
        [&text[..at], &new, &end, &text[at..]].concat()
    };
    let Some(parent) = all.iter().find(|member| member.key == section) else {
        let new = format!("\n  \"{section}\": {{\n    \"{name}\": {entry}\n  }}");
        return Some(insert(root + 1, new, all.is_empty(), ""));
    };
    let children = members(text, parent.value)?;
    if let Some(child) = children.iter().find(|member| member.key == name) {
        return Some([&text[..child.value], entry, &text[child.end..]].concat());
    }
    let new = format!("\n    \"{name}\": {entry}");
    Some(insert(parent.value + 1, new, children.is_empty(), "  "))
}

/// Removes `section.name`. Returns the text unchanged if the entry does not exist, and `None` if
/// the text is not a JSON object.
pub fn remove(text: &str, section: &str, name: &str) -> Option<String> {
    if text.trim().is_empty() {
        return Some(text.to_owned());
    }
    let all = members(text, skip(text, 0))?;
    let Some(parent) = all.iter().find(|member| member.key == section) else {
        return Some(text.to_owned());
    };
    let children = members(text, parent.value)?;
    let Some(index) = children.iter().position(|member| member.key == name) else {
        return Some(text.to_owned());
    };
    let child = &children[index];
    let (from, to) = match child.comma {
        Some(comma) => (child.start, comma),
        // The comma before the last member is removed with it.
        None if index > 0 => (child.start - 1, child.end),
        None => (child.start, child.end),
    };
    Some([&text[..from], &text[to..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: &str = r#"{"command": "jiffy"}"#;

    #[test]
    fn an_entry_is_added_and_removed_and_the_rest_is_preserved() {
        for text in [
            "{\n  // note: {\"x\"}\n  \"mcpServers\": {\n    \"a\": {\"b\": [1, \"}\"]}, // last\n  },\n}\n",
            "{\"a\": 1, \"mcpServers\": {\"b\": {}}}",
            "/* head */ {\"mcpServers\": {\"b\": \"\\\"}\"}, \"c\": [{}, null]}",
            "\u{feff}{\"mcpServers\":{\"b\":-1.5e3,\"c\":true}}",
        ] {
            let added = set(text, "mcpServers", "jiffy", ENTRY).unwrap();
            assert!(added.contains(&format!("\"jiffy\": {ENTRY},")), "{added}");
            assert_eq!(remove(&added, "mcpServers", "jiffy").unwrap(), text);
            assert_eq!(set(&added, "mcpServers", "jiffy", ENTRY).unwrap(), added);
        }
    }

    #[test]
    fn missing_files_and_sections_are_created() {
        let created = set("", "servers", "jiffy", ENTRY).unwrap();
        let expected = "{\n  \"servers\": {\n    \"jiffy\": {\"command\": \"jiffy\"}\n  }\n}\n";
        assert_eq!(created, expected);
        let added = set("{\"a\": 1}", "servers", "jiffy", ENTRY).unwrap();
        assert!(added.ends_with("  },\"a\": 1}"), "{added}");
        let filled = set("{\"servers\": {}}", "servers", "jiffy", ENTRY).unwrap();
        assert_eq!(
            remove(&filled, "servers", "jiffy").unwrap(),
            "{\"servers\": {\n  }}"
        );
        let last = "{\"servers\": {\"a\": 1, \"jiffy\": 2}}";
        assert_eq!(
            remove(last, "servers", "jiffy").unwrap(),
            "{\"servers\": {\"a\": 1}}"
        );
    }

    #[test]
    fn an_entry_with_another_value_is_replaced() {
        let text = "{\"servers\": {\"jiffy\": {\"command\": \"old\"}, \"b\": 1}}";
        let replaced = set(text, "servers", "jiffy", ENTRY).unwrap();
        assert_eq!(
            replaced,
            "{\"servers\": {\"jiffy\": {\"command\": \"jiffy\"}, \"b\": 1}}"
        );
    }

    #[test]
    fn damaged_files_are_not_changed() {
        for text in [
            "[1]",
            "{",
            "{\"a\"",
            "{\"a\":",
            "{\"a\":1",
            "{a: 1}",
            "{\"a\" 1}",
            "\"x\"",
            "{\"a\": /}",
            "{\"servers\": [1]}",
            "{\"servers\": {\"a\": 1]}",
            "{\"a\": \"\\",
            "/*",
            "{\"a\": }",
        ] {
            assert!(set(text, "servers", "jiffy", ENTRY).is_none(), "{text}");
        }
    }
}
