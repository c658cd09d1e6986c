//! Patterns of host names that the egress rules of a sandbox permit.

/// Host names and wildcards (`*.domain`), in lower case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HostNames(Vec<String>);

/// Normalizes a name: lower case, without a trailing dot.
fn normalize(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

impl HostNames {
    /// Adds a name or wildcard. Returns false for invalid text, such as an address.
    pub fn add(&mut self, text: &str) -> bool {
        let name = normalize(text);
        let labels = name.strip_prefix("*.").unwrap_or(&name);
        let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        let is_name = labels.len() <= 253
            && labels
                .split('.')
                .all(|label| (1..=63).contains(&label.len()) && label.bytes().all(good))
            && !labels.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        if is_name {
            self.0.push(name);
        }
        is_name
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if `name` matches a name or wildcard.
    pub fn contains(&self, name: &str) -> bool {
        let name = normalize(name);
        self.0.iter().any(|own| match own.strip_prefix('*') {
            // The suffix includes the dot, so that "evilexample.com" does not match
            // "*.example.com".
            Some(domain) => name.len() > domain.len() && name.ends_with(domain),
            None => *own == name,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_itself_and_a_wildcard_everything_below() {
        let mut names = HostNames::default();
        assert!(names.add("Example.com") && names.add("*.pypi.org."));
        for yes in [
            "example.com",
            "EXAMPLE.com.",
            "files.pypi.org",
            "a.b.pypi.org",
        ] {
            assert!(names.contains(yes), "{yes}");
        }
        for no in [
            "www.example.com",
            "pypi.org",
            "evilpypi.org",
            ".pypi.org",
            "",
            "com",
        ] {
            assert!(!names.contains(no), "{no}");
        }
        for bad in ["", "*", "*.", "a..b", "1.2.3.4", "a b", "*.*.a"] {
            assert!(!names.add(bad), "{bad}");
        }
    }
}
