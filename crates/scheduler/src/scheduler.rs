//! [`Scheduler`]: selects a host for each new sandbox of a fleet. The coordinator of the fleet
//! calls it; it performs no I/O.
//!
//! A *placement* is the selection of the host of a new sandbox. The *tightest* host is the one with
//! the smallest free amount that suffices for the sandbox.

mod class;
mod entry;
mod selection;

use crate::bucket_index::Slot;
use crate::reservations::{Reservation, ReservationId, Reservations};
use crate::{HostId, HostReport, HostSpec, PlacementRequest, Resource, Resources, TemplateId};
use class::Class;
use entry::HostEntry;
use std::collections::HashMap;

/// Maximum difference of free amounts for which a host with the sandbox's template is preferred to
/// the tightest host. In percent of the tightest host's capacity.
pub const LOCALITY_PERCENT: u32 = 5;
/// Maximum additional distance of the ratio of such a host from the ratio of the sandbox, in
/// quarters of a power of two.
pub const LOCALITY_DISTANCE: u32 = 4;

/// Resources by which hosts are ordered. Disk space must suffice, but hosts are not ordered by it.
const ORDERS: [Resource; 2] = [Resource::Memory, Resource::Cpu];

/// Returns the amounts by which an order sorts and groups hosts. `order` is an index of [`ORDERS`].
fn amounts(resources: &Resources, order: usize) -> (u32, u32) {
    (
        resources.get(ORDERS[order]),
        resources.get(ORDERS[1 - order]),
    )
}

/// Selected host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Host of the sandbox.
    pub host: HostId,
    /// Reservation of the sandbox's resources, for [`Scheduler::confirm`] or
    /// [`Scheduler::reject`].
    pub reservation: ReservationId,
    /// The host has the template of the sandbox.
    pub has_template: bool,
}

/// Reason for which no host was selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The fleet has no host that accepts sandboxes.
    #[error("no host accepts new sandboxes: add a host, or end a drain")]
    NoHosts,
    /// No host has the engine, processor, features and labels.
    #[error("no host has the required engine, processor and labels")]
    NoMatch,
    /// All suitable hosts are full, or lack the template or the object store.
    #[error("no suitable host has room: retry later, or add a host")]
    NoRoom,
}

/// Free resources of all hosts, and the selection of a host for a sandbox.
///
/// Hosts with equal properties form a class. Each class orders its hosts by free memory and by free
/// processor time, and groups them by the ratio of the two. A placement uses the order by the
/// resource that is scarcer in the fleet, and takes about a microsecond for any number of hosts.
#[derive(Debug, Default)]
pub struct Scheduler {
    /// Hosts by their number in the indexes. The number of a removed host is reused.
    hosts: Vec<Option<HostEntry>>,
    /// Numbers of removed hosts.
    gaps: Vec<u32>,
    /// Numbers of hosts in the indexes, by id.
    numbers: HashMap<HostId, u32>,
    classes: Vec<Class>,
    /// Place of each host in the indexes of its class, for each of [`ORDERS`].
    slots: [Vec<Slot>; 2],
    /// Numbers of the hosts that have a template.
    templates: HashMap<TemplateId, Vec<u32>>,
    reservations: Reservations,
    /// Sums over the hosts that accept sandboxes, for each of [`ORDERS`].
    total_free: [u64; 2],
    total_capacity: [u64; 2],
}

impl Scheduler {
    /// Creates a scheduler without hosts.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of hosts.
    #[must_use]
    pub fn host_count(&self) -> usize {
        self.numbers.len()
    }

    /// Returns the number of reservations that are neither confirmed, rejected nor expired.
    #[must_use]
    pub fn reservation_count(&self) -> usize {
        self.reservations.len()
    }

    /// Returns the reported free resources of a host, minus the reserved ones. `None` if the host
    /// is unknown.
    #[must_use]
    pub fn free(&self, host: HostId) -> Option<Resources> {
        self.entry(host).map(HostEntry::free)
    }

    /// Returns whether a host has the template.
    #[must_use]
    pub fn has_template(&self, template: TemplateId) -> bool {
        self.templates.contains_key(&template)
    }

