//! How templates are called.

use crate::template::TemplateError;
use std::fmt;

/// The tag of a template that is named without one.
pub const DEFAULT_TAG: &str = "default";

/// Stands between name and tag in file names: a colon would end a word of overlayfs's options.
const IN_FILES: char = '@';

/// `name` or `name:tag`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    name: String,
    tag: String,
}

impl Reference {
    /// Reads `name` or `name:tag`: `[a-z0-9][a-z0-9._-]{0,62}` and `[A-Za-z0-9][A-Za-z0-9._-]{0,62}`.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        Self::split(text, ':').ok_or_else(|| TemplateError::Name {
            name: text.chars().take(130).collect(),
        })
    }

    /// Reads the name of a directory of [`Self::file_name`].
    pub(crate) fn of_file(name: &str) -> Option<Self> {
        Self::split(name, IN_FILES).filter(|found| found.file_name() == name)
    }

    fn split(text: &str, between: char) -> Option<Self> {
        let (name, tag) = text.split_once(between).unwrap_or((text, DEFAULT_TAG));
        (is_template_name(name) && is_tag(tag)).then(|| Self {
            name: name.to_owned(),
            tag: tag.to_owned(),
        })
    }

    /// Without the tag.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Whether it says no more than its name.
    pub fn is_default(&self) -> bool {
        self.tag == DEFAULT_TAG
    }

    /// As names of files and locks hold it.
    pub(crate) fn file_name(&self) -> String {
        match self.is_default() {
            true => self.name.clone(),
            false => format!("{}{IN_FILES}{}", self.name, self.tag),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_default() {
            true => f.write_str(&self.name),
            false => write!(f, "{}:{}", self.name, self.tag),
        }
    }
}

/// Whether `name` can name a template: `[a-z0-9][a-z0-9._-]{0,62}`.
pub(crate) fn is_template_name(name: &str) -> bool {
    name.chars().all(|c| !c.is_ascii_uppercase()) && is_tag(name)
}

fn is_tag(tag: &str) -> bool {
    tag.len() <= 63
        && tag.starts_with(|c: char| c.is_ascii_alphanumeric())
        && tag
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_tags_are_short_and_harmless() {
        for good in ["base", "a", "0", "py3.11_x-y", &"a".repeat(63)] {
            assert!(is_template_name(good), "{good}");
        }
        for bad in [
            "",
            ".new-base",
            "-a",
            "Base",
            "a/b",
            "..",
            "ü",
            &"a".repeat(64),
        ] {
            assert!(!is_template_name(bad), "{bad}");
        }
        for bad in ["a:", ":a", "a:b:c", "a:b/c", "a@b", "a:.b", "A:b", "a:ü"] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_default_tag_is_the_name_alone() {
        let said = |text: &str| Reference::parse(text).unwrap();
        assert_eq!(said("app:default"), said("app"));
        assert_eq!(said("app:default").to_string(), "app");
        let tagged = said("app:V1.2");
        assert_eq!((tagged.name(), tagged.tag()), ("app", "V1.2"));
        assert_eq!(tagged.to_string(), "app:V1.2");
        assert_eq!(tagged.file_name(), "app@V1.2");
        assert_eq!(Reference::of_file("app@V1.2"), Some(tagged));
        // Two names for one directory would be two locks for one template.
        assert_eq!(Reference::of_file("app@default"), None);
        assert_eq!(Reference::of_file(".new-app"), None);
    }
}
