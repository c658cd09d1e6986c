//! The coordinator's decisions about new sandboxes (placements) and about shares of budgets. A
//! *budget* is the limit of an API key, and a *share* is the part of it that one member may use.
//! The requests come from any member of the fleet.
//!
//! A create can have a name and an idempotency key. Both have a row in the coordinator's directory,
//! so that two hosts cannot create the same sandbox. A decision reserves both rows until the
//! selected host has reported them, but at most for [`RESERVATION_MS`].

use super::decisions::{decision_id, decision_number};
use super::{Executor, RESERVATION_MS};
use crate::node::query::{
    Answer, Decision, LimitedNeed, NotPlaced, PlaceRequest, Placed, PlacementEnd, ShareRequest,
    Shares, TakenName,
};
use jiffy_fleet_core::record::MemberRow;
use jiffy_fleet_core::{CreateError, MemberId, Millis, SandboxHash, Term};
use jiffy_scheduler::{EngineSet, HostId, PlacementRequest, Resources, TemplateId};
use std::collections::{HashMap, VecDeque};

/// Window of the limit on creates per minute.
const RATE_WINDOW_MS: u64 = 60_000;
/// Maximum number of hosts that build a template in an answer.
const MAX_BUILDERS: usize = 4;
/// Maximum number of characters of the reason for which a host rejects a sandbox.
const MAX_REJECTION_CHARS: usize = 512;
/// Maximum number of owners whose creates are counted.
const MAX_RATES: usize = 65_536;

/// Times of the creates of each owner within the last minute.
#[derive(Debug, Default)]
pub(super) struct CreateRates(HashMap<String, VecDeque<Millis>>);

