//! Selection of the host: the best fit by free resources, with a preference for hosts that have the
//! template. The *tightest* host is the one with the smallest free amount that suffices for the
//! sandbox. Of a sandbox that needs processor time and memory, only hosts whose free amounts have
//! the nearest ratio are compared. Other hosts would run out of one resource while the other is
//! free.

use super::class::Class;
use super::entry::HostEntry;
use super::{LOCALITY_DISTANCE, LOCALITY_PERCENT, ORDERS, PlacementError, Scheduler, amounts};
use crate::bucket_index::distance;
use crate::explanation::{Considered, Explanation, MAX_CONSIDERED, Verdict};
use crate::{HostId, PlacementRequest, Resource, TemplateId};

/// If at most this many hosts have a template, all of them are compared. Otherwise only this many
/// of the tightest hosts of each class are checked for the template.
const MAX_SCANNED: usize = 64;

/// Selected host, before its resources are reserved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Selection {
    pub host: HostId,
    /// True if the host has the template.
    pub has_template: bool,
}

impl Scheduler {
    /// Selects the tightest host with room, or a host that has the template, is emptier by at most
    /// [`LOCALITY_PERCENT`] and has a similar ratio ([`LOCALITY_DISTANCE`]).
    pub(super) fn select(&self, request: &PlacementRequest) -> Result<Selection, PlacementError> {
        if let Some(host) = request.volume_host {
            return self.select_volume_host(host, request);
        }
        let order = self.scarce_order(request);
        let has_template = |entry: &HostEntry| {
            request
                .template
                .is_some_and(|template| entry.has_template(template))
        };
        let Some(tightest) = self.tightest(order, request) else {
            return Err(self.error(request));
        };
        if let Some(template) = request.template.filter(|_| !has_template(tightest)) {
            let resource = ORDERS[order];
            let margin =
                u64::from(tightest.spec.capacity.get(resource)) * u64::from(LOCALITY_PERCENT) / 100;
            let limit = u64::from(tightest.free().get(resource)) + margin;
            let furthest = rank(tightest, order, request).0 + LOCALITY_DISTANCE;
            let local = self
                .tightest_with(template, order, request)
                .filter(|local| {
                    let (distance, free) = rank(local, order, request);
                    u64::from(free) <= limit && distance <= furthest
                });
            if let Some(local) = local {
                return Ok(Selection {
                    host: local.id,
                    has_template: true,
                });
            }
        }
        Ok(Selection {
            host: tightest.id,
            has_template: has_template(tightest),
        })
    }

    /// Selects the host of the volumes, if it can run the sandbox.
    fn select_volume_host(
        &self,
        host: HostId,
        request: &PlacementRequest,
    ) -> Result<Selection, PlacementError> {
        let entry = self.entry(host).filter(|entry| {
            let properties = &self.classes[entry.class].properties;
            properties.mismatch(request).is_none() && entry.rejection(request).is_none()
        });
        let entry = entry.ok_or_else(|| self.error(request))?;
        Ok(Selection {
            host,
            has_template: request.template.is_some_and(|t| entry.has_template(t)),
        })
    }

    /// Returns the index in [`ORDERS`] of the resource with the smallest free part in the fleet. Of
    /// one resource, if the sandbox does not need the other.
    fn scarce_order(&self, request: &PlacementRequest) -> usize {
        let needs = |order: usize| request.needs.get(ORDERS[order]) > 0;
        match (needs(0), needs(1)) {
            (true, false) => return 0,
            (false, true) => return 1,
            _ => {}
        }
        // Compares the free parts of both resources, multiplied by both capacities to avoid a
        // division.
        let part = |order: usize| {
            u128::from(self.total_free[order]) * u128::from(self.total_capacity[1 - order])
        };
        usize::from(part(1) < part(0))
    }

    /// Returns the tightest suitable host.
    fn tightest(&self, order: usize, request: &PlacementRequest) -> Option<&HostEntry> {
        if request.requires_template
            && let Some(template) = request.template
        {
            let hosts = self.templates.get(&template)?;
            // If few hosts have the template, compare only these. Otherwise the search below finds
            // one soon: `rejection` also checks for the template.
            if hosts.len() <= MAX_SCANNED {
                return self.tightest_with(template, order, request);
            }
        }
        let candidates = self.classes.iter().filter_map(|class| {
            if class.properties.mismatch(request).is_some() {
                return None;
            }
            candidates(class, order, request).find_map(|number| {
                self.hosts[number as usize]
                    .as_ref()
                    .filter(|e| e.rejection(request).is_none())
            })
        });
        candidates.min_by_key(|entry| rank(entry, order, request))
    }

