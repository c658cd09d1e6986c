//! Validation of header rules in requests. A header rule adds a header with a secret to the
//! requests of a sandbox to one host. The proxy of the host adds the header outside of the guest,
//! which never has the secret. To do so, it terminates TLS with a certificate authority that only
//! this sandbox trusts.
//!
//! An *identity token* is a JSON Web Token by which other services recognise a sandbox. A header
//! rule can add it like a secret.

use crate::app::App;
use crate::error::ApiError;
use crate::lookup::short;
use crate::network::is_name;
use jiffy_api_types::{
    HeaderAudit, HeaderRule, HeaderScheme, IdentityTokens, MAX_HEADER_RULES, MAX_RULE_HEADERS,
    MatchRule, NetworkRule, NetworkRulesByHost, NewNetworkRules,
};
use jiffy_header_proxy::SandboxAuthority;
use jiffy_proto::internal::is_api_host;
use jiffy_sandbox_manager::{HeaderAuthority, SandboxSettings, authorities};
use jiffy_secrets::{HeaderTemplate, SecretError, Secrets, TemplateError};
use std::collections::BTreeMap;

/// Maximum length of the name of a header in bytes.
const MAX_HEADER_NAME: usize = 128;
/// Maximum length of a name or path of a rule in bytes.
const MAX_RULE_TEXT: usize = 1024;
/// Maximum size of the certificate of an authority in bytes.
const MAX_CERTIFICATE: usize = 16 * 1024;
/// Headers that determine where a message is sent and where it ends.
const RESERVED: [&str; 15] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
    "x-forwarded-host",
];
/// Methods of HTTP that rules may name.
const METHODS: [&str; 8] = [
    "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE",
];

fn invalid(message: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(format!("`rules`: {message}"))
}

/// Parses rules of a request in the form of E2B or of CubeSandbox.
pub(crate) fn parse_rules(rules: Option<&NewNetworkRules>) -> Result<Vec<HeaderRule>, ApiError> {
    let Some(rules) = rules.filter(|rules| !rules.is_empty()) else {
        return Ok(Vec::new());
    };
    let rules = if rules.0.is_array() {
        by_match(rules)?
    } else {
        by_host(rules)?
    };
    if rules.len() > MAX_HEADER_RULES {
        return Err(invalid(format!("at most {MAX_HEADER_RULES} are allowed")));
    }
    Ok(rules)
}

impl App {
    /// Checks parsed rules for a sandbox of `owner` with these identity tokens.
    pub(crate) fn header_rules(
        &self,
        owner: Option<&str>,
        rules: Vec<HeaderRule>,
        tokens: &IdentityTokens,
    ) -> Result<Vec<HeaderRule>, ApiError> {
        if rules.is_empty() {
            return Ok(rules);
        }
        let secrets = self.secrets()?;
        let owner = owner.unwrap_or_default();
        rules
            .into_iter()
            .map(|rule| checked(rule, secrets, owner, tokens))
            .collect()
    }

    /// Creates the authority of a sandbox if it will have rules and has no authority.
    pub(crate) fn missing_authority(
        &self,
        settings: &SandboxSettings,
        has_rules: bool,
    ) -> Result<Option<HeaderAuthority>, ApiError> {
        let is_missing = has_rules && settings.header_authority.is_none();
        is_missing.then(|| self.header_authority()).transpose()
    }

    /// Creates the authority of a sandbox whose requests receive headers.
    pub(crate) fn header_authority(&self) -> Result<HeaderAuthority, ApiError> {
        let failed = |e: &dyn std::fmt::Display| ApiError::internal(e.to_string());
        let generated = SandboxAuthority::generate(self.secrets()?.host_key());
        let generated = generated.map_err(|e| failed(&e))?;
        let mut parsed = authorities(&generated.certificate, MAX_CERTIFICATE);
        let certificate = parsed.as_mut().ok().and_then(Vec::pop);
        Ok(HeaderAuthority {
            certificate: certificate.ok_or_else(|| failed(&"the authority has no certificate"))?,
            sealed_key: generated.sealed_key,
        })
    }
}

/// Parses E2B's form. The headers of all entries of a host are added.
fn by_host(rules: &NewNetworkRules) -> Result<Vec<HeaderRule>, ApiError> {
    let hosts: NetworkRulesByHost = serde_json::from_value(rules.0.clone()).map_err(invalid)?;
    let mut all: Vec<HeaderRule> = Vec::new();
    for (host, entries) in hosts {
        if let Some(field) = entries.iter().find_map(NetworkRule::unknown_field) {
            return Err(invalid(format!("unknown field `{}`", short(field))));
        }
        let mut headers = BTreeMap::new();
        let transforms = entries.into_iter().filter_map(|entry| entry.transform);
        for (name, value) in transforms.filter_map(|t| t.headers).flatten() {
            headers.insert(name.to_ascii_lowercase(), value);
        }
        all.push(HeaderRule {
            host,
            headers,
            ..HeaderRule::default()
        });
    }
    // A complete host name takes precedence over a wildcard (`*.`), and a long domain over a short
    // one.
    all.sort_by_key(|rule| {
        (
            rule.host.starts_with("*."),
            std::cmp::Reverse(rule.host.len()),
        )
    });
    Ok(all)
}

