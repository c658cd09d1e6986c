//! Labels of hosts, such as `zone=a`. The creator of a sandbox can require labels of its host.

use super::check_text;
use jiffy_scheduler::Label;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Maximum length of the name and of the value of a label.
pub const MAX_LABEL_BYTES: usize = 63;
/// Maximum number of labels of a host.
pub const MAX_LABELS: usize = 16;

/// Label of a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostLabel {
    /// Name.
    pub name: String,
    /// Value.
    pub value: String,
}

impl HostLabel {
    /// Creates a label.
    ///
    /// # Errors
    /// The reason why the name or the value is not valid.
    pub fn new(name: &str, value: &str) -> Result<Self, String> {
        for (text, field) in [(name, "name"), (value, "value")] {
            let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
            if !(1..=MAX_LABEL_BYTES).contains(&text.len()) || !text.bytes().all(allowed) {
                return Err(format!(
                    "the {field} of a label must have 1 to {MAX_LABEL_BYTES} letters, digits or \
                     characters of `-_./`"
                ));
            }
        }
        Ok(Self {
            name: name.to_owned(),
            value: value.to_owned(),
        })
    }

    /// Returns whether name and value have valid lengths and characters.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.check().is_ok()
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        check_text("labels.name", &self.name, MAX_LABEL_BYTES)?;
        check_text("labels.value", &self.value, MAX_LABEL_BYTES)
    }
}

impl FromStr for HostLabel {
    type Err = String;

    /// Parses `NAME=VALUE`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| "a label is NAME=VALUE, for example zone=a".to_owned())?;
        Self::new(name, value)
    }
}

impl From<&HostLabel> for Label {
    fn from(label: &HostLabel) -> Self {
        Self {
            name: label.name.clone(),
            value: label.value.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_a_name_and_a_value_of_bounded_length() {
        let label: HostLabel = "zone=eu-1/a".parse().unwrap();
        assert_eq!((&*label.name, &*label.value), ("zone", "eu-1/a"));
        let long = format!("zone={}", "a".repeat(64));
        for bad in [
            "", "zone", "=a", "zone=", "a b=c", "a=b=c", "a=\"", "ä=b", &long,
        ] {
            assert!(bad.parse::<HostLabel>().is_err(), "{bad}");
        }
    }
}
