//! OpenSSL's hash of a certificate's subject (`openssl x509 -hash`), by which OpenSSL looks up
//! authorities in a directory.
//!
//! The hash consists of the first bytes of the SHA-1 of the name in canonical form: texts are in
//! UTF-8, in lower case and with single spaces. The header of the outer sequence is omitted
//! (`x509_name_canon` in crypto/x509/x_name.c).

use sha1::{Digest, Sha1};
use x509_parser::asn1_rs::{Any, FromDer, ToDer};
use x509_parser::der_parser::asn1_rs::{Class, Header, Length, Tag};

// DER tags. Bit 0x20 marks a constructed element.
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const UTF8: u8 = 0x0c;

/// Returns the hash of a name in DER as 8 hexadecimal digits.
pub fn of(name: &[u8]) -> Result<String, String> {
    let mut canonical = Vec::new();
    for set in elements(content(name, SEQUENCE)?)? {
        let mut entries = Vec::new();
        for entry in elements(content(set, SET)?)? {
            entries.push(entry_of(content(entry, SEQUENCE)?)?);
        }
        // DER sorts a SET OF by the encodings of its elements.
        entries.sort();
        canonical.extend(encoded(SET, &entries.concat()));
    }
    let hash = Sha1::digest(&canonical);
    // OpenSSL interprets the first four bytes as a little-endian number.
    let first = hash.iter().take(4).rev();
    Ok(first.map(|b| format!("{b:02x}")).collect())
}

/// Returns an entry with its type and its canonical value, in DER.
fn entry_of(pair: &[u8]) -> Result<Vec<u8>, String> {
    let parts = elements(pair)?;
    let [kind, value] = parts.as_slice() else {
        return Err("an entry of its subject is not a pair".to_owned());
    };
    let value = match text(value)? {
        Some(text) => encoded(UTF8, plain(&text).as_bytes()),
        None => value.to_vec(),
    };
    Ok(encoded(SEQUENCE, &[kind, value.as_slice()].concat()))
}

/// Returns the text of a string type. `None` for another type, whose value is not changed.
fn text(value: &[u8]) -> Result<Option<String>, String> {
    let (_, any) = Any::from_der(value).map_err(|e| e.to_string())?;
    let units = |bytes: &[u8]| -> Vec<u16> {
        let pairs = bytes.chunks_exact(2);
        pairs.map(|b| u16::from_be_bytes([b[0], b[1]])).collect()
    };
    Ok(match any.tag() {
        Tag::Utf8String | Tag::PrintableString | Tag::Ia5String | Tag::VisibleString => {
            Some(String::from_utf8_lossy(any.data).into_owned())
        }
        // OpenSSL treats this type as Latin-1.
        Tag::T61String => Some(any.data.iter().map(|b| char::from(*b)).collect()),
        Tag::BmpString => Some(String::from_utf16_lossy(&units(any.data))),
        Tag::UniversalString => {
            let units = any.data.chunks_exact(4);
            let units = units.map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
            Some(
                units
                    .map(|u| char::from_u32(u).unwrap_or('\u{fffd}'))
                    .collect(),
            )
        }
        _ => None,
    })
}

/// Converts ASCII letters to lower case, and trims and collapses spaces.
fn plain(text: &str) -> String {
    let is_space = |c: char| matches!(c, ' ' | '\t' | '\n' | '\r' | '\x0b' | '\x0c');
    let words: Vec<&str> = text.split(is_space).filter(|w| !w.is_empty()).collect();
    words.join(" ").to_ascii_lowercase()
}

/// Returns the content of an element that must have this tag.
fn content(element: &[u8], tag: u8) -> Result<&[u8], String> {
    let (_, any) = Any::from_der(element).map_err(|e| e.to_string())?;
    if element.first() == Some(&tag) {
        Ok(any.data)
    } else {
        Err("its subject is not encoded as in X.509".to_owned())
    }
}

/// Returns the elements in the content of a constructed element, including their headers.
fn elements(mut content: &[u8]) -> Result<Vec<&[u8]>, String> {
    let mut parts = Vec::new();
    while !content.is_empty() {
        let (rest, _) = Any::from_der(content).map_err(|e| e.to_string())?;
        parts.push(&content[..content.len() - rest.len()]);
        content = rest;
    }
    Ok(parts)
}

/// Returns an element with this tag and content in DER.
fn encoded(tag: u8, content: &[u8]) -> Vec<u8> {
    let header = Header::new(
        Class::Universal,
        tag & 0x20 != 0,
        Tag(u32::from(tag & 0x1f)),
        Length::Definite(content.len()),
    );
    // Encoding a definite length cannot fail.
    let mut bytes = header.to_der_vec().unwrap_or_default();
    bytes.extend_from_slice(content);
    bytes
}
