//! Owners of functions (an API key or the operator), their directories, and the public names of
//! functions.

/// Number of hexadecimal digits of the digest that names an owner's directory.
const DIGEST_DIGITS: usize = 32;
/// Number of hexadecimal digits of the digest in public names.
const TAG_DIGITS: usize = 12;
/// Separator of name and tag in a public name. Function names do not contain it.
const LABEL_SEPARATOR: &str = "--";
/// Maximum length of a function's name in bytes. With separator and tag it fits into a DNS label.
pub const MAX_NAME_BYTES: usize = 48;

/// Returns the name of an owner for its process and its compiled files. `key` is the id of an API
/// key, or `None` for the operator.
#[must_use]
pub fn process_owner(key: Option<&str>) -> String {
    match key {
        Some(key) => format!("key/{key}"),
        None => "host".to_owned(),
    }
}

/// Returns the first `count` digits of an owner's digest.
fn digits(key: Option<&str>, count: usize) -> String {
    let owner = process_owner(key);
    // The context string separates these digests from other uses of the hash.
    let digest = blake3::derive_key("jiffy functions 2026 owner of functions", owner.as_bytes());
    let digest = blake3::Hash::from_bytes(digest).to_hex();
    digest.as_str().chars().take(count).collect()
}

/// Returns the name of an owner's directory.
#[must_use]
pub fn directory_name(key: Option<&str>) -> String {
    digits(key, DIGEST_DIGITS)
}

/// Returns the part of public names that identifies the owner.
#[must_use]
pub fn tag(key: Option<&str>) -> String {
    digits(key, TAG_DIGITS)
}

/// Returns the public name of a function: the label below `fn.DOMAIN`.
#[must_use]
pub fn label(key: Option<&str>, name: &str) -> String {
    format!("{name}{LABEL_SEPARATOR}{}", tag(key))
}

/// Splits a public name into name and tag.
#[must_use]
pub fn parse_label(label: &str) -> Option<(&str, &str)> {
    let (name, tag) = label.rsplit_once(LABEL_SEPARATOR)?;
    (is_name(name) && tag.len() == TAG_DIGITS).then_some((name, tag))
}

/// Returns whether a function may have this name: `a-z`, `0-9` and single dashes inside.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(legal)
        && !name.starts_with('-')
        && !name.ends_with('-')
        && !name.contains(LABEL_SEPARATOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_names_are_unique_per_function_and_owner() {
        let mine = label(Some("k1"), "my-app");
        assert_ne!(mine, label(Some("k2"), "my-app"));
        assert_ne!(mine, label(None, "my-app"));
        // No key id can be chosen so that it denotes the operator.
        assert_ne!(label(Some("host"), "a"), label(None, "a"));
        assert_eq!(parse_label(&mine), Some(("my-app", &*tag(Some("k1")))));
        assert!(label(None, &"a".repeat(MAX_NAME_BYTES)).len() <= 63);
        for bad in [
            "",
            "a",
            "a--",
            "--0123456789ab",
            "a--0123456789a",
            "A--0123456789ab",
        ] {
            assert_eq!(parse_label(bad), None, "{bad}");
        }
    }

    #[test]
    fn names_are_valid_in_labels_and_paths() {
        assert!(is_name("a") && is_name("a-1") && is_name(&"a".repeat(48)));
        for bad in [
            "",
            "A",
            "a--b",
            "-a",
            "a-",
            "a_b",
            "a.b",
            "../a",
            &"a".repeat(49),
        ] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