/// Parses CubeSandbox's form.
fn by_match(rules: &NewNetworkRules) -> Result<Vec<HeaderRule>, ApiError> {
    let rules: Vec<MatchRule> = serde_json::from_value(rules.0.clone()).map_err(invalid)?;
    rules.into_iter().map(of_match).collect()
}

/// Converts a rule in the form of CubeSandbox. Rejects parts of this form that Jiffy does not
/// support.
fn of_match(rule: MatchRule) -> Result<HeaderRule, ApiError> {
    let unsupported = |what: &str| ApiError::unsupported_option(format!("`rules`: {what}"));
    let (conditions, action) = (rule.conditions, rule.action);
    if !action.allow {
        return Err(unsupported(
            "`allow: false` is not supported: use `allowOut` and `denyOut`, which apply to all \
             connections",
        ));
    }
    let host = match (conditions.host, conditions.sni) {
        (Some(host), Some(sni)) if !host.eq_ignore_ascii_case(&sni) => {
            return Err(invalid("`host` and `sni` of a rule must be equal"));
        }
        (Some(host), _) | (None, Some(host)) => host,
        (None, None) => {
            return Err(unsupported(
                "a rule without `host` is not supported, because it would apply to all hosts",
            ));
        }
    };
    let expected = match conditions.scheme {
        Some(HeaderScheme::Http) => Some(80),
        Some(HeaderScheme::Https) => Some(443),
        None => None,
    };
    if conditions.port.is_some() && conditions.port != expected {
        return Err(unsupported(
            "a port other than 80 for `http` and 443 for `https` is not supported",
        ));
    }
    let audit = match action.audit.as_deref() {
        None | Some("metadata") => HeaderAudit::Metadata,
        Some("none") => HeaderAudit::None,
        Some(_) => {
            return Err(unsupported(
                "`audit` must be `metadata` or `none`: contents of requests are not recorded",
            ));
        }
    };
    let mut headers = BTreeMap::new();
    for inject in action.inject.unwrap_or_default() {
        let value = match inject.format {
            Some(format) => format.replace("${SECRET}", &inject.secret),
            None => inject.secret,
        };
        headers.insert(inject.header.to_ascii_lowercase(), value);
    }
    Ok(HeaderRule {
        name: rule.name,
        host,
        methods: conditions.method.unwrap_or_default(),
        path: conditions.path,
        scheme: conditions.scheme,
        headers,
        audit,
    })
}

/// Checks a rule. Encrypts values without a reference to a secret or an identity token.
fn checked(
    mut rule: HeaderRule,
    secrets: &Secrets,
    owner: &str,
    tokens: &IdentityTokens,
) -> Result<HeaderRule, ApiError> {
    let host = short(&rule.host);
    if !is_name(&rule.host) || is_api_host(&rule.host) {
        return Err(invalid(format!("`{host}` is not a host name or `*.name`")));
    }
    rule.host.make_ascii_lowercase();
    let is_text =
        |text: &String| text.len() <= MAX_RULE_TEXT && !text.chars().any(char::is_control);
    if !rule.name.iter().chain(&rule.path).all(is_text) {
        return Err(invalid(format!("name or path of `{host}` is invalid")));
    }
    if rule
        .path
        .as_ref()
        .is_some_and(|path| !path.starts_with('/'))
    {
        return Err(invalid(format!("the path of `{host}` must begin with `/`")));
    }
    for method in &mut rule.methods {
        method.make_ascii_uppercase();
        if !METHODS.contains(&method.as_str()) {
            let method = short(method);
            return Err(invalid(format!("`{method}` of `{host}` is not a method")));
        }
    }
    if rule.headers.len() > MAX_RULE_HEADERS {
        return Err(invalid(format!(
            "`{host}` has more than {MAX_RULE_HEADERS} headers"
        )));
    }
    for (name, value) in &mut rule.headers {
        if !is_header(name) {
            let name = short(name);
            return Err(invalid(format!(
                "`{name}` of `{host}` is not a header that may be added"
            )));
        }
        let template = HeaderTemplate::parse(value);
        let template = template.map_err(|e| invalid(format!("`{name}` of `{host}`: {e}")))?;
        for secret in template.secrets() {
            // The answer is the same whether or not another key has the secret.
            secrets.get(owner, secret).map_err(|e| match e {
                SecretError::Unknown(_) => invalid(format!("`{name}` of `{host}`: {e}")),
                e => ApiError::from(e),
            })?;
        }
        if let Some(missing) = template.tokens().find(|token| !tokens.contains_key(*token)) {
            let unknown = TemplateError::UnknownToken(short(missing));
            return Err(invalid(format!("`{name}` of `{host}`: {unknown}")));
        }
        if !template.is_confidential() {
            let sealed = HeaderTemplate::seal(secrets.host_key(), owner, value);
            *value = sealed.map_err(|e| ApiError::internal(e.to_string()))?;
        }
    }
    Ok(rule)
}

