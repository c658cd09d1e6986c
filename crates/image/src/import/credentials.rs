//! Credentials for registries, from the environment or from Docker's configuration.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_registry_pull::Credentials;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Key of the entry for Docker Hub in Docker's configuration.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";

/// Docker's `config.json`: credentials by registry, and programs that store credentials.
#[derive(Default, Deserialize)]
#[serde(default)]
struct DockerConfig {
    auths: BTreeMap<String, DockerAuth>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
    #[serde(rename = "credHelpers")]
    helpers: BTreeMap<String, String>,
}

/// Credentials for a registry: user and password in base64, or in two fields.
#[derive(Default, Deserialize)]
#[serde(default)]
struct DockerAuth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
}

/// Output of a credential helper.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperOutput {
    username: String,
    secret: String,
}

/// User name and password.
type UserPassword = (String, String);
/// Function that requests credentials: its arguments are the helper and the key of the registry.
type HelperFn = dyn Fn(&str, &str) -> Option<UserPassword>;

/// Returns the credentials for `registry`: `JIFFY_REGISTRY_USER` and `JIFFY_REGISTRY_PASSWORD` if
/// set, else the credentials of `docker login`.
pub(super) fn find(registry: &str) -> Option<Credentials> {
    let var = |name| env::var(name).ok().filter(|v| !v.is_empty());
    if let (Some(user), Some(password)) =
        (var("JIFFY_REGISTRY_USER"), var("JIFFY_REGISTRY_PASSWORD"))
    {
        return Some(Credentials { user, password });
    }
    let docker = var("DOCKER_CONFIG").map(PathBuf::from);
    let docker = docker.or_else(|| var("HOME").map(|home| PathBuf::from(home).join(".docker")));
    let text = docker.and_then(|d| std::fs::read(d.join("config.json")).ok());
    let config: Option<DockerConfig> = text.and_then(|t| serde_json::from_slice(&t).ok());
    let found = config.and_then(|config| config.credentials(registry, &run_helper));
    found.map(|(user, password)| Credentials { user, password })
}

impl DockerConfig {
    /// Returns the credentials for a registry: from a helper program if one is configured,
    /// otherwise from the entries of the file.
    fn credentials(&self, registry: &str, run_helper: &HelperFn) -> Option<UserPassword> {
        let hub = ["docker.io", "index.docker.io", "registry-1.docker.io"].contains(&registry);
        let key = if hub { DOCKER_HUB } else { registry };
        if let Some(helper) = self.helpers.get(key).or(self.store.as_ref())
            && let Some(found) = run_helper(helper, key)
        {
            return Some(found);
        }
        // Keys of `auths` are host names, or URLs in older configurations.
        let named = |url: &str| {
            let host = url
                .trim_start_matches("https://")
                .trim_start_matches("http://");
            url == key || (!hub && host.split('/').next() == Some(registry))
        };
        let (_, auth) = self.auths.iter().find(|(url, _)| named(url))?;
        if let (Some(user), Some(password)) = (&auth.username, &auth.password) {
            return Some((user.clone(), password.clone()));
        }
        let decoded = STANDARD.decode(auth.auth.as_deref()?).ok()?;
        let decoded = String::from_utf8(decoded).ok()?;
        let (user, password) = decoded.split_once(':')?;
        Some((user.to_owned(), password.to_owned()))
    }
}

/// Runs `docker-credential-<helper> get`, which reads the name of the registry and prints JSON.
fn run_helper(helper: &str, registry: &str) -> Option<UserPassword> {
    use std::io::Write;
    // `helper` becomes the end of a program name, which a slash would turn into a path.
    if helper.is_empty() || helper.contains('/') {
        return None;
    }
    let mut child = Command::new(format!("docker-credential-{helper}"))
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    // Ignore the error: a helper may print its response without reading its input. Dropping the
    // pipe closes the input.
    drop(
        child
            .stdin
            .take()
            .map(|mut input| input.write_all(registry.as_bytes())),
    );
    let output = child.wait_with_output().ok()?;
    let helped: HelperOutput = serde_json::from_slice(&output.stdout).ok()?;
    // With the user name `<token>`, the secret is an identity token, whose protocol the puller does
    // not support.
    (output.status.success() && helped.username != "<token>")
        .then_some((helped.username, helped.secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_of_docker_login_are_found_for_their_host_only() {
        // The values of `auth` are `a:b`, `user:p:w1` and `c:d` in Base64.
        let text = r#"{"auths":{"https://index.docker.io/v1/":{"auth":"YTpi"},
            "reg.example:5000":{"auth":"dXNlcjpwOncx"},"https://old.example/v2/":{"auth":"Yzpk"},
            "bad.example":{"auth":"%%%"},"helped.example":{}},
            "credHelpers":{"helped.example":"test"}}"#;
        let config: DockerConfig = serde_json::from_str(text).unwrap();
        let ask = |helper: &str, host: &str| {
            assert_eq!((helper, host), ("test", "helped.example"));
            Some(("h".to_owned(), "s".to_owned()))
        };
        let of = |host| config.credentials(host, &ask);
        let pair = |a: &str, b: &str| Some((a.to_owned(), b.to_owned()));
        assert_eq!(of("docker.io"), pair("a", "b"));
        assert_eq!(of("index.docker.io"), pair("a", "b"));
        assert_eq!(of("reg.example:5000"), pair("user", "p:w1"));
        assert_eq!(of("old.example"), pair("c", "d"));
        assert_eq!(of("helped.example"), pair("h", "s"));
        assert_eq!(of("bad.example"), None);
        assert_eq!(of("reg.example"), None);
    }
}