impl CreateRates {
    /// Counts a create. Returns the time in milliseconds until the next create is possible if the
    /// limit is reached.
    fn count(&mut self, now: Millis, owner: &str, limit: u32) -> Result<(), u64> {
        if self.0.len() >= MAX_RATES && !self.0.contains_key(owner) {
            self.0.retain(|_, times| {
                let newest = times.back();
                newest.is_some_and(|at| now.since(*at) < RATE_WINDOW_MS)
            });
        }
        let times = self.0.entry(owner.to_owned()).or_default();
        while times
            .front()
            .is_some_and(|at| now.since(*at) >= RATE_WINDOW_MS)
        {
            times.pop_front();
        }
        if times.len() >= limit as usize {
            let oldest = times.front().map_or(0, |at| now.since(*at));
            return Err(RATE_WINDOW_MS - oldest);
        }
        times.push_back(now);
        Ok(())
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl Executor {
    /// Answers a request for the placement of a sandbox.
    pub(super) fn place(&mut self, from: MemberId, request: &PlaceRequest) -> Answer {
        let now = self.clock.now();
        if !request.is_bounded() || self.member.authority(now).is_none() {
            return Answer::Incomplete;
        }
        match self.try_place(now, from, request) {
            Ok(placed) => Answer::Placed(Box::new(placed)),
            Err(Some(reason)) => Answer::NotPlaced(reason),
            Err(None) => Answer::Incomplete,
        }
    }

    /// Places a sandbox. Looks up the rows of idempotency key and name, finds the template, counts
    /// the create, selects a host with the scheduler, and reserves the rows. `Err(None)` means that
    /// this member cannot decide.
    fn try_place(
        &mut self,
        now: Millis,
        from: MemberId,
        request: &PlaceRequest,
    ) -> Result<Placed, Option<NotPlaced>> {
        if let Some(hash) = request.idempotency
            && let Some(taken) = self.row_holder(now, hash, request)?
        {
            return Err(Some(NotPlaced::Received(taken.member)));
        }
        if let Some(hash) = request.name
            && !self.is_freed(hash, request.freed)
            && let Some(taken) = self.row_holder(now, hash, request)?
        {
            return Err(Some(NotPlaced::NameTaken(taken)));
        }
        let template = match &request.templates[..] {
            [] => None,
            // The caller knows that the allowed hosts have the template.
            _ if !request.allowed.is_empty() => None,
            names => {
                let names = names.iter().map(|&name| TemplateId(name));
                let found = names
                    .into_iter()
                    .find(|name| self.member.is_on_a_host(*name));
                let builders = self.builders(request);
                Some(found.ok_or(NotPlaced::NoTemplate { builders })?)
            }
        };
        let wanted = placement_request(request, self.member_rows(), template);
        let mut needs = Vec::new();
        for LimitedNeed { need, limit } in &request.needs {
            self.member.set_limit(&need.owner, Some(*limit));
            needs.push(need.clone());
        }
        // A create is counted once, also if hosts reject it and it is requested again.
        if let (Some((owner, limit)), false) = (&request.rate, request.is_counted)
            && let Err(wait_ms) = self.rates.count(now, owner, *limit)
        {
            let wait_s = wait_ms.div_ceil(1000);
            return Err(Some(NotPlaced::Rate { wait_s }));
        }
        let rows: Vec<_> = [request.idempotency, request.name]
            .into_iter()
            .flatten()
            .collect();
        let explained = self.member.explain(&wanted);
        let explained = explained.map_or_else(String::new, |e| self.with_details(request, &e));
        let placed = match self.member.place(now, &needs, &wanted) {
            Ok(placed) => placed,
            Err(CreateError::NoCoordinator) => return Err(None),
            Err(CreateError::Budget(error)) => {
                let reason = format!("rejected: {error}");
                self.decisions
                    .add(now, None, reason, (rows, request.former));
                return Err(Some(NotPlaced::Budget(error)));
            }
            Err(CreateError::Placement(_)) => {
                let number =
                    self.decisions
                        .add(now, None, explained.clone(), (rows, request.former));
                let term = self.member.shard().map_or(Term(0), |record| record.term);
                return Err(Some(NotPlaced::NoHost {
                    decision: decision_id(term, number),
                    reason: explained,
                }));
            }
        };
        let host = placed.admission.host.member;
        let reason = format!("{explained}; requested through {from}");
        let reservation = Some((host, placed.reservation));
        let decision = self
            .decisions
            .add(now, reservation, reason, (rows.clone(), request.former));
        for row in rows {
            self.reservations.insert(row, (host, now, decision));
        }
        Ok(Placed {
            decision,
            address: placed.address,
            admission: placed.admission,
        })
    }

    fn member_rows(&self) -> &[MemberRow] {
        self.member.shard().map_or(&[], |record| &record.members)
    }

    /// Returns the member that has a row, or for which the row is reserved. Fails while the
    /// directory is incomplete: a new coordinator does not have the rows of all members yet.
    fn row_holder(
        &mut self,
        now: Millis,
        hash: SandboxHash,
        request: &PlaceRequest,
    ) -> Result<Option<TakenName>, Option<NotPlaced>> {
        let reserved = self.reservations.get(&hash).copied();
        let taken = |member, is_reported| TakenName {
            member,
            reservation: reserved.map(|(_, _, decision)| decision),
            is_reported,
        };
        let located = self.member.directory().and_then(|rows| rows.find(hash));
        if let Some(located) = located {
            return Ok(Some(taken(located.host, true)));
        }
        if !self.member.is_directory_complete() || !self.has_room_for_reservation(now) {
            return Err(None);
        }
        let holder = reserved.filter(|(_, at, decision)| {
            now.since(*at) < RESERVATION_MS && Some(*decision) != request.former
        });
        Ok(holder.map(|(member, ..)| taken(member, false)))
    }

    /// Returns whether the row of a name is free, because its host no longer has it and no other
    /// create has reserved it since. If so, removes the row: the host's own message about the
    /// removal has not arrived yet.
    fn is_freed(&mut self, hash: SandboxHash, freed: Option<TakenName>) -> bool {
        // If the directory did not have the row, the host may have created the sandbox since the
        // sender checked it.
        let Some(freed) = freed.filter(|freed| freed.is_reported) else {
            return false;
        };
        let reserved = self.reservations.get(&hash);
        reserved.map(|(_, _, decision)| *decision) == freed.reservation
            && self.member.remove_row(freed.member, hash)
    }

    /// Ends the reservations of rows that a member has removed. The caller passes only rows that
    /// were in the directory: a row that [`Self::is_freed`] had removed before may be reserved
    /// again by now, and must remain reserved.
    pub(super) fn end_reservations(&mut self, member: MemberId, rows: &[SandboxHash]) {
        for row in rows {
            if self.reservations.get(row).is_some_and(|r| r.0 == member) {
                self.reservations.remove(row);
            }
        }
    }

    /// Adds the creates in progress on the considered hosts to an explanation.
    fn with_details(
        &self,
        request: &PlaceRequest,
        explanation: &jiffy_scheduler::Explanation,
    ) -> String {
        let mut text = explanation.to_string();
        for considered in &explanation.hosts {
            let member = MemberId(considered.host.0);
            let creates = self.member.load(member).map_or(0, |load| load.creates);
            if creates > 0 {
                text.push_str(&format!("; {member}: {creates} creates in progress"));
            }
        }
        if !request.allowed.is_empty() {
            let hosts: Vec<_> = request.allowed.iter().map(ToString::to_string).collect();
            text.push_str(&format!("; only {} has the template", hosts.join(", ")));
        }
        if let Some(host) = request.volume_host {
            text.push_str(&format!("; only {host} has the volumes of the sandbox"));
        }
        text
    }

    /// Returns the hosts that build the template of a request, for an explanation.
    fn builders(&self, request: &PlaceRequest) -> Vec<MemberId> {
        let rows = self.member_rows().iter();
        let builders = rows.filter(|row| {
            let load = self.member.load(row.id);
            load.is_some_and(|load| request.templates.iter().any(|t| load.builds.contains(t)))
        });
        builders.map(|row| row.id).take(MAX_BUILDERS).collect()
    }

    /// Records the end of a placement.
    pub(super) fn end_placement(&mut self, end: PlacementEnd) -> Answer {
        let term = self.member.shard().map(|record| record.term);
        if !end.is_bounded() || !self.member.is_coordinator() || term != Some(end.term) {
            return Answer::Incomplete;
        }
        let is_running = end.rejected.is_none();
        let Some(entry) = self.decisions.find_mut(end.decision) else {
            return Answer::Incomplete;
        };
        entry.rejected = end
            .rejected
            .map(|reason| reason.chars().take(MAX_REJECTION_CHARS).collect());
        if let Some(reservation) = entry.reservation.take() {
            self.member.end_placement(reservation, is_running);
        }
        if !is_running {
            self.reservations
                .retain(|_, (_, _, decision)| *decision != end.decision);
        }
        self.decisions.connect(end.decision, end.rows);
        Answer::Done
    }

    /// Answers a request for larger shares.
    pub(super) fn share(&mut self, from: MemberId, request: &ShareRequest) -> Answer {
        let now = self.clock.now();
        if !request.is_bounded() {
            return Answer::Incomplete;
        }
        let mut shares = Shares {
            grants: Vec::new(),
            exhausted: None,
        };
        for LimitedNeed { need, limit } in &request.needs {
            self.member.set_limit(&need.owner, Some(*limit));
            match self.member.request_share(now, from, need) {
                Ok(grant) => shares.grants.extend(grant),
                Err(CreateError::Budget(error)) => {
                    shares.exhausted.get_or_insert(error);
                }
                Err(_) => return Answer::Incomplete,
            }
        }
        Answer::Shares(shares)
    }

    /// Returns the decisions about a sandbox.
    pub(super) fn why(&mut self, row: SandboxHash, text: &str) -> Answer {
        let Some(term) = self.member.shard().map(|record| record.term) else {
            return Answer::Incomplete;
        };
        if !self.member.is_coordinator() {
            return Answer::Incomplete;
        }
        let now = self.clock.now();
        let number = decision_number(term, text);
        let decisions: Vec<Decision> = self.decisions.about(now, term, row, number);
        Answer::Decisions(decisions)
    }
}

/// Returns the request to the scheduler.
fn placement_request(
    request: &PlaceRequest,
    rows: &[MemberRow],
    template: Option<TemplateId>,
) -> PlacementRequest {
    let mut engines = EngineSet::default();
    if request.needs_microvm {
        engines = engines.with(EngineSet::MICROVM);
    }
    if request.needs_gvisor {
        engines = engines.with(EngineSet::GVISOR);
    }
    let mut excluded: Vec<_> = request.excluded.iter().map(|id| HostId(id.0)).collect();
    if !request.allowed.is_empty() {
        let others = rows.iter().filter(|row| !request.allowed.contains(&row.id));
        excluded.extend(others.map(|row| HostId(row.id.0)));
    }
    PlacementRequest {
        needs: Resources {
            // Sandboxes share processors. Pressure on them is part of the reported resources.
            cpu_milli: 0,
            memory_mib: request.memory_mib,
            disk_mib: request.disk_mib,
        },
        engines,
        template,
        requires_template: template.is_some(),
        excluded,
        labels: request.labels.iter().map(Into::into).collect(),
        volume_host: request.volume_host.map(|host| HostId(host.0)),
        ..PlacementRequest::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn creates_per_minute_are_counted_and_the_wait_is_reported() {
        let mut rates = CreateRates::default();
        for second in 0..3 {
            rates.count(Millis(second * 1000), "key", 3).unwrap();
        }
        assert_eq!(rates.count(Millis(10_000), "key", 3), Err(50_000));
        rates.count(Millis(10_000), "other", 3).unwrap();
        rates.count(Millis(60_000), "key", 3).unwrap();
        assert!(rates.count(Millis(60_500), "key", 3).is_err());
        assert!(rates.count(Millis(0), "none", 0).is_err());
    }
}
