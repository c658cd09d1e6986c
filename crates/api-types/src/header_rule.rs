//! Headers that the host adds to requests of a sandbox.

use crate::parts::is_empty;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Maximum number of rules of a sandbox.
pub const MAX_HEADER_RULES: usize = 64;
/// Maximum number of headers of a rule.
pub const MAX_RULE_HEADERS: usize = 32;
/// Value that is shown instead of an encrypted one.
const MASK: &str = "***";
/// Beginning of a value that the host has encrypted.
const SEALED: &str = "${jiffy.sealed.";

/// Scheme of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HeaderScheme {
    /// Without TLS.
    Http,
    /// With TLS.
    Https,
}

/// Record of the requests to which a rule applies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HeaderAudit {
    /// Host, method, status and names of secrets are recorded.
    #[default]
    Metadata,
    /// Requests are not recorded.
    None,
}

/// Headers that are added to requests to a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HeaderRule {
    /// Name of the rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Host, or `*.` and a host for all names below it.
    pub host: String,
    /// Methods. Empty for all methods.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// Path. `*` at its end stands for any text. All paths if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Scheme. Both schemes if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheme: Option<HeaderScheme>,
    /// Headers by name. Values without a reference to a secret are shown as `***`.
    pub headers: BTreeMap<String, String>,
    /// Record of the requests.
    pub audit: HeaderAudit,
}

impl HeaderRule {
    /// Returns whether the rule is for requests to `host`.
    #[must_use]
    pub fn names(&self, host: &str) -> bool {
        match self.host.strip_prefix("*.") {
            None => self.host.eq_ignore_ascii_case(host),
            Some(domain) => {
                // The name has at least one label before the domain.
                let at = host.len().checked_sub(domain.len() + 1);
                at.filter(|at| *at > 0).is_some_and(|at| {
                    let (label, rest) = (host.as_bytes().get(at), host.get(at + 1..));
                    label == Some(&b'.')
                        && rest.is_some_and(|rest| rest.eq_ignore_ascii_case(domain))
                })
            }
        }
    }

    /// Returns whether requests to which the rule applies are recorded.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.audit != HeaderAudit::None
    }

    /// Returns the rule without encrypted values.
    #[must_use]
    pub fn masked(&self) -> Self {
        let mut rule = self.clone();
        for value in rule.headers.values_mut() {
            if value.starts_with(SEALED) {
                MASK.clone_into(value);
            }
        }
        rule
    }
}

/// Headers of a rule in E2B's form.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NetworkTransform {
    /// Headers by name. `${e2b.secrets.NAME}` in a value stands for a secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
    /// Fields that this version does not know. They are rejected.
    #[serde(flatten)]
    #[schemars(skip)]
    pub unknown: BTreeMap<String, Value>,
}

/// Rule of a host in E2B's form.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NetworkRule {
    /// Change of requests to the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transform: Option<NetworkTransform>,
    /// Fields that this version does not know. They are rejected.
    #[serde(flatten)]
    #[schemars(skip)]
    pub unknown: BTreeMap<String, Value>,
}

impl NetworkRule {
    /// Returns the name of a field that this version does not know.
    #[must_use]
    pub fn unknown_field(&self) -> Option<&str> {
        let of_transform = self.transform.iter().flat_map(|t| t.unknown.keys());
        self.unknown
            .keys()
            .chain(of_transform)
            .next()
            .map(String::as_str)
    }
}

/// Rules by host in E2B's form.
pub type NetworkRulesByHost = BTreeMap<String, Vec<NetworkRule>>;

/// Returns rules in E2B's form, without encrypted values.
#[must_use]
pub fn rules_by_host(rules: &[HeaderRule]) -> NetworkRulesByHost {
    let mut hosts = NetworkRulesByHost::new();
    for rule in rules.iter().map(HeaderRule::masked) {
        let transform = NetworkTransform {
            headers: Some(rule.headers),
            ..NetworkTransform::default()
        };
        let rule_of_host = NetworkRule {
            transform: Some(transform),
            ..NetworkRule::default()
        };
        hosts.entry(rule.host).or_default().push(rule_of_host);
    }
    hosts
}

/// Conditions of a rule in CubeSandbox's form.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleMatch {
    /// TLS server name. It must be equal to the host.
    pub sni: Option<String>,
    /// Host.
    pub host: Option<String>,
    /// Methods.
    pub method: Option<Vec<String>>,
    /// Path.
    pub path: Option<String>,
    /// Scheme.
    pub scheme: Option<HeaderScheme>,
    /// Port.
    pub port: Option<u16>,
}

/// Header of a rule in CubeSandbox's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleInject {
    /// Name of the header.
    pub header: String,
    /// Value, or a reference to a secret.
    pub secret: String,
    /// Text in which `${SECRET}` stands for the value.
    #[serde(default)]
    pub format: Option<String>,
}

/// Action of a rule in CubeSandbox's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleAction {
    /// Must be true.
    pub allow: bool,
    /// Headers.
    #[serde(default)]
    pub inject: Option<Vec<RuleInject>>,
    /// Record of the requests.
    #[serde(default)]
    pub audit: Option<String>,
}

/// Rule in CubeSandbox's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatchRule {
    /// Name.
    #[serde(default)]
    pub name: Option<String>,
    /// Conditions.
    #[serde(rename = "match")]
    pub conditions: RuleMatch,
    /// Action.
    pub action: RuleAction,
}

/// Rules of a request: an object in E2B's form, or a list in CubeSandbox's form.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NewNetworkRules(pub Value);

impl NewNetworkRules {
    /// Returns whether there are no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        is_empty(&self.0)
    }
}

impl JsonSchema for NewNetworkRules {
    fn schema_name() -> Cow<'static, str> {
        "NewNetworkRules".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let headers = json!({
            "type": "object", "maxProperties": 4,
            "description": "Headers by name. `${e2b.secrets.NAME}` in a value stands for a secret.",
            "propertyNames": { "pattern": "^x-[a-z]{1,20}$" },
            "additionalProperties": { "type": "string", "pattern": "^[a-zA-Z0-9]{0,40}$" },
        });
        let transform = json!({
            "type": "object", "properties": { "headers": headers },
            "description": "Change of requests to the host",
        });
        let rule = json!({ "type": "object", "properties": { "transform": transform } });
        json_schema!({
            "description": "Headers that the host adds to requests, by host in E2B's form. \
                CubeSandbox's form, a list of rules, is accepted too.",
            "type": "object",
            "maxProperties": 2,
            "propertyNames": { "pattern": "^[a-z]{1,10}\\.example$" },
            "additionalProperties": { "type": "array", "items": rule, "maxItems": 2 },
        })
    }
}
