//! Names of templates (`[owner/]name[:tag]`), and their form in file names.
//!
//! A *stock template* is a template whose recipe Jiffy contains.

use super::error::TemplateError;
use super::name::{is_tag, is_template_name};
use super::stock;
use jiffy_engine_api::{
    IMPORTED_IMAGE_DIGITS, IMPORTED_IMAGE_PREFIX, UNFINISHED_BUILD_PREFIX, is_id, is_imported_image,
};
use std::fmt;

/// Default tag.
pub const DEFAULT_TAG: &str = "default";
/// Separator of name and tag in file names. A colon is not usable, since overlayfs's mount options
/// separate lower directories by colons.
const TAG_IN_FILES: char = '@';
/// Separator of owner and name in file names. Names and tags cannot contain the character, and it
/// has no special meaning in overlayfs's mount options.
const OWNER_IN_FILES: char = '~';
/// Name prefix of templates that were imported for sandboxes created from a registry image.
const ON_DEMAND_PREFIX: &str = "img-";

/// Reference to a template: `[owner/]name[:tag]`. The owner is the id of a key. Without an owner,
/// the template belongs to the host's owner.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    owner: Option<String>,
    name: String,
    tag: String,
}

impl Reference {
    /// Parses `name`, `name:tag`, `owner/name` or `owner/name:tag`. A name is
    /// `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`, a tag `[A-Za-z0-9][A-Za-z0-9._-]{0,62}`, an owner the id
    /// of a key ([`is_id`]). Capitals in the name are converted to lower case, as E2B does.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        Self::split(text, '/', ':').ok_or_else(|| TemplateError::Name {
            name: text.chars().take(150).collect(),
        })
    }

    /// Parses `name` or `name:tag` in the namespace of `owner`.
    pub fn in_namespace(owner: Option<&str>, text: &str) -> Result<Self, TemplateError> {
        let wrong = || TemplateError::Name {
            name: text.chars().take(150).collect(),
        };
        let bare = Self::parse(text)?;
        if bare.owner.is_some() || owner.is_some_and(|owner| !is_id(owner)) {
            return Err(wrong());
        }
        Ok(Self {
            owner: owner.map(str::to_owned),
            ..bare
        })
    }

    /// Parses the name of a directory that [`Self::file_name`] returned.
    pub(crate) fn of_file(name: &str) -> Option<Self> {
        // Only one file name per template is accepted, so that a template has one lock.
        Self::split(name, OWNER_IN_FILES, TAG_IN_FILES).filter(|found| found.file_name() == name)
    }

    /// Parses a reference with these separators of owner and tag.
    fn split(text: &str, after_owner: char, before_tag: char) -> Option<Self> {
        let (owner, rest) = match text.split_once(after_owner) {
            Some((owner, rest)) => (Some(owner), rest),
            None => (None, text),
        };
        let (name, tag) = rest.split_once(before_tag).unwrap_or((rest, DEFAULT_TAG));
        let name = name.to_ascii_lowercase();
        let sound = owner.is_none_or(is_id) && is_template_name(&name) && is_tag(tag);
        sound.then(|| Self {
            owner: owner.map(str::to_owned),
            name,
            tag: tag.to_owned(),
        })
    }

    /// Returns the key that owns the template. `None` if the host's owner owns it.
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Name without owner and tag.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Returns the same template with another tag.
    pub fn with_tag(&self, tag: &str) -> Result<Self, TemplateError> {
        if is_tag(tag) {
            Ok(Self {
                tag: tag.to_owned(),
                ..self.clone()
            })
        } else {
            Err(TemplateError::Name {
                name: format!("{}:{}", self.name, tag.chars().take(80).collect::<String>()),
            })
        }
    }

    /// Returns a reference that sorts before all tags of the template.
    pub(crate) fn before_tags(self) -> Self {
        Self {
            tag: String::new(),
            ..self
        }
    }

    /// `[owner/]name`.
    pub fn without_tag(&self) -> String {
        match &self.owner {
            Some(owner) => format!("{owner}/{}", self.name),
            None => self.name.clone(),
        }
    }

    /// Returns whether the tag is the default tag.
    pub fn is_default(&self) -> bool {
        self.tag == DEFAULT_TAG
    }

    /// Returns whether this is a stock template. Stock templates are the same for every key.
    pub fn is_stock(&self) -> bool {
        self.owner.is_none() && self.is_default() && stock::is_stock(&self.name)
    }

    /// Returns the form that is used in file and lock names.
    pub(crate) fn file_name(&self) -> String {
        let owner = self.owner.as_ref();
        let owner = owner.map_or_else(String::new, |owner| format!("{owner}{OWNER_IN_FILES}"));
        if self.is_default() {
            format!("{owner}{}", self.name)
        } else {
            format!("{owner}{}{TAG_IN_FILES}{}", self.name, self.tag)
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(owner) = &self.owner {
            write!(f, "{owner}/")?;
        }
        if self.is_default() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}:{}", self.name, self.tag)
        }
    }
}

/// Returns the name of the unfinished template of build `id`.
pub fn unfinished_build(id: &str) -> String {
    format!("{UNFINISHED_BUILD_PREFIX}{id}")
}

