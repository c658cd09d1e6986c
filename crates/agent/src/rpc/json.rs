//! Protobuf's JSON mapping if it differs from serde's: `null` is the default, bytes are base64,
//! numbers may be strings.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;

const LENIENT: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// `null` and absent are the same.
pub fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(from)?.unwrap_or_default())
}

/// Base64, standard or URL-safe, padded or not.
pub fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<u8>>, D::Error> {
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

/// A whole number, also written as a string.
pub fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
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
