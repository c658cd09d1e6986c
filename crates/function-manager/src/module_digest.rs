//! [`ModuleDigest`]: BLAKE3 digest of a WebAssembly module, by which modules are stored and shared.

use std::fmt;
use std::str::FromStr;

/// Optional prefix with the name of the hash.
const PREFIX: &str = "blake3:";

/// Error: the text is not the digest of a module.
#[derive(Debug, thiserror::Error)]
#[error("the digest of a module must be `blake3:` followed by 64 hexadecimal digits")]
pub struct DigestError;

/// BLAKE3 hash of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleDigest(blake3::Hash);

impl ModuleDigest {
    /// Returns the hexadecimal digits, as used in records and file names.
    pub(crate) fn digits(self) -> String {
        self.0.to_hex().to_string()
    }
}

impl From<blake3::Hash> for ModuleDigest {
    fn from(hash: blake3::Hash) -> Self {
        Self(hash)
    }
}

impl fmt::Display for ModuleDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.0.to_hex())
    }
}

impl FromStr for ModuleDigest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let digits = text.strip_prefix(PREFIX).unwrap_or(text);
        let hash = blake3::Hash::from_hex(digits).map_err(|_| DigestError)?;
        Ok(Self(hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_digests_are_parsed_and_other_texts_are_rejected() {
        let digest = ModuleDigest::from(blake3::hash(b"module"));
        for text in [digest.to_string(), digest.digits()] {
            assert_eq!(text.parse::<ModuleDigest>().unwrap(), digest);
        }
        let digits = digest.digits();
        let bad = [
            "",
            "blake3:",
            "../a",
            &digits[1..],
            &format!("sha256:{digits}"),
        ];
        for bad in bad {
            assert!(bad.parse::<ModuleDigest>().is_err(), "{bad}");
        }
    }
}
