//! Objects of a recorded ruleset as netlink attributes (linux/netfilter/nf_tables.h): selects the
//! attributes that create the same object again. A ruleset is created once with `nft`, and copied
//! to further network namespaces over netlink, which is faster.

mod expressions;

use super::RulesetScope;
use netlink_packet_core::{NLA_F_NESTED, NlaBuffer, NlasIterator};
use std::fmt;
use std::io;

/// Number of the family `inet` (linux/netfilter.h, NFPROTO_INET).
pub(super) const INET: u8 = 1;
/// Bytes of the header of netfilter's messages (`nfgenmsg`).
const HEADER_BYTES: usize = 4;
/// Attribute common to all kinds: the name of the table.
const TABLE: u16 = 1;
/// Attribute of a table's own name.
const TABLE_NAME: u16 = 1;
/// Attribute of a chain: its name.
const CHAIN_NAME: u16 = 3;
/// Attribute of a rule: the name of its chain.
const RULE_CHAIN: u16 = 2;
/// Attribute of a set or its elements: the name of the set.
const SET_NAME: u16 = 2;
/// Attribute of a set: a number that identifies it within a transaction.
const SET_ID: u16 = 10;
/// Attribute with the elements of a set, and attribute of a single element.
const ELEMENTS: u16 = 3;
const ELEMENT: u16 = 1;
/// Attributes of an element: its key and its flags.
const ELEMENT_KEY: u16 = 1;
const ELEMENT_FLAGS: u16 = 3;
/// Recorded attributes of an element: key, data, flags, user data, end of the key. The others
/// belong to elements with a state or a timeout.
const RECORDED_OF_ELEMENT: [u16; 5] = [1, 2, 3, 6, 10];
/// Omitted attributes of an element: padding.
const OMITTED_OF_ELEMENT: [u16; 1] = [8];
/// Number of bytes of elements after which a new message starts. The elements of a message are in
/// one attribute, which has at most 64 KiB.
const MAX_ELEMENTS_BYTES: usize = 16 * 1024;

/// Kind of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectKind {
    Table,
    Chain,
    Set,
    /// Elements of a set.
    Elements,
    Rule,
}

impl ObjectKind {
    /// Returns the message type that creates or describes an object of this kind
    /// (`NFT_MSG_NEW*` in linux/netfilter/nf_tables.h).
    pub fn creation_message(self) -> u8 {
        match self {
            Self::Table => 0,
            Self::Chain => 3,
            Self::Set => 9,
            Self::Elements => 12,
            Self::Rule => 6,
        }
    }

    /// Returns the message type that requests a dump.
    pub fn listing_message(self) -> u8 {
        self.creation_message() + 1
    }

    /// Returns the recorded attributes. The comments name them in the order of their numbers.
    fn recorded(self) -> &'static [u16] {
        match self {
            // Name, flags, user data.
            Self::Table => &[1, 2, 6],
            // Table, name, hook, policy, type, flags, user data.
            Self::Chain => &[1, 3, 4, 5, 7, 10, 12],
            // Table, name, flags, type and length of key and data, policy, description, timeout,
            // interval of garbage collection, user data, type of objects.
            Self::Set => &[1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15],
            // Table, set, elements.
            Self::Elements => &[1, 2, 3],
            // Table, chain, expressions, user data.
            Self::Rule => &[1, 2, 4, 7],
        }
    }

    /// Returns the omitted attributes, which are internal to the kernel.
    fn omitted(self) -> &'static [u16] {
        match self {
            // References, handle, padding.
            Self::Table => &[3, 4, 5],
            // Handle, references, counters, padding, id.
            Self::Chain => &[2, 6, 8, 9, 11],
            // Id, padding, handle, implementation, count.
            Self::Set => &[10, 14, 16, 19, 20],
            // Id of the set.
            Self::Elements => &[4],
            // Handle, handle of the rule before, padding, id.
            Self::Rule => &[3, 6, 8, 9],
        }
    }
}

