//! URLs of files that are downloaded without a registry, such as exported templates.

use hyper::Uri;

/// URL of a file on a web server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileUrl {
    /// `host` or `host:port`.
    pub authority: String,
    /// Path and query.
    pub target: String,
}

impl FileUrl {
    /// Parses an `https` URL, or an `http` URL whose authority (`host` or `host:port`) is in
    /// `plain_http`. The error is a message for the caller.
    pub fn parse(text: &str, plain_http: &[String]) -> Result<Self, String> {
        let shown: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
        let uri: Uri = text
            .parse()
            .map_err(|e| format!("`{shown}` is not a URL: {e}"))?;
        let authority = uri.authority().map(|a| a.as_str()).unwrap_or_default();
        let is_plain = |host: &String| host.eq_ignore_ascii_case(authority);
        match uri.scheme_str() {
            Some("https") => {}
            Some("http") if plain_http.iter().any(is_plain) => {}
            _ => return Err(format!("`{shown}` is not an https URL")),
        }
        if authority.contains('@') {
            return Err("the URL has a user name: credentials are not supported".to_owned());
        }
        let target = uri.path_and_query().map_or("/", |p| p.as_str());
        Ok(Self {
            authority: authority.to_owned(),
            target: target.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_https_and_named_hosts_are_accepted() {
        let plain = ["127.0.0.1:8080".to_owned()];
        let parse = |text: &str| FileUrl::parse(text, &plain);
        let url = parse("https://host.example:8443/a/base.tpl?x=1").unwrap();
        assert_eq!(url.authority, "host.example:8443");
        assert_eq!(url.target, "/a/base.tpl?x=1");
        assert_eq!(parse("http://127.0.0.1:8080/a").unwrap().target, "/a");
        for bad in [
            "http://host.example/a",
            "http://127.0.0.1/a",
            "ftp://host.example/a",
            "https://user@host.example/a",
            "/a",
            "https://",
            "",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
