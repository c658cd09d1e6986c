//! Expressions of a recorded nftables rule. The kernel lists a rule in a form that it does not
//! accept in all cases when the same rule is created again. This module removes the attributes that
//! it rejects.

use super::{attributes, encode};

/// Netlink attribute types (`linux/netfilter/nf_tables.h`): the list of a rule's expressions, one
/// expression in this list, and the name and the data of an expression.
const EXPRESSIONS: u16 = 4;
const EXPRESSION: u16 = 1;
const NAME: u16 = 1;
const DATA: u16 = 2;
/// Name of the expression that reads or writes a header option (TCP, IPv6), and two of its
/// attributes: its flags, and the register whose value it writes to the option.
const HEADER_OPTION: &[u8] = b"exthdr\0";
const OPTION_FLAGS: u16 = 5;
const OPTION_SOURCE: u16 = 7;

/// Removes the attributes that the kernel reports but rejects in requests. These are the flags of
/// expressions that write a header option.
pub(super) fn without_read_only(rule: &[u8]) -> Result<Vec<u8>, String> {
    map(rule, |kind, value| match kind {
        EXPRESSIONS => map(value, |kind, value| match kind {
            EXPRESSION => expression(value).map(Some),
            _ => Err(format!("attribute {kind} among expressions is unknown")),
        })
        .map(Some),
        _ => Ok(Some(value.to_vec())),
    })
}

/// Returns an expression without the flags that the kernel rejects. All other expressions are
/// unchanged.
fn expression(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let find = |wanted| {
        let mut all = attributes(bytes).map_while(Result::ok);
        all.find(|(kind, _)| *kind == wanted)
            .map(|(_, value)| value)
    };
    let data = find(DATA).unwrap_or_default();
    let mut of_data = attributes(data).map_while(Result::ok);
    let writes = of_data.any(|(kind, _)| kind == OPTION_SOURCE);
    // Expressions that read an option need their flags.
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

/// Maps the values of the attributes of `bytes` with `change`. `None` removes the attribute.
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
