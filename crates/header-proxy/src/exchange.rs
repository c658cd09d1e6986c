//! Requests of one connection from a guest: each is checked, completed with the headers of its
//! rule, and forwarded to the server. A *rule* names hosts, and the headers that their requests
//! receive.

use crate::request_target;
use crate::rule_match::rule_for;
use crate::server_connection::Server;
use crate::verdict::Rejection;
use bytes::Bytes;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::header::{
    ALT_SVC, CONNECTION, CONTENT_LENGTH, EXPECT, HeaderMap, HeaderName, HeaderValue, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::upgrade::OnUpgrade;
use hyper::{Request, Response, StatusCode, Version};
use jiffy_api_types::HeaderRule;
use jiffy_engine_api::{HeaderRules, HeaderUse};
use jiffy_http::headers::{has_token, strip_hop_by_hop};
use jiffy_identity::TokenIssuer;
use jiffy_network::ServerConnector;
use jiffy_secrets::{HeaderTemplate, Secrets, TemplateError};
use parking_lot::Mutex;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Body of a response to the guest.
pub(crate) type ProxyBody = UnsyncBoxBody<Bytes, hyper::Error>;

/// State of the requests of one connection.
pub(crate) struct Exchanges {
    pub secrets: Secrets,
    /// Issuer of identity tokens. `None` if the host has none.
    pub issuer: Option<Arc<TokenIssuer>>,
    pub rules: Arc<HeaderRules>,
    pub owner: String,
    pub connector: Arc<dyn ServerConnector>,
    pub host: String,
    pub is_tls: bool,
    /// The server, or the reason why it cannot be used.
    pub server: Result<Server, Rejection>,
    /// Both ends of an upgraded connection.
    pub upgraded: Mutex<Option<(OnUpgrade, OnUpgrade)>>,
}

/// Headers of a request, and the names of the secrets and identity tokens in them.
struct Added {
    headers: Vec<(HeaderName, HeaderValue)>,
    secrets: Vec<String>,
    tokens: Vec<String>,
}

/// Adds the names that `names` does not contain.
fn add_names<'a>(names: &mut Vec<String>, more: impl Iterator<Item = &'a str>) {
    for name in more {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
}

/// Issues the identity token `name` of the sandbox to which `rules` belong.
fn issue(
    issuer: Option<&TokenIssuer>,
    rules: &HeaderRules,
    name: &str,
) -> Result<Zeroizing<String>, TemplateError> {
    let unknown = || TemplateError::UnknownToken(name.to_owned());
    let workload = rules.workload.as_ref().ok_or_else(unknown)?;
    let token = workload.tokens.get(name).ok_or_else(unknown)?;
    let issuer = issuer.ok_or_else(|| {
        TemplateError::Unreadable("the host no longer issues identity tokens".to_owned())
    })?;
    issuer.token(workload, &token.audience).map_err(|error| {
        // The failure may occur for each request of a guest, so warnings could fill the log.
        tracing::debug!(name, %error, "cannot issue an identity token");
        TemplateError::Unreadable("the host cannot issue identity tokens".to_owned())
    })
}

impl Exchanges {
    fn port(&self) -> u16 {
        if self.is_tls { 443 } else { 80 }
    }

    /// Responds to a request.
    pub async fn answer(&self, request: Request<Incoming>) -> Response<ProxyBody> {
        let method = request.method().as_str().chars().take(16).collect();
        let mut used = HeaderUse {
            method,
            status: 0,
            rule: None,
            secrets: Vec::new(),
            tokens: Vec::new(),
        };
        let mut is_recorded = true;
        let answer = self.forward(request, &mut used, &mut is_recorded).await;
        let response = answer.unwrap_or_else(|rejection| rejection.response());
        used.status = response.status().as_u16();
        if is_recorded {
            self.connector.used(used);
        }
        response
    }

    /// Checks one request, adds the headers of its rule, and forwards it. `used` receives the names
    /// of the rule, the secrets and the tokens, for the record of connections.
    async fn forward(
        &self,
        mut request: Request<Incoming>,
        used: &mut HeaderUse,
        is_recorded: &mut bool,
    ) -> Result<Response<ProxyBody>, Rejection> {
        // The protocol to which the guest wants to switch. The header is read before `prepare`
        // removes it.
        let wants = (request.version() == Version::HTTP_11
            && has_token(request.headers(), &CONNECTION, "upgrade"))
        .then(|| request.headers().get(UPGRADE).cloned())
        .flatten();
        let client = wants.is_some().then(|| hyper::upgrade::on(&mut request));
        let (mut head, body) = request.into_parts();
        request_target::check(&head, &self.host, self.port())?;
        let rule = rule_for(
            &self.rules.rules,
            &self.host,
            self.is_tls,
            &head.method,
            head.uri.path(),
        )?;
        if let Some(rule) = rule {
            used.rule.clone_from(&rule.name);
            *is_recorded = rule.is_recorded();
        }
        // The server is verified before a secret is read.
        let server = self.server.as_ref().map_err(Clone::clone)?;
        let added = match rule {
            Some(rule) => Some(self.resolve(rule).await?),
            None => None,
        };
        prepare(&mut head, wants.as_ref());
        if let Some(added) = added {
            (used.secrets, used.tokens) = (added.secrets, added.tokens);
            for (name, value) in added.headers {
                // Replaces all values that the guest has sent.
                head.headers.insert(name, value);
            }
        }
        let mut answer = server.send(Request::from_parts(head, body)).await?;
        let switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
        let agreed = answer.headers().get(UPGRADE).cloned();
        let upgrade = match (client, agreed) {
            (Some(client), Some(agreed)) if switched => {
                *self.upgraded.lock() = Some((client, hyper::upgrade::on(&mut answer)));
                Some(agreed)
            }
            _ if switched => {
                return Err(Rejection::Server(format!(
                    "{} switched to a protocol that was not requested",
                    self.host
                )));
            }
            _ => None,
        };
        let (mut head, body) = answer.into_parts();
        confine(&mut head.headers, upgrade);
        head.version = Version::default();
        Ok(Response::from_parts(head, body.boxed_unsync()))
    }

    /// Reads the secrets of a rule and issues its identity tokens.
    async fn resolve(&self, rule: &HeaderRule) -> Result<Added, Rejection> {
        let (secrets, owner, is_tls) = (self.secrets.clone(), self.owner.clone(), self.is_tls);
        let (issuer, rules) = (self.issuer.clone(), self.rules.clone());
        let wanted = rule.headers.clone();
        let resolve = move || {
            let mut added = Added {
                headers: Vec::new(),
                secrets: Vec::new(),
                tokens: Vec::new(),
            };
            let issue = |name: &str| issue(issuer.as_deref(), &rules, name);
            for (name, text) in wanted {
                let failed = |why: String| Rejection::Headers(format!("header {name}: {why}"));
                let template = HeaderTemplate::parse_stored(&text);
                let template = template.map_err(|e| failed(e.to_string()))?;
                if !is_tls && template.is_confidential() {
                    return Err(Rejection::Forbidden(
                        "secrets and identity tokens are added to requests over HTTPS only",
                    ));
                }
                let value = template.resolve(&secrets, &owner, issue);
                let value = value.map_err(|e| failed(e.to_string()))?;
                // The value is not part of the errors.
                let invalid = || failed("its name or value is invalid".to_owned());
                let mut value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| invalid())?;
                value.set_sensitive(true);
                let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| invalid())?;
                added.headers.push((parsed, value));
                add_names(&mut added.secrets, template.secrets());
                add_names(&mut added.tokens, template.tokens());
            }
            Ok(added)
        };
        let resolved = tokio::task::spawn_blocking(resolve).await;
        resolved.map_err(|e| Rejection::Headers(e.to_string()))?
    }
}

