//! Network rules that templates give to their sandboxes.

use crate::network::MAX_NETWORK_ENTRIES;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Network rules of a template's sandboxes. A create completes and cannot lift them: its lists
/// replace the lists of the template, but not `allowInternetAccess: false`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct TemplateNetwork {
    /// False if sandboxes of the template reach no public address that `allowOut` does not permit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Default of `network.allowOut`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_NETWORK_ENTRIES))]
    pub allow_out: Vec<String>,
    /// Default of `network.denyOut`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_NETWORK_ENTRIES))]
    pub deny_out: Vec<String>,
    /// Default of `network.dnsServers`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_NETWORK_ENTRIES))]
    pub dns: Vec<String>,
}

impl TemplateNetwork {
    /// Returns whether the template has no rules.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