    /// Returns the tightest suitable host that has the template. If the template is on many hosts,
    /// only the tightest [`MAX_SCANNED`] hosts of each class are considered.
    fn tightest_with(
        &self,
        template: TemplateId,
        order: usize,
        request: &PlacementRequest,
    ) -> Option<&HostEntry> {
        let suitable = |number: u32| {
            let entry = self.hosts[number as usize].as_ref()?;
            let properties = &self.classes[entry.class].properties;
            let is_suitable = entry.has_template(template)
                && entry.rejection(request).is_none()
                && properties.mismatch(request).is_none();
            is_suitable.then_some(entry)
        };
        let rank = |entry: &&HostEntry| rank(entry, order, request);
        let hosts = self.templates.get(&template)?;
        if hosts.len() <= MAX_SCANNED {
            return hosts
                .iter()
                .filter_map(|&number| suitable(number))
                .min_by_key(rank);
        }
        let tightest = self.classes.iter().filter_map(|class| {
            let mut hosts = candidates(class, order, request).take(MAX_SCANNED);
            hosts.find_map(suitable)
        });
        tightest.min_by_key(rank)
    }

    /// Returns why no host was selected.
    fn error(&self, request: &PlacementRequest) -> PlacementError {
        let mut accepting = self
            .hosts
            .iter()
            .flatten()
            .filter(|e| !e.is_draining())
            .peekable();
        if accepting.peek().is_none() {
            return PlacementError::NoHosts;
        }
        let is_match = |class: &super::Class| class.properties.mismatch(request).is_none();
        if self.classes.iter().any(is_match) {
            PlacementError::NoRoom
        } else {
            PlacementError::NoMatch
        }
    }

    /// Explains which host would be selected, and why the other hosts would not. Compares all
    /// hosts; reserves nothing.
    #[must_use]
    pub fn explain(&self, request: &PlacementRequest) -> Explanation {
        let selected = self.select(request);
        let resource = ORDERS[self.scarce_order(request)];
        let mut hosts: Vec<Considered> = self
            .hosts
            .iter()
            .flatten()
            .map(|entry| {
                let mismatch = self.classes[entry.class].properties.mismatch(request);
                let verdict = match mismatch.or_else(|| entry.rejection(request)) {
                    Some(rejection) => Verdict::Rejected(rejection),
                    None if selected.is_ok_and(|s| s.host == entry.id) => Verdict::Selected,
                    None => Verdict::Suitable,
                };
                let has_template = request.template.is_some_and(|t| entry.has_template(t));
                Considered {
                    host: entry.id,
                    free: entry.free(),
                    has_template,
                    verdict,
                }
            })
            .collect();
        let suitable = hosts
            .iter()
            .filter(|host| host.verdict.is_suitable())
            .count();
        let total = hosts.len();
        hosts.sort_by_key(|host| (host.verdict.rank(), host.free.get(resource), host.host));
        hosts.truncate(MAX_CONSIDERED);
        Explanation {
            hosts,
            suitable,
            total,
            resource,
            error: selected.err(),
        }
    }

    /// Returns the resource by which hosts are ordered for a request: the scarcest resource of the
    /// fleet that the sandbox needs.
    #[must_use]
    pub fn scarce_resource(&self, request: &PlacementRequest) -> Resource {
        ORDERS[self.scarce_order(request)]
    }
}

/// Returns the numbers of hosts that may have room for a sandbox, the best ones first.
fn candidates<'a>(
    class: &'a Class,
    order: usize,
    request: &PlacementRequest,
) -> impl Iterator<Item = u32> + use<'a> {
    let (index, needs) = (&class.orders[order], amounts(&request.needs, order));
    // The second search also finds hosts whose ratio does not ensure that they have room.
    index.aligned(needs).chain(index.from(needs))
}

/// Returns the rank of a suitable host: the distance of its ratio from the sandbox's, then its free
/// amount. The lowest rank is the best.
fn rank(entry: &HostEntry, order: usize, request: &PlacementRequest) -> (u32, u32) {
    let free = amounts(&entry.free(), order);
    (distance(free, amounts(&request.needs, order)), free.0)
}