/// Removes the headers of a request that belong to the guest's connection.
fn prepare(head: &mut Parts, upgrade: Option<&HeaderValue>) {
    let wants_trailers = has_token(&head.headers, &TE, "trailers");
    strip_hop_by_hop(&mut head.headers);
    // The proxy requests the body itself.
    head.headers.remove(EXPECT);
    if wants_trailers {
        head.headers
            .insert(TE, HeaderValue::from_static("trailers"));
    }
    if let Some(protocol) = upgrade {
        let upgrade = HeaderValue::from_static("upgrade");
        head.headers.insert(CONNECTION, upgrade);
        head.headers.insert(UPGRADE, protocol.clone());
    } else if wants_trailers && head.version != Version::HTTP_2 {
        head.headers
            .insert(CONNECTION, HeaderValue::from_static("te"));
    }
    if head.version != Version::HTTP_2 {
        head.version = Version::HTTP_11;
    }
}

/// Removes the headers of a response that belong to the server's connection.
fn confine(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    let is_encoded = headers.contains_key(TRANSFER_ENCODING);
    strip_hop_by_hop(headers);
    if is_encoded {
        // A length that was sent together with a transfer encoding is ambiguous.
        headers.remove(CONTENT_LENGTH);
    }
    // The guest would send requests to the alternative service directly, without the headers of the
    // rule.
    headers.remove(ALT_SVC);
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}