/// Object of a ruleset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RulesetObject {
    pub kind: ObjectKind,
    /// Number of the family of its table.
    pub family: u8,
    /// The recorded attributes, encoded.
    attributes: Vec<u8>,
}

/// Iterates over types (without their flags) and values of attributes.
fn attributes(bytes: &[u8]) -> impl Iterator<Item = Result<(u16, &[u8]), String>> {
    NlasIterator::new(bytes).map(|attribute| {
        let attribute = attribute.map_err(|e| e.to_string())?;
        Ok((attribute.kind(), value(&attribute)))
    })
}

/// Returns the value with the lifetime of the underlying bytes.
fn value<'a>(attribute: &NlaBuffer<&'a [u8]>) -> &'a [u8] {
    let bytes: &'a [u8] = attribute.into_inner();
    let length = usize::from(attribute.length());
    bytes.get(4..length).unwrap_or_default()
}

/// Encodes one attribute of netlink: length, kind and value, padded to 4 bytes.
fn encode(kind: u16, value: &[u8]) -> Vec<u8> {
    // The length fits in 16 bits: values are taken from attributes, which have the same limit, or
    // are bounded.
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Returns the attribute with a table's name.
pub(super) fn table_name(name: &str) -> Vec<u8> {
    encode(TABLE_NAME, &[name.as_bytes(), b"\0"].concat())
}

/// Returns the attributes of `bytes` that are in `recorded`, encoded. Fails on an attribute that is
/// in neither list.
fn filter(bytes: &[u8], recorded: &[u16], omitted: &[u16], of: &str) -> Result<Vec<u8>, String> {
    let mut retained = Vec::new();
    for attribute in attributes(bytes) {
        let (kind, value) = attribute?;
        if recorded.contains(&kind) {
            retained.extend(encode(kind, value));
        } else if !omitted.contains(&kind) {
            return Err(format!("attribute {kind} of {of} is unknown"));
        }
    }
    Ok(retained)
}

impl RulesetObject {
    /// Parses the payload of a message about an object of kind `kind`.
    pub fn parse(kind: ObjectKind, payload: &[u8]) -> Result<Self, String> {
        let family = *payload.first().ok_or("a message is too short")?;
        let body = payload
            .get(HEADER_BYTES..)
            .ok_or("a message is too short")?;
        let of = format!("{kind:?}");
        let attributes = filter(body, kind.recorded(), kind.omitted(), &of)?;
        let attributes = match kind {
            ObjectKind::Rule => expressions::without_read_only(&attributes)?,
            _ => attributes,
        };
        Ok(Self {
            kind,
            family,
            attributes,
        })
    }

    /// Returns the value of the attribute `wanted`.
    fn get(&self, wanted: u16) -> Option<&[u8]> {
        let mut all = attributes(&self.attributes).map_while(Result::ok);
        all.find(|(kind, _)| *kind == wanted)
            .map(|(_, value)| value)
    }

    /// Returns the text in the attribute `wanted`. Empty if the attribute is missing.
    fn text(&self, wanted: u16) -> String {
        let text = String::from_utf8_lossy(self.get(wanted).unwrap_or_default());
        text.trim_end_matches('\0').to_owned()
    }

    /// Returns true if the object belongs to `scope`.
    pub fn is_in(&self, scope: RulesetScope<'_>) -> bool {
        match scope {
            RulesetScope::Everything => true,
            RulesetScope::InetTable(name) => self.family == INET && self.text(TABLE) == name,
        }
    }

    /// Returns the attributes of a request that creates the object. `id` must be unique in the
    /// transaction.
    pub fn request(&self, id: u32) -> Vec<u8> {
        let mut bytes = self.attributes.clone();
        if self.kind == ObjectKind::Set {
            bytes.extend(encode(SET_ID, &id.to_be_bytes()));
        }
        bytes
    }
}

impl fmt::Display for RulesetObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.text(TABLE);
        match self.kind {
            ObjectKind::Table => write!(f, "creating table {table}"),
            ObjectKind::Chain => write!(f, "creating chain {table} {}", self.text(CHAIN_NAME)),
            ObjectKind::Set => write!(f, "creating set {table} {}", self.text(SET_NAME)),
            ObjectKind::Elements => write!(f, "filling set {table} {}", self.text(SET_NAME)),
            ObjectKind::Rule => {
                write!(
                    f,
                    "creating a rule of chain {table} {}",
                    self.text(RULE_CHAIN)
                )
            }
        }
    }
}

