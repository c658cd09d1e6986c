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

/// Returns the positions of the elements of the array that starts at `at`.
fn elements(text: &str, at: usize) -> Option<Vec<(usize, usize)>> {
    if text.as_bytes().get(at)? != &b'[' {
        return None;
    }
    let mut found = Vec::new();
    let mut next = skip(text, at + 1);
    while text.as_bytes().get(next)? != &b']' {
        let end = value_end(text, next)?;
        found.push((next, end));
        next = skip(text, end);
        match text.as_bytes().get(next)? {
            b',' => next = skip(text, next + 1),
            b']' => {}
            _ => return None,
        }
    }
    Some(found)
}

/// Returns the position of the array `section.name`. The outer `None` stands for a text that is not
/// a JSON object, the inner `None` for a missing array.
fn array(text: &str, section: &str, name: &str) -> Option<Option<usize>> {
    let all = members(text, skip(text, 0))?;
    let Some(parent) = all.iter().find(|member| member.key == section) else {
        return Some(None);
    };
    let children = members(text, parent.value)?;
    let child = children.iter().find(|member| member.key == name);
    Some(child.map(|child| child.value))
}

/// Adds the JSON text `element` to the array `section.name`, which is created if it is missing. An
/// element that contains `marker` is replaced. Returns `None` if the text is not a JSON object, or
/// has another value in place of the array.
pub fn add_element(
    text: &str,
    section: &str,
    name: &str,
    element: &str,
    marker: &str,
) -> Option<String> {
    let text = if text.trim().is_empty() { "{}\n" } else { text };
    let Some(start) = array(text, section, name)? else {
        return set(text, section, name, &format!("[{element}]"));
    };
    let all = elements(text, start)?;
    if let Some((from, to)) = all
        .iter()
        .find(|(from, to)| text[*from..*to].contains(marker))
    {
        return Some([&text[..*from], element, &text[*to..]].concat());
    }
    // White space and comments before the first element remain there, also after a removal.
    let (at, separator) = all
        .first()
        .map_or((start + 1, ""), |(first, _)| (*first, ", "));
    Some([&text[..at], element, separator, &text[at..]].concat())
}

/// Removes the element that contains `marker` from the array `section.name`. Returns `None` if the
/// text is not a JSON object.
pub fn remove_element(text: &str, section: &str, name: &str, marker: &str) -> Option<String> {
    if text.trim().is_empty() {
        return Some(text.to_owned());
    }
    let Some(start) = array(text, section, name)? else {
        return Some(text.to_owned());
    };
    let all = elements(text, start)?;
    let is_marked = |(from, to): &(usize, usize)| text[*from..*to].contains(marker);
    let Some(index) = all.iter().position(is_marked) else {
        return Some(text.to_owned());
    };
    // Removes the comma after the element, or before it if it is the last one.
    let (from, to) = match (all.get(index + 1), index.checked_sub(1)) {
        (Some((next, _)), _) => (all[index].0, *next),
        (None, Some(previous)) => (all[previous].1, all[index].1),
        (None, None) => return remove(text, section, name),
    };
    Some([&text[..from], &text[to..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_element_is_added_and_removed_and_the_rest_is_preserved() {
        for text in [
            "{\n  // note\n  \"hooks\": {\"Pre\": [ {\"a\": [1]}, 2 ], \"Post\": []},\n}\n",
            "{\"hooks\": {\"Pre\": [\"x\"]}}",
            "{\"hooks\": {\"Post\": [1]}, \"b\": 1}",
        ] {
            let add = |text: &str, element| add_element(text, "hooks", "Pre", element, "jiffy");
            let added = add(text, "{\"c\": \"jiffy 1\"}").unwrap();
            assert!(added.contains("{\"c\": \"jiffy 1\"}"), "{added}");
            assert_eq!(
                remove_element(&added, "hooks", "Pre", "jiffy").unwrap(),
                text
            );
            let replaced = add(&added, "{\"c\": \"jiffy 2\"}").unwrap();
            assert_eq!(replaced, added.replace("jiffy 1", "jiffy 2"));
            assert_eq!(remove_element(text, "hooks", "Pre", "jiffy").unwrap(), text);
        }
        let last = "{\"hooks\": {\"Pre\": [1, \"jiffy\"]}}";
        let removed = remove_element(last, "hooks", "Pre", "jiffy").unwrap();
        assert_eq!(removed, "{\"hooks\": {\"Pre\": [1]}}");
        for text in [
            "[1]",
            "{\"hooks\": 1}",
            "{\"hooks\": {\"Pre\": 1}}",
            "{\"hooks\": {\"Pre\": [1",
        ] {
            assert!(
                add_element(text, "hooks", "Pre", "1", "jiffy").is_none(),
                "{text}"
            );
        }
    }

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