    /// Adds a host, or replaces its properties and state. Its reservations end.
    pub fn add_host(&mut self, id: HostId, spec: HostSpec, report: HostReport) {
        self.remove_host(id);
        let number = self.gaps.pop().unwrap_or_else(|| {
            self.hosts.push(None);
            self.slots
                .iter_mut()
                .for_each(|slots| slots.push(Slot::default()));
            self.hosts.len() as u32 - 1
        });
        let class = self.class_of(&spec);
        let entry = HostEntry::new(id, spec, class, report);
        for &template in entry.templates() {
            self.templates.entry(template).or_default().push(number);
        }
        self.hosts[number as usize] = Some(entry);
        self.numbers.insert(id, number);
        self.insert_into_orders(number);
    }

    /// Removes a host and ends its reservations. Does nothing if the host is unknown.
    pub fn remove_host(&mut self, id: HostId) {
        let Some(number) = self.numbers.remove(&id) else {
            return;
        };
        self.remove_from_orders(number);
        self.reservations.end_host(id);
        if let Some(entry) = self.hosts[number as usize].take() {
            self.forget_templates(number, entry.templates());
        }
        self.gaps.push(number);
    }

    /// Replaces the state of a host by the report in a new heartbeat. Returns false if the host is
    /// unknown.
    ///
    /// Open reservations are subtracted from the reported free resources. If the report already
    /// includes the sandbox of an open reservation, the sandbox is counted twice until the first
    /// report after [`Self::confirm`].
    pub fn report(&mut self, id: HostId, report: HostReport) -> bool {
        let Some(&number) = self.numbers.get(&id) else {
            return false;
        };
        self.remove_from_orders(number);
        if let Some(entry) = &mut self.hosts[number as usize]
            && let Some(before) = entry.replace_report(report)
        {
            let after = entry.templates().to_vec();
            self.forget_templates(number, &before);
            for template in after {
                self.templates.entry(template).or_default().push(number);
            }
        }
        self.insert_into_orders(number);
        true
    }

    /// Sets whether a host accepts no new sandboxes, before its next report contains this. Does
    /// nothing if the host is unknown.
    pub fn set_draining(&mut self, id: HostId, is_draining: bool) {
        let Some(&number) = self.numbers.get(&id) else {
            return;
        };
        self.remove_from_orders(number);
        if let Some(entry) = &mut self.hosts[number as usize] {
            entry.set_draining(is_draining);
        }
        self.insert_into_orders(number);
    }

    /// Excludes a host from placements until its next report, because its heartbeats fail to
    /// arrive. Its reservations continue. Does nothing if the host is unknown.
    pub fn set_silent(&mut self, id: HostId) {
        let Some(&number) = self.numbers.get(&id) else {
            return;
        };
        self.remove_from_orders(number);
        if let Some(entry) = &mut self.hosts[number as usize] {
            entry.set_silent();
        }
    }

    /// Selects a host and reserves the resources of the sandbox until the reservation is confirmed,
    /// rejected or expired. `now_ms` is the time of a monotonic clock in milliseconds.
    ///
    /// # Errors
    /// [`PlacementError`] if no host is suitable. [`Self::explain`] lists the reasons per host.
    pub fn place(
        &mut self,
        request: &PlacementRequest,
        now_ms: u64,
    ) -> Result<Placement, PlacementError> {
        self.expire(now_ms);
        let selection = self.select(request)?;
        let host = selection.host;
        let reservation = self.reservations.add(
            Reservation {
                host,
                needs: request.needs,
            },
            now_ms,
        );
        self.change(host, |entry| entry.reserve(&request.needs));
        Ok(Placement {
            host,
            reservation,
            has_template: selection.has_template,
        })
    }

    /// Returns the host that [`Self::place`] would select. `None` if no host is suitable.
    #[must_use]
    pub fn next_host(&self, request: &PlacementRequest) -> Option<HostId> {
        Some(self.select(request).ok()?.host)
    }