/// Returns whether `name` is a token (RFC 9110, 5.6.2) that rules may set.
fn is_header(name: &str) -> bool {
    let is_of_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    (1..=MAX_HEADER_NAME).contains(&name.len())
        && name.bytes().all(is_of_token)
        && !RESERVED.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_secrets::NewSecret;
    use serde_json::{Value, json};

    /// Parses rules in either form, with the secret `token` of the owner `a`.
    fn parsed(rules: Value) -> Result<Vec<HeaderRule>, ApiError> {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let new = NewSecret {
            name: "token".to_owned(),
            value: "abc".to_owned().into(),
            metadata: BTreeMap::new(),
        };
        secrets.create("a", &new).unwrap();
        let rules = NewNetworkRules(rules);
        let rules = if rules.0.is_array() {
            by_match(&rules)?
        } else {
            by_host(&rules)?
        };
        let all = rules
            .into_iter()
            .map(|rule| checked(rule, &secrets, "a", &IdentityTokens::new()));
        all.collect()
    }

    #[test]
    fn rules_of_e2b_and_of_cubesandbox_are_equal() {
        let reference = "Bearer ${e2b.secrets.token}";
        let e2b = json!({ "A.example": [{ "transform": { "headers": { "Authorization": reference } } }] });
        let cube = json!([{
            "match": { "host": "a.example" },
            "action": { "allow": true, "inject": [{
                "header": "authorization", "secret": "${e2b.secrets.token}",
                "format": "Bearer ${SECRET}",
            }] },
        }]);
        let rules = parsed(e2b).unwrap();
        assert_eq!(rules, parsed(cube).unwrap());
        assert_eq!(rules[0].headers["authorization"], reference);
    }

    #[test]
    fn values_without_secrets_are_encrypted_and_not_shown() {
        let rule = json!([{ "name": "r", "match": { "sni": "a.example", "method": ["get"] },
            "action": { "allow": true, "audit": "none",
                "inject": [{ "header": "x-key", "secret": "literal" }] } }]);
        let rules = parsed(rule).unwrap();
        let stored = serde_json::to_string(&rules).unwrap();
        assert!(!stored.contains("literal"), "{stored}");
        assert_eq!(rules[0].masked().headers["x-key"], "***");
        assert_eq!(rules[0].methods, ["GET"]);
        assert!(!rules[0].is_recorded());
    }

    #[test]
    fn invalid_rules_are_rejected() {
        let headers = |name: &str, value: &str| {
            let transform = json!({ "headers": { name: value } });
            json!({ "a.example": [{ "transform": transform }] })
        };
        let cube =
            |conditions: Value, action: Value| json!([{ "match": conditions, "action": action }]);
        let allow = json!({ "allow": true });
        let host = json!({ "host": "a.example" });
        for bad in [
            headers("a b", "x"),
            headers("", "x"),
            headers("a:", "x"),
            headers("Host", "x"),
            headers("Content-Length", "1"),
            headers("transfer-encoding", "chunked"),
            headers("connection", "x"),
            headers("x\r\ny", "x"),
            headers("x", "a\r\nb: c"),
            headers("x", "a\0"),
            headers("x", "${e2b.secrets.missing}"),
            headers("x", "${e2b.identity.tokens.a}"),
            headers("x", &"a".repeat(2049)),
            json!({ "1.2.3.4": [{ "transform": { "headers": {} } }] }),
            json!({ "a..b": [] }),
            json!({ "api.jiffy.internal": [] }),
            json!({ "a.example": [{ "other": 1 }] }),
            json!("text"),
            cube(json!({}), allow.clone()),
            cube(host.clone(), json!({ "allow": false })),
            cube(host.clone(), json!({ "allow": true, "audit": "full" })),
            cube(
                json!({ "host": "a.example", "sni": "b.example" }),
                allow.clone(),
            ),
            cube(
                json!({ "host": "a.example", "port": 8443, "scheme": "https" }),
                allow.clone(),
            ),
            cube(
                json!({ "host": "a.example", "method": ["CONNECT"] }),
                allow.clone(),
            ),
            cube(json!({ "host": "a.example", "path": "x" }), allow.clone()),
            cube(json!({ "host": "a.example", "unknown": 1 }), allow),
        ] {
            let error = parsed(bad.clone()).unwrap_err();
            assert_eq!(error.status.as_u16(), 400, "{bad}");
        }
    }
}
