//! State of one host in the scheduler: capacity, reported free resources and reservations.

use crate::{HostId, HostReport, HostSpec, PlacementRequest, Rejection, Resources, TemplateId};

/// Properties and state of a host.
#[derive(Debug)]
pub struct HostEntry {
    /// Number of the host in the fleet.
    pub id: HostId,
    /// Properties.
    pub spec: HostSpec,
    /// Index of the host's class in the scheduler's list of classes.
    pub class: usize,
    /// Latest report. Its templates are sorted.
    report: HostReport,
    /// No heartbeat has arrived for some time. The next report ends this.
    is_silent: bool,
    /// Sum of the open reservations.
    reserved: Resources,
}

impl HostEntry {
    /// Creates the entry of a host without reservations.
    pub fn new(id: HostId, spec: HostSpec, class: usize, report: HostReport) -> Self {
        let report = sorted(report);
        Self {
            id,
            spec,
            class,
            report,
            is_silent: false,
            reserved: Resources::default(),
        }
    }

    /// Replaces the report. Returns the templates of the former report if they have changed.
    pub fn replace_report(&mut self, report: HostReport) -> Option<Vec<TemplateId>> {
        self.is_silent = false;
        let before = std::mem::replace(&mut self.report, sorted(report)).templates;
        (before != self.report.templates).then_some(before)
    }

    /// Templates on the host, sorted.
    pub fn templates(&self) -> &[TemplateId] {
        &self.report.templates
    }

    /// Returns whether the host has a template.
    pub fn has_template(&self, template: TemplateId) -> bool {
        self.report.templates.binary_search(&template).is_ok()
    }

    /// Excludes the host from placements until its next report.
    pub fn set_silent(&mut self) {
        self.is_silent = true;
    }

    /// Sets whether the host accepts no new sandboxes.
    pub fn set_draining(&mut self, is_draining: bool) {
        self.report.is_draining = is_draining;
    }

    /// Returns whether the host accepts no new sandboxes.
    pub fn is_draining(&self) -> bool {
        self.report.is_draining
    }

    /// Returns whether the host is in the orders of its class.
    pub fn accepts_sandboxes(&self) -> bool {
        !self.report.is_draining && !self.is_silent
    }

    /// Returns the reported free resources, minus the reserved ones.
    pub fn free(&self) -> Resources {
        self.report.free.minus(&self.reserved)
    }

    /// Reserves resources.
    pub fn reserve(&mut self, needs: &Resources) {
        self.reserved = self.reserved.plus(needs);
    }

    /// Releases reserved resources.
    pub fn release(&mut self, needs: &Resources) {
        self.reserved = self.reserved.minus(needs);
    }

    /// Turns reserved resources into used ones.
    pub fn confirm(&mut self, needs: &Resources) {
        self.release(needs);
        self.report.free = self.report.free.minus(needs);
    }

    /// Returns the first reason for which the host cannot run the sandbox, apart from the
    /// properties of its class. `None` if the host can run it.
    pub fn rejection(&self, request: &PlacementRequest) -> Option<Rejection> {
        // First, because no other change of this host can permit the sandbox.
        if let Some(host) = request.volume_host.filter(|host| *host != self.id) {
            return Some(Rejection::Volumes { host: host.0 });
        }
        if self.report.is_draining {
            return Some(Rejection::Draining);
        }
        if self.is_silent {
            return Some(Rejection::Silent);
        }
        let free = self.free();
        if let Some(resource) = free.missing(&request.needs) {
            let (free, needed) = (free.get(resource), request.needs.get(resource));
            return Some(Rejection::Resource {
                resource,
                free,
                needed,
            });
        }
        if request.needs_store && !self.report.is_store_reachable {
            return Some(Rejection::StoreUnreachable);
        }
        if request.requires_template && request.template.is_some_and(|t| !self.has_template(t)) {
            return Some(Rejection::TemplateMissing);
        }
        request
            .excluded
            .contains(&self.id)
            .then_some(Rejection::Excluded)
    }
}

fn sorted(mut report: HostReport) -> HostReport {
    report.templates.sort_unstable();
    report.templates.dedup();
    report
}
