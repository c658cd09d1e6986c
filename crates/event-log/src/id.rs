//! [`EntryId`]: the id of an entry of a log, ordered by time over all hosts.
//!
//! A fleet merges the logs of its hosts by these ids.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Number of hexadecimal digits of the time.
const TIME_DIGITS: usize = 14;
/// Largest time that an id can represent, in microseconds since 1970.
const MAX_TIME: u64 = (1 << (4 * TIME_DIGITS)) - 1;
/// Maximum length of the name of a host.
const MAX_HOST: usize = 32;

/// Id of an entry: its time, and the host that recorded it. No two entries of a host have the same
/// time. The texts of ids have the order of the ids.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId {
    /// Time in microseconds since 1970.
    pub time_us: u64,
    /// Name of the host.
    pub host: Arc<str>,
}

/// A text is not the id of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the id of an entry; use the `id` of an event, or `next` of a page")]
pub struct IdError;

impl EntryId {
    /// Returns whether `host` can be a part of an id.
    #[must_use]
    pub fn is_host(host: &str) -> bool {
        let is_valid = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
        (1..=MAX_HOST).contains(&host.len()) && host.bytes().all(is_valid)
    }
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = self.time_us.min(MAX_TIME);
        write!(f, "{time:0TIME_DIGITS$x}-{}", self.host)
    }
}

impl FromStr for EntryId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let (time, host) = text.split_once('-').ok_or(IdError)?;
        let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
        // One spelling per id, so that the order of texts is the order of ids.
        if time.len() != TIME_DIGITS || !time.bytes().all(is_digit) || !Self::is_host(host) {
            return Err(IdError);
        }
        Ok(Self {
            time_us: u64::from_str_radix(time, 16).map_err(|_| IdError)?,
            host: host.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ids_have_one_spelling_and_the_order_of_their_texts(
            one in (0..=MAX_TIME, "[a-z0-9]{1,4}"),
            other in (0..=MAX_TIME, "[a-z0-9]{1,4}"),
        ) {
            let id = |(time_us, host): (u64, String)| EntryId { time_us, host: host.into() };
            let (one, other) = (id(one), id(other));
            prop_assert_eq!(one.to_string().parse::<EntryId>().unwrap(), one.clone());
            prop_assert_eq!(one.cmp(&other), one.to_string().cmp(&other.to_string()));
        }

        #[test]
        fn accepted_texts_are_ids(text in "\\PC{0,60}") {
            if let Ok(id) = text.parse::<EntryId>() {
                prop_assert_eq!(id.to_string(), text);
            }
        }
    }

    #[test]
    fn other_texts_are_rejected() {
        for text in [
            "",
            "-",
            "00000000000001-",
            "0000000000001-h1",
            "000000000000001-h1",
            "0000000000000A-h1",
            "00000000000001-H1",
            "00000000000001-h 1",
            "+0000000000001-h1",
            "00000000000001-h1-h2",
            "00000000000001-\u{e9}",
        ] {
            assert_eq!(text.parse::<EntryId>(), Err(IdError), "{text}");
        }
    }
}
