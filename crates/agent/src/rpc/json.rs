//! Differences between Protobuf's JSON mapping and serde: `null` stands for the default, bytes are
//! base64, and numbers may be strings.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;

/// Base64 with or without padding.
const LENIENT: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
/// Base64 with the characters `+` and `/`.
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
/// Base64 with the characters `-` and `_`.
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// Deserializes a value. `null` stands for the default. Fields also need `#[serde(default)]`, which
/// covers absent ones.
pub fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(from)?.unwrap_or_default())
}

/// Deserializes base64, either standard or URL-safe, with or without padding.
pub fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<u8>>, D::Error> {
    /// Text in JSON.
    #[derive(Deserialize)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    let Some(Text(text)) = Option::<Text>::deserialize(from)? else {
        return Ok(None);
    };
    STANDARD
        .decode(text.as_bytes())
        .or_else(|_| URL_SAFE.decode(text.as_bytes()))
        .map(Some)
        .map_err(|e| D::Error::custom(format!("not base64: {e}")))
}

/// Deserializes an integer, which may be written as a string.
pub fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    /// Number in JSON, which clients also send as text.
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum NumberForm {
        Number(u32),
        Text(String),
    }
    Option::<NumberForm>::deserialize(from)?
        .map(|form| match form {
            NumberForm::Number(n) => Ok(n),
            NumberForm::Text(t) => t
                .parse()
                .map_err(|_| D::Error::custom(format!("'{t}' is not a number"))),
        })
        .transpose()
}
