//! Registry of host names: the record `fleet/hosts/<name>` maps a name to a member number. The
//! member that admits a joining host registers the name, so that two hosts cannot have one name.
//!
//! A *front* is a machine without sandboxes that passes requests of clients to the members. The
//! record of the *shard* (all sandboxes of the fleet) lists the members and the removed fronts.

use super::message::JoinRequest;
use crate::access::FleetAccess;
use crate::records::Outcome;
use crate::{RecordError, RecordKey, SetupError};
use jiffy_fleet_core::record::{MemberState, ShardRecord};
use jiffy_fleet_core::{MemberId, ShardId};
use serde::{Deserialize, Serialize};

/// Record of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostRecord {
    /// Format of the record.
    pub version: u32,
    pub member: MemberId,
    /// Random number of the data directory, by which a repeated join is recognised.
    pub installation: String,
    pub address: String,
}

/// Returns the number of the member with a name, and registers the name. A data directory whose
/// former join was interrupted receives the same number again.
///
/// # Errors
/// [`SetupError::Rejected`] if a living member has the name, or the data directory is a member.
pub(crate) async fn register(
    access: &FleetAccess,
    request: &JoinRequest,
) -> Result<MemberId, SetupError> {
    let (name, installation) = (&request.name, &request.installation);
    let key: RecordKey = format!("fleet/hosts/{name}").parse()?;
    let current = access.records.get(&key).await?;
    let mut existing = None;
    if let Some(current) = &current {
        let host: HostRecord = decode(&key, &current.content)?;
        let is_own = host.installation == *installation;
        match state(access, host.member).await? {
            Some(MemberState::Up | MemberState::Draining) => {
                let (member, reason) = (
                    host.member,
                    if is_own {
                        "this data directory is a member already"
                    } else {
                        "choose another --name, or remove the member first"
                    },
                );
                let text = format!("the name {name} belongs to {member}, which is alive: {reason}");
                return Err(SetupError::Rejected(text));
            }
            // The former owner of the name was removed or is dead: the name receives a new number.
            Some(_) => {}
            // The number of a host cannot be used by a front, and vice versa.
            None if host.member.is_front() != request.is_front => {}
            None => existing = is_own.then_some(host.member),
        }
    }
    let member = match existing {
        Some(member) => member,
        None if request.is_front => access.reserve_member().await?.0.front(),
        None => access.reserve_member().await?.0,
    };
    let host = HostRecord {
        version: 1,
        member,
        installation: installation.clone(),
        address: request.address.clone(),
    };
    let content = serde_json::to_vec(&host).unwrap_or_default();
    let write = match &current {
        Some(current) => access.records.replace(&key, content, current)?,
        None => access.records.create(&key, content)?,
    };
    match access.records.send(&write).await? {
        Outcome::Done(_) => Ok(member),
        Outcome::Lost(_) => Err(SetupError::Rejected(format!(
            "another host joins with the name {name} at the same time: choose another --name"
        ))),
    }
}

fn decode(key: &RecordKey, content: &[u8]) -> Result<HostRecord, RecordError> {
    serde_json::from_slice(content).map_err(|error| RecordError::Damaged {
        record: key.clone(),
        reason: error.to_string(),
    })
}

/// Returns the state of a member. `None` if it was never started, or is a front that was not
/// removed.
async fn state(access: &FleetAccess, member: MemberId) -> Result<Option<MemberState>, SetupError> {
    let shard = ShardId(0);
    let key: RecordKey = format!("fleet/shards/{}", shard.0).parse()?;
    let Some(record) = access.records.get(&key).await? else {
        return Ok(None);
    };
    let shard = ShardRecord::decode(&record.content, &access.root.fleet, shard)?;
    if shard.removed_fronts.contains(&member) {
        return Ok(Some(MemberState::Left));
    }
    Ok(shard.row(member).map(|row| row.state))
}
