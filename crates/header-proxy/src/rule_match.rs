//! Finds the header rule that applies to a request.
//!
//! A rule names hosts, and optionally methods and paths, whose requests receive headers.

use crate::request_target::is_ambiguous;
use crate::verdict::Rejection;
use hyper::Method;
use jiffy_api_types::{HeaderRule, HeaderScheme};

/// Returns the first rule for a request to `host`. `None` if no rule applies. `is_tls` states
/// whether the guest uses TLS.
pub(crate) fn rule_for<'a>(
    rules: &'a [HeaderRule],
    host: &str,
    is_tls: bool,
    method: &Method,
    path: &str,
) -> Result<Option<&'a HeaderRule>, Rejection> {
    let scheme = if is_tls {
        HeaderScheme::Https
    } else {
        HeaderScheme::Http
    };
    for rule in rules {
        let applies = rule.names(host)
            && rule.scheme.is_none_or(|wanted| wanted == scheme)
            && (rule.methods.is_empty() || rule.methods.iter().any(|m| m == method.as_str()));
        if !applies {
            continue;
        }
        let Some(wanted) = &rule.path else {
            return Ok(Some(rule));
        };
        if is_ambiguous(path) {
            return Err(Rejection::Invalid(
                "the path is ambiguous: rules of this host match paths",
            ));
        }
        let matches = match wanted.strip_suffix('*') {
            Some(prefix) => path.starts_with(prefix),
            None => path == wanted,
        };
        if matches {
            return Ok(Some(rule));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a rule for `a.example` that `change` has modified.
    fn rule(name: &str, change: impl FnOnce(&mut HeaderRule)) -> HeaderRule {
        let mut rule = HeaderRule {
            name: Some(name.to_owned()),
            host: "a.example".to_owned(),
            ..HeaderRule::default()
        };
        change(&mut rule);
        rule
    }

    #[test]
    fn the_first_rule_whose_conditions_hold_applies() {
        let rules = [
            rule("post", |rule| rule.methods = vec!["POST".to_owned()]),
            rule("plain", |rule| rule.scheme = Some(HeaderScheme::Http)),
            rule("path", |rule| rule.path = Some("/v1/*".to_owned())),
            rule("exact", |rule| rule.path = Some("/v2".to_owned())),
            rule("other", |rule| rule.host = "*.example".to_owned()),
        ];
        let find = |tls, method, path| {
            let found = rule_for(&rules, "a.example", tls, &method, path);
            found.map(|rule| rule.and_then(|rule| rule.name.as_deref()))
        };
        assert_eq!(find(true, Method::POST, "/"), Ok(Some("post")));
        assert_eq!(find(false, Method::GET, "/"), Ok(Some("plain")));
        assert_eq!(find(true, Method::GET, "/v1/x"), Ok(Some("path")));
        assert_eq!(find(true, Method::GET, "/v2"), Ok(Some("exact")));
        assert_eq!(find(true, Method::GET, "/v2/x"), Ok(Some("other")));
        assert!(find(true, Method::GET, "/v1/../admin").is_err());
        assert_eq!(
            rule_for(&rules[..4], "b.example", true, &Method::GET, "/"),
            Ok(None)
        );
    }
}