/// Reference to a set, for requests about its elements.
#[derive(Debug)]
pub(super) struct SetReference {
    pub family: u8,
    /// Values of the attributes with the names of table and set.
    table: Vec<u8>,
    name: Vec<u8>,
}

impl SetReference {
    /// Returns the reference to the set `object`. `None` if the object is not a set.
    pub fn of(object: &RulesetObject) -> Option<Self> {
        (object.kind == ObjectKind::Set).then_some(())?;
        Some(Self {
            family: object.family,
            table: object.get(TABLE)?.to_vec(),
            name: object.get(SET_NAME)?.to_vec(),
        })
    }

    /// Returns the attributes that identify the set in messages about elements.
    pub fn attributes(&self) -> Vec<u8> {
        [encode(TABLE, &self.table), encode(SET_NAME, &self.name)].concat()
    }

    /// Returns the elements in `dumped` as messages. The elements are sorted, because the order of
    /// a dump may vary. The end of an interval precedes a start with the same key, as the kernel
    /// requires.
    pub fn collect(&self, dumped: &[RulesetObject]) -> io::Result<Vec<RulesetObject>> {
        let mut elements = Vec::new();
        for list in dumped.iter().filter_map(|message| message.get(ELEMENTS)) {
            for element in attributes(list) {
                elements.push(SetElement::parse(element).map_err(io::Error::other)?);
            }
        }
        elements.sort();
        let mut messages = Vec::new();
        let mut list = Vec::new();
        for element in elements {
            // The flag marks an attribute that contains others. Parsing removed it.
            list.extend(encode(ELEMENT | NLA_F_NESTED, &element.attributes));
            if list.len() > MAX_ELEMENTS_BYTES {
                messages.push(self.message(&std::mem::take(&mut list)));
            }
        }
        if !list.is_empty() {
            messages.push(self.message(&list));
        }
        Ok(messages)
    }

    /// Returns a message that adds encoded elements to the set.
    fn message(&self, elements: &[u8]) -> RulesetObject {
        let elements = encode(ELEMENTS | NLA_F_NESTED, elements);
        RulesetObject {
            kind: ObjectKind::Elements,
            family: self.family,
            attributes: [self.attributes(), elements].concat(),
        }
    }
}

/// Element of a set, ordered by key. The end of an interval precedes a start with the same key.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SetElement {
    key: Vec<u8>,
    /// True for the start of an interval, false for its end.
    is_start: bool,
    attributes: Vec<u8>,
}

impl SetElement {
    /// Parses an element of a recorded set.
    fn parse(element: Result<(u16, &[u8]), String>) -> Result<Self, String> {
        let (kind, value) = element?;
        if kind != ELEMENT {
            return Err(format!("attribute {kind} among elements is unknown"));
        }
        let of = "an element";
        let recorded = filter(value, &RECORDED_OF_ELEMENT, &OMITTED_OF_ELEMENT, of)?;
        let find = |wanted| {
            let mut all = attributes(&recorded).map_while(Result::ok);
            all.find(|(kind, _)| *kind == wanted)
                .map(|(_, value)| value)
        };
        // The only flag of elements in these sets marks the end of an interval.
        let is_end = find(ELEMENT_FLAGS).is_some_and(|flags| flags.iter().any(|byte| *byte != 0));
        Ok(Self {
            key: find(ELEMENT_KEY).unwrap_or_default().to_vec(),
            is_start: !is_end,
            attributes: recorded,
        })
    }
}