/// Returns the name of the template of the registry image `reference`, imported for builds of
/// `owner`.
pub fn imported_image(owner: Option<&str>, reference: &str) -> String {
    let last = reference.rsplit('/').next().unwrap_or_default();
    // The name stays recognisable. The digest makes it unique.
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
    let last: String = last
        .chars()
        .map(|c| if fits(c) { c } else { '-' })
        .take(40)
        .collect();
    // A key must not receive a template that another key imported.
    let about = match owner {
        Some(owner) => format!("{owner}\0{reference}"),
        None => reference.to_owned(),
    };
    let sum = crate::verified::sum_of(about.as_bytes());
    format!(
        "{IMPORTED_IMAGE_PREFIX}{last}-{}",
        &sum[..IMPORTED_IMAGE_DIGITS]
    )
}

/// Returns the name of the template of the registry image `reference`, imported for sandboxes
/// created from this image. The name needs no owner: a client requests a build with this name, and
/// the daemon creates the template in the namespace of the client's key.
pub fn image_on_demand(reference: &str) -> String {
    let name = imported_image(None, reference);
    format!(
        "{ON_DEMAND_PREFIX}{}",
        name.strip_prefix(IMPORTED_IMAGE_PREFIX).unwrap_or(&name)
    )
}

/// Returns whether `name` is the name of a template from [`image_on_demand`].
pub fn is_image_on_demand(name: &str) -> bool {
    let rest = name.strip_prefix(ON_DEMAND_PREFIX);
    rest.is_some_and(|rest| is_imported_image(&format!("{IMPORTED_IMAGE_PREFIX}{rest}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_engine_api::is_reserved;

    /// Id of an API key.
    const KEY: &str = "abcdefghijkmnpqrstuv";

    #[test]
    fn names_and_tags_are_short_and_harmless() {
        for good in ["base", "a", "0", "py3.11_x-y", &"a".repeat(128)] {
            assert!(is_template_name(good), "{good}");
        }
        for bad in [
            "",
            ".new-base",
            "-a",
            "Base",
            "a/b",
            "a~b",
            "..",
            "ü",
            &"a".repeat(129),
        ] {
            assert!(!is_template_name(bad), "{bad}");
        }
        for bad in ["a:", ":a", "a:b:c", "a:b/c", "a@b", "a:.b", "Ä:b", "a:ü"] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
        assert!(Reference::parse(&format!("a:{}", "t".repeat(64))).is_err());
    }

    #[test]
    fn names_are_converted_to_lower_case_and_tags_are_not() {
        let reference = Reference::parse(&format!("{KEY}/Harbor__Task-1:V2")).unwrap();
        assert_eq!(reference.to_string(), format!("{KEY}/harbor__task-1:V2"));
        let own = Reference::in_namespace(Some(KEY), "Harbor__Task-1:V2").unwrap();
        assert_eq!(own, reference);
        // Names of directories are lower-case, so another spelling is another directory.
        assert_eq!(Reference::of_file("App"), None);
        let longest = Reference::parse(&format!("{KEY}/{}:{}", "N".repeat(128), "t".repeat(63)));
        let name = longest.unwrap().file_name();
        assert!(name.len() <= 240, "{} bytes", name.len());
        assert!(Reference::of_file(&name).is_some());
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
        // Two names of one directory would give one template two locks.
        assert_eq!(Reference::of_file("app@default"), None);
        assert_eq!(Reference::of_file(".new-app"), None);
    }

    #[test]
    fn an_owner_is_a_key_and_survives_the_file_system() {
        let said = |text: &str| Reference::parse(text).unwrap();
        for (text, file) in [
            (format!("{KEY}/app"), format!("{KEY}~app")),
            (format!("{KEY}/app:V1"), format!("{KEY}~app@V1")),
        ] {
            let reference = said(&text);
            assert_eq!(reference.owner(), Some(KEY));
            assert_eq!(reference.to_string(), text);
            assert_eq!(reference.file_name(), file);
            assert_eq!(Reference::of_file(&file), Some(reference.clone()));
            let bare = text.strip_prefix(&format!("{KEY}/")).unwrap();
            assert_eq!(Reference::in_namespace(Some(KEY), bare).unwrap(), reference);
        }
        for bad in [
            "library/python",
            "a/b",
            "/app",
            "../app",
            &format!("{KEY}/a/b"),
        ] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
            assert!(Reference::in_namespace(Some(KEY), bad).is_err(), "{bad}");
        }
        assert!(Reference::in_namespace(Some("k1"), "app").is_err());
        assert_eq!(Reference::of_file("library~python"), None);
        assert_ne!(said("app"), said(&format!("{KEY}/app")));
    }

    #[test]
    fn ids_and_names_of_internal_templates_are_reserved() {
        let build = "01234567-89ab-4cde-8f01-23456789abcd";
        let image = imported_image(Some(KEY), "ghcr.io/me/App:1.2");
        assert!(image.starts_with("image--pp-1.2-"), "{image}");
        for reserved in [KEY, build, &unfinished_build(build), &image] {
            assert!(is_reserved(reserved), "{reserved}");
            Reference::in_namespace(Some(KEY), reserved).unwrap();
        }
        for free in [
            "image",
            "image-app",
            "build-tools",
            "app",
            "build-",
            "image-x-12345",
        ] {
            assert!(!is_reserved(free), "{free}");
        }
        assert_ne!(
            imported_image(Some(KEY), "app"),
            imported_image(None, "app")
        );
    }
}
