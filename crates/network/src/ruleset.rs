//! [`RecordedRuleset`]: the recorded nftables rules of one network namespace (tables, chains, sets,
//! rules). They can be applied to another namespace over netlink, without running `nft`.
//!
//! The kernel describes each object with the attributes that create the object and with internal
//! attributes (numbers, counters). The internal ones are omitted. Only known attributes are
//! recorded: recording a ruleset with unknown attributes fails.

mod objects;

use crate::NetError;
use crate::netlink_batch::{NetlinkBatch, dump};
use netlink_packet_core::{NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};
use nix::sys::socket::SockProtocol;
use objects::{ObjectKind, RulesetObject, SetReference};
use std::io;

/// Netlink subsystem number of nftables (linux/netfilter/nfnetlink.h).
const SUBSYSTEM: u8 = 10;
/// Messages at the beginning and end of a transaction.
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// Request for the elements of a set (linux/netfilter/nf_tables.h).
const GET_ELEMENTS: u8 = 13;
/// Request that removes a table.
const DELETE_TABLE: u8 = 2;
/// Maximum number of objects in a recorded ruleset.
const MAX_OBJECTS: usize = 4096;

/// Part of a namespace's ruleset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RulesetScope<'a> {
    /// All tables.
    Everything,
    /// One table of the family `inet`.
    InetTable(&'a str),
}

/// Recorded ruleset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordedRuleset {
    /// Ordered such that each object follows the objects it depends on.
    objects: Vec<RulesetObject>,
}

/// Returns the netlink type of a message of nftables: the subsystem and the number of the message.
fn kind(message: u8) -> u16 {
    u16::from_be_bytes([SUBSYSTEM, message])
}

/// Returns the header of netfilter messages (`nfgenmsg`).
fn header(family: u8, resource: u16) -> Vec<u8> {
    let [high, low] = resource.to_be_bytes();
    vec![family, 0, high, low]
}

impl RecordedRuleset {
    /// Records the ruleset of the network namespace of this thread.
    pub fn read(scope: RulesetScope<'_>) -> io::Result<Self> {
        let mut objects = Vec::new();
        // Family 0 requests the objects of all families.
        for of in [ObjectKind::Table, ObjectKind::Chain, ObjectKind::Set] {
            read_into(&mut objects, scope, of, of.listing_message(), &header(0, 0))?;
        }
        // The kernel lists the elements of one set per request.
        let sets: Vec<SetReference> = objects.iter().filter_map(SetReference::of).collect();
        for set in sets {
            let body = [header(set.family, 0), set.attributes()].concat();
            let mut elements = Vec::new();
            let of = ObjectKind::Elements;
            read_into(&mut elements, scope, of, GET_ELEMENTS, &body)?;
            objects.extend(set.collect(&elements)?);
        }
        // Rules are last, because they refer to chains and sets.
        let of = ObjectKind::Rule;
        read_into(&mut objects, scope, of, of.listing_message(), &header(0, 0))?;
        Ok(Self { objects })
    }

    /// Atomically applies the ruleset in the network namespace of this thread. Replaces the `inet`
    /// table named `replaced`, if it exists.
    pub fn apply(&self, replaced: Option<&str>) -> Result<(), NetError> {
        if self.objects.is_empty() {
            return Err(NetError::Unable("the recorded ruleset is empty".to_owned()));
        }
        let mut batch = NetlinkBatch::default();
        // Both edges of the transaction name its subsystem.
        let edge = header(0, SUBSYSTEM.into());
        batch.push("starting a transaction", BATCH_BEGIN, 0, &edge);
        if let Some(table) = replaced {
            let table = [header(objects::INET, 0), objects::table_name(table)].concat();
            // Create the table first, so that its removal succeeds even if it did not exist.
            let create = kind(ObjectKind::Table.creation_message());
            batch.push("creating a table", create, NLM_F_CREATE, &table);
            batch.push("removing a table", kind(DELETE_TABLE), 0, &table);
        }
        let mut objects = self.objects.iter().zip(1_u32..).peekable();
        while let Some((object, id)) = objects.next() {
            let flags = match object.kind {
                ObjectKind::Rule => NLM_F_CREATE | NLM_F_APPEND,
                ObjectKind::Elements => NLM_F_CREATE,
                _ => NLM_F_CREATE | NLM_F_EXCL,
            };
            // The kernel acknowledges the whole transaction with its last request.
            let last = objects.peek().is_none();
            let flags = if last { flags | NLM_F_ACK } else { flags };
            let body = [header(object.family, 0), object.request(id)].concat();
            batch.push(
                object.to_string(),
                kind(object.kind.creation_message()),
                flags,
                &body,
            );
        }
        batch.push("ending a transaction", BATCH_END, 0, &edge);
        batch.send(SockProtocol::NetlinkNetFilter)
    }
}

/// Reads the objects of kind `of` in `scope` by the dump request `get`, and appends them to
/// `objects`.
fn read_into(
    objects: &mut Vec<RulesetObject>,
    scope: RulesetScope<'_>,
    of: ObjectKind,
    get: u8,
    body: &[u8],
) -> io::Result<()> {
    // The rest of the dump must still be read after a fault.
    let mut fault = None;
    let protocol = SockProtocol::NetlinkNetFilter;
    dump(protocol, kind(get), body, |message, payload| {
        if message != kind(of.creation_message()) || fault.is_some() {
            return;
        }
        match RulesetObject::parse(of, payload) {
            Ok(object) if !object.is_in(scope) => {}
            Ok(_) if objects.len() >= MAX_OBJECTS => fault = Some("too many objects".to_owned()),
            Ok(object) => objects.push(object),
            Err(why) => fault = Some(why),
        }
    })?;
    fault.map_or(Ok(()), |why| Err(io::Error::other(why)))
}

#[cfg(test)]
#[path = "ruleset_tests.rs"]
mod tests;