    /// Ends a reservation because the host runs the sandbox. The resources count as used until the
    /// next report of the host replaces its free resources. Returns false if the reservation has
    /// ended before.
    pub fn confirm(&mut self, id: ReservationId) -> bool {
        let Some(Reservation { host, needs }) = self.reservations.end(id) else {
            return false;
        };
        self.change(host, |entry| entry.confirm(&needs));
        true
    }

    /// Ends a reservation because the host does not run the sandbox. Returns false if the
    /// reservation has ended before.
    pub fn reject(&mut self, id: ReservationId) -> bool {
        let Some(Reservation { host, needs }) = self.reservations.end(id) else {
            return false;
        };
        self.change(host, |entry| entry.release(&needs));
        true
    }

    /// Ends all reservations that have expired at `now_ms`.
    pub fn expire(&mut self, now_ms: u64) {
        while let Some(Reservation { host, needs }) = self.reservations.expire(now_ms) {
            self.change(host, |entry| entry.release(&needs));
        }
    }

    fn entry(&self, host: HostId) -> Option<&HostEntry> {
        self.numbers
            .get(&host)
            .and_then(|&number| self.hosts[number as usize].as_ref())
    }

    /// Changes the free resources of a host, if it is known, and its place in the orders.
    fn change(&mut self, host: HostId, change: impl FnOnce(&mut HostEntry)) {
        let Some(&number) = self.numbers.get(&host) else {
            return;
        };
        let Some(entry) = &mut self.hosts[number as usize] else {
            return;
        };
        let before = entry.free();
        change(entry);
        if !entry.accepts_sandboxes() {
            return;
        }
        let (after, class) = (entry.free(), entry.class);
        for (order, resource) in ORDERS.into_iter().enumerate() {
            let (old, new) = (before.get(resource), after.get(resource));
            self.total_free[order] = self.total_free[order] + u64::from(new) - u64::from(old);
            let amounts = amounts(&after, order);
            self.classes[class].orders[order].update(number, amounts, &mut self.slots[order]);
        }
    }

    /// Adds a host to the orders of its class if it accepts sandboxes.
    fn insert_into_orders(&mut self, number: u32) {
        let Some(entry) = &self.hosts[number as usize] else {
            return;
        };
        if !entry.accepts_sandboxes() {
            return;
        }
        for (order, resource) in ORDERS.into_iter().enumerate() {
            let free = entry.free();
            self.total_free[order] += u64::from(free.get(resource));
            self.total_capacity[order] += u64::from(entry.spec.capacity.get(resource));
            let amounts = amounts(&free, order);
            self.classes[entry.class].orders[order].insert(number, amounts, &mut self.slots[order]);
        }
    }

    /// Removes a host from the orders of its class. Must be called before the entry changes,
    /// because the amounts of the entry are subtracted from the sums.
    fn remove_from_orders(&mut self, number: u32) {
        let Some(entry) = &self.hosts[number as usize] else {
            return;
        };
        if !entry.accepts_sandboxes() {
            return;
        }
        for (order, resource) in ORDERS.into_iter().enumerate() {
            self.total_free[order] -= u64::from(entry.free().get(resource));
            self.total_capacity[order] -= u64::from(entry.spec.capacity.get(resource));
            self.classes[entry.class].orders[order].remove(number, &mut self.slots[order]);
        }
    }

    /// Removes a host from the lists of hosts that have these templates.
    fn forget_templates(&mut self, number: u32, templates: &[TemplateId]) {
        for template in templates {
            if let Some(hosts) = self.templates.get_mut(template) {
                hosts.retain(|&host| host != number);
                if hosts.is_empty() {
                    self.templates.remove(template);
                }
            }
        }
    }

    /// Returns the class of hosts with the properties of `spec`, and creates it if necessary.
    fn class_of(&mut self, spec: &HostSpec) -> usize {
        let properties = class::Properties::of(spec);
        let known = self
            .classes
            .iter()
            .position(|class| class.properties == properties);
        known.unwrap_or_else(|| {
            self.classes.push(Class::new(properties));
            self.classes.len() - 1
        })
    }
}
