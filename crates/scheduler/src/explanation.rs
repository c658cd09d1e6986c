//! [`Explanation`]: the hosts that the scheduler considered for a sandbox and the reasons against
//! them, for operators.

use crate::{HostId, Label, PlacementError, Resource, Resources};
use std::fmt;

/// Maximum number of hosts that an explanation lists.
pub const MAX_CONSIDERED: usize = 50;

/// Reason for which a host cannot run a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The host accepts no new sandboxes.
    #[error("draining")]
    Draining,
    /// The host has sent no heartbeat for some time.
    #[error("no recent heartbeat")]
    Silent,
    /// The host lacks an engine.
    #[error("the required engine is not available")]
    Engine,
    /// The host's processor level is too low.
    #[error("the processor level is too low")]
    CpuLevel,
    /// The host lacks processor features.
    #[error("processor features are missing")]
    CpuFeatures,
    /// The host lacks a label.
    #[error("the label {}={} is missing", .0.name, .0.value)]
    Label(Label),
    /// The host lacks free resources.
    #[error("{free} {} of {} free, {needed} required", .resource.unit(), .resource.name())]
    Resource {
        /// The resource.
        resource: Resource,
        /// Free amount.
        free: u32,
        /// Required amount.
        needed: u32,
    },
    /// The host cannot reach the object store.
    #[error("the object store is unreachable from this host")]
    StoreUnreachable,
    /// The host lacks the template, which the request requires.
    #[error("the template is not on this host")]
    TemplateMissing,
    /// The volumes of the sandbox are on another host.
    #[error("the volumes of the sandbox are on h{host}")]
    Volumes {
        /// Number of the host of the volumes.
        host: u32,
    },
    /// The host has rejected the request.
    #[error("rejected by the host")]
    Excluded,
}

/// Result for one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The host is selected.
    Selected,
    /// The host can run the sandbox, but another one is preferred.
    Suitable,
    /// The host cannot run the sandbox.
    Rejected(Rejection),
}

impl Verdict {
    /// Returns whether the host can run the sandbox.
    #[must_use]
    pub fn is_suitable(&self) -> bool {
        !matches!(self, Self::Rejected(_))
    }

    /// Returns the position in an explanation: lower ranks are listed first.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Self::Selected => 0,
            Self::Suitable => 1,
            Self::Rejected(_) => 2,
        }
    }
}

/// A host in an explanation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Considered {
    /// The host.
    pub host: HostId,
    /// Reported free resources, minus the reserved ones.
    pub free: Resources,
    /// The host has the template of the sandbox.
    pub has_template: bool,
    /// Result.
    pub verdict: Verdict,
}

/// Explanation of a placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Hosts, at most [`MAX_CONSIDERED`]: first the selected one, then other suitable ones, then
    /// rejected ones. Within a group, hosts with fewer free resources are first.
    pub hosts: Vec<Considered>,
    /// Number of suitable hosts.
    pub suitable: usize,
    /// Number of hosts.
    pub total: usize,
    /// Resource by which hosts were compared.
    pub resource: Resource,
    /// Error, if no host is selected.
    pub error: Option<PlacementError>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let selected = self
            .hosts
            .iter()
            .find(|host| host.verdict == Verdict::Selected);
        match (selected, self.error) {
            (Some(host), _) => {
                let template = if host.has_template {
                    ", which has the template"
                } else {
                    ""
                };
                let by = self.resource.name();
                write!(
                    f,
                    "h{}{template}: {} of {} hosts have room, compared by {by}",
                    host.host.0, self.suitable, self.total
                )?;
            }
            (None, Some(error)) => write!(f, "no host: {error}")?,
            (None, None) => write!(f, "no host")?,
        }
        for host in &self.hosts {
            if let Verdict::Rejected(rejection) = &host.verdict {
                write!(f, "; h{}: {rejection}", host.host.0)?;
            }
        }
        if self.total > self.hosts.len() {
            write!(f, "; {} further hosts", self.total - self.hosts.len())?;
        }
        Ok(())
    }
}
