//! Removal of API keys from the headers of requests to guests. Keys are recognised by their format.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::general_purpose::GeneralPurposeConfig;
use base64::engine::{DecodePaddingMode, GeneralPurpose};
use hyper::header::{COOKIE, HeaderMap, HeaderName, HeaderValue};

/// Prefix of a key.
const PREFIX: &[u8] = b"e2b_";
/// Number of lower-case hexadecimal digits after the prefix.
const DIGITS: usize = 40;
/// Base 64 with or without padding, as accepted by servers with Basic authentication.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// Removes all header values that contain an API key. Otherwise a guest would obtain the
/// permissions of its visitors. Revoked keys and keys of other hosts have the same format and are
/// removed, too. Other credentials belong to the guest's application and are retained. Cookies are
/// retained, because clients do not store keys there, and removing the header would remove all
/// cookies.
pub fn strip(headers: &mut HeaderMap) {
    let has_key = headers.iter().any(|(name, value)| is_key_in(name, value));
    if !has_key {
        return;
    }
    // `HeaderMap` cannot remove a single value of a header, so the map is filled again.
    let retained: Vec<(HeaderName, HeaderValue)> = headers
        .iter()
        .filter(|(name, value)| !is_key_in(name, value))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    headers.clear();
    for (name, value) in retained {
        headers.append(name, value);
    }
}

/// Returns true if a header contains an API key.
fn is_key_in(name: &HeaderName, value: &HeaderValue) -> bool {
    name != COOKIE && (holds_key(value.as_bytes()) || basic_holds_key(value.as_bytes()))
}

/// Returns true if the credentials of a Basic `Authorization` contain a key as user or password.
fn basic_holds_key(value: &[u8]) -> bool {
    // The length of "basic ".
    let Some((scheme, rest)) = value.split_at_checked(6) else {
        return false;
    };
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return false;
    }
    LENIENT
        .decode(rest.trim_ascii())
        .is_ok_and(|decoded| holds_key(&decoded))
}

/// Returns true if `text` contains a key as a word.
fn holds_key(text: &[u8]) -> bool {
    let length = PREFIX.len() + DIGITS;
    let word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
    text.windows(length).enumerate().any(|(at, window)| {
        let digits = window.strip_prefix(PREFIX);
        let hex = |b: &u8| b.is_ascii_digit() || (b'a'..=b'f').contains(b);
        digits.is_some_and(|digits| digits.iter().all(hex))
            // A longer word is not a key.
            && !text[..at].last().is_some_and(word)
            && !text.get(at + length).is_some_and(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::STANDARD as BASE_64;

    const KEY: &str = "e2b_0123456789abcdef0123456789abcdef01234567";

    fn passes(name: &'static str, value: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert("x-first", HeaderValue::from_static("1"));
        headers.append(name, HeaderValue::from_str(value).unwrap());
        headers.append(name, HeaderValue::from_static("another"));
        strip(&mut headers);
        assert_eq!(headers["x-first"], "1");
        let left = headers.get_all(name).iter().count();
        assert!(left > 0, "the other value stays");
        left == 2
    }

    #[test]
    fn a_key_never_passes_in_any_header() {
        let basic = |text: &str| format!("Basic {}", BASE_64.encode(text));
        let unpadded = |text: &str| basic(text).trim_end_matches('=').to_owned();
        for value in [
            KEY.to_owned(),
            format!("Bearer {KEY}"),
            format!("bearer  {KEY}"),
            format!("Token token=\"{KEY}\", x=1"),
            basic(&format!("{KEY}:")),
            basic(&format!("user:{KEY}")),
            unpadded(&format!("{KEY}:")).replace("Basic", "bASIC"),
        ] {
            for name in [
                "x-api-key",
                "authorization",
                "x-other",
                "sec-websocket-protocol",
            ] {
                assert!(!passes(name, &value), "{name}: {value}");
            }
        }
    }

    #[test]
    fn other_credentials_pass() {
        let basic = |text: &str| format!("Basic {}", BASE_64.encode(text));
        for value in [
            "Bearer sk-0123456789abcdef".to_owned(),
            "e2b_".to_owned(),
            KEY[..KEY.len() - 1].to_owned(),
            format!("{KEY}0"),
            format!("x{KEY}"),
            KEY.to_uppercase(),
            basic("user:"),
            basic("user:password"),
            "Basic".to_owned(),
            "Basic !".to_owned(),
            String::new(),
        ] {
            for name in ["x-api-key", "authorization"] {
                assert!(passes(name, &value), "{name}: {value}");
            }
        }
        assert!(passes("cookie", KEY));
    }
}
