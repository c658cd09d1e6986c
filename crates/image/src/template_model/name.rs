//! Valid characters and lengths of the parts of a template's name.

/// Maximum length of a template's name in bytes. A file name must have space for the name, the
/// owner, the tag and the prefix of unfinished directories.
pub const MAX_TEMPLATE_NAME: usize = 128;
/// Maximum length of a tag in bytes.
pub const MAX_TAG: usize = 63;

/// Returns whether `name` is a valid template name: `[a-z0-9][a-z0-9._-]{0,127}`.
pub(super) fn is_template_name(name: &str) -> bool {
    name.chars().all(|c| !c.is_ascii_uppercase()) && is_word(name, MAX_TEMPLATE_NAME)
}

/// Returns whether `tag` is a valid tag: `[A-Za-z0-9][A-Za-z0-9._-]{0,62}`.
pub(super) fn is_tag(tag: &str) -> bool {
    is_word(tag, MAX_TAG)
}

/// Returns whether `text` consists of 1 to `max` letters, digits, `.`, `_` and `-`, and starts with
/// a letter or digit.
fn is_word(text: &str, max: usize) -> bool {
    text.len() <= max
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}
