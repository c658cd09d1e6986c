//! Expressions of a rule, in the form in which the kernel takes them.

use super::{attributes, encode};

/// Attribute of a rule with its expressions; one of them; its name and its own attributes.
const EXPRESSIONS: u16 = 4;
const EXPRESSION: u16 = 1;
const NAME: u16 = 1;
const DATA: u16 = 2;
/// Expression about options of a header, and attributes of it: flags, and the register that is
/// written to an option.
const HEADER_OPTION: &[u8] = b"exthdr\0";
const OPTION_FLAGS: u16 = 5;
const OPTION_SOURCE: u16 = 7;

/// A rule's attributes with expressions that can be made. The kernel describes flags of those that
/// write an option of a header, and refuses flags of them.
pub(super) fn makeable(rule: &[u8]) -> Result<Vec<u8>, String> {
    map(rule, |kind, value| match kind {
        EXPRESSIONS => map(value, |kind, value| match kind {
            EXPRESSION => expression(value).map(Some),
            _ => Err(format!("attribute {kind} among expressions is not known")),
        })
        .map(Some),
        _ => Ok(Some(value.to_vec())),
    })
}

fn expression(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let find = |wanted| {
        let mut all = attributes(bytes).map_while(Result::ok);
        all.find(|(kind, _)| *kind == wanted)
            .map(|(_, value)| value)
    };
    let data = find(DATA).unwrap_or_default();
    let mut of_data = attributes(data).map_while(Result::ok);
    let writes = of_data.any(|(kind, _)| kind == OPTION_SOURCE);
    if find(NAME) != Some(HEADER_OPTION) || !writes {
        return Ok(bytes.to_vec());
    }
    map(bytes, |kind, value| match kind {
        DATA => map(value, |kind, value| {
            Ok((kind != OPTION_FLAGS).then(|| value.to_vec()))
        })
        .map(Some),
        _ => Ok(Some(value.to_vec())),
    })
}

/// The attributes of `bytes` with values that `change` gives them; none: without that attribute.
fn map(
    bytes: &[u8],
    change: impl Fn(u16, &[u8]) -> Result<Option<Vec<u8>>, String>,
) -> Result<Vec<u8>, String> {
    let mut changed = Vec::new();
    for attribute in attributes(bytes) {
        let (kind, value) = attribute?;
        if let Some(value) = change(kind, value)? {
            changed.extend(encode(kind, &value));
        }
    }
    Ok(changed)
}
