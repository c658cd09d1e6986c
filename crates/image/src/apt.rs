//! Sources of Debian packages for builds: the mirror and proxy that a Debian host uses, else the
//! public archive.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns the one-line sources (sources.list(5)) of a Debian release for use during a build.
pub(crate) fn build_sources(suite: &str) -> Vec<String> {
    let found: Vec<String> = source_files(Path::new("/etc/apt"))
        .iter()
        .filter_map(|path| {
            let text = fs::read_to_string(path).ok()?;
            Some(if path.extension().is_some_and(|e| e == "sources") {
                stanzas(&text)
            } else {
                lines(&text)
            })
        })
        .flatten()
        .filter(|source| source.is_debian() && source.suites.iter().any(|s| is_suite_of(s, suite)))
        .flat_map(|source| source.for_release(suite))
        .collect();
    // The host's sources suffice only if one of them has the release itself, not only its updates.
    // The third word of a line is the suite.
    if found
        .iter()
        .any(|line| line.split(' ').nth(2) == Some(suite))
    {
        found
    } else {
        public_sources(suite)
    }
}

/// Returns the public archive with updates and security fixes, which sandboxes use.
pub(crate) fn public_sources(suite: &str) -> Vec<String> {
    vec![
        format!("deb http://deb.debian.org/debian {suite} main"),
        format!("deb http://deb.debian.org/debian {suite}-updates main"),
        format!("deb http://deb.debian.org/debian-security {suite}-security main"),
    ]
}

/// Returns the transport options of the host's apt, such as a proxy, as apt.conf(5) lines.
pub(crate) fn host_options() -> Vec<String> {
    let dump = Command::new("apt-config")
        .arg("dump")
        .stdin(Stdio::null())
        .output();
    // A host without apt has no options.
    let dump = dump
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    dump.lines()
        .filter(|line| is_transport_option(line))
        .map(str::to_owned)
        .collect()
}

/// Returns whether a line of `apt-config dump` concerns connections or dates. Other options could
/// run programs, or weaken the verification of the packages' signatures.
fn is_transport_option(line: &str) -> bool {
    let Some((key, value)) = line.split_once(' ') else {
        return false;
    };
    let key = key.to_ascii_lowercase();
    // This option is the path of a program that prints the proxy.
    if key.contains("proxy-auto-detect") {
        return false;
    }
    let is_listed = [
        "acquire::retries",
        "acquire::check-valid-until",
        "acquire::check-date",
    ]
    .contains(&key.as_str())
        || ["acquire::http::", "acquire::https::"]
            .iter()
            .any(|prefix| {
                key.strip_prefix(prefix).is_some_and(|rest| {
                    ["proxy", "timeout", "cainfo", "verify"]
                        .iter()
                        .any(|k| rest.starts_with(k))
                })
            });
    // An option with an empty value is unset.
    is_listed && value != "\"\";"
}

/// Returns the paths of `sources.list` and of the files in `sources.list.d`.
fn source_files(apt: &Path) -> Vec<PathBuf> {
    let mut files = vec![apt.join("sources.list")];
    if let Ok(entries) = fs::read_dir(apt.join("sources.list.d")) {
        let mut parts: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        parts.retain(|path| {
            path.extension()
                .is_some_and(|e| e == "list" || e == "sources")
        });
        // The order of directory entries is arbitrary.
        parts.sort();
        files.append(&mut parts);
    }
    files
}

/// A source of packages. Several suites and URIs can share an entry.
#[derive(Debug, Default, PartialEq, Eq)]
struct AptSource {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

impl AptSource {
    /// Returns whether this is Debian's own archive or a mirror of it. Third-party packages are not
    /// used.
    fn is_debian(&self) -> bool {
        // A source without `signed-by` is verified with apt's default keys.
        let signed = self
            .signed_by
            .as_deref()
            .is_none_or(|key| key.contains("debian-archive"));
        signed
            && self.components.iter().any(|c| c == "main")
            && self.uris.iter().any(|uri| is_archive(uri))
    }

    /// Returns the source as one-line entries for a release.
    fn for_release(&self, suite: &str) -> Vec<String> {
        let suites: Vec<&String> = self
            .suites
            .iter()
            .filter(|s| is_suite_of(s, suite))
            .collect();
        let uris = self.uris.iter().filter(|uri| is_archive(uri));
        uris.flat_map(|uri| suites.iter().map(move |s| format!("deb {uri} {s} main")))
            .collect()
    }
}

fn is_archive(uri: &str) -> bool {
    let path = uri.trim_end_matches('/');
    (uri.starts_with("http://") || uri.starts_with("https://"))
        && (path.ends_with("/debian") || path.ends_with("/debian-security"))
}

/// Returns whether `candidate` is the release itself, its updates or its security fixes.
fn is_suite_of(candidate: &str, suite: &str) -> bool {
    let rest = candidate.strip_prefix(suite);
    rest.is_some_and(|rest| ["", "-updates", "-security"].contains(&rest))
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Parses the one-line format: `deb [option=value ...] uri suite component...`.
fn lines(text: &str) -> Vec<AptSource> {
    let entries = text
        .lines()
        // Sources of source packages begin with `deb-src` and are skipped.
        .filter_map(|line| line.split('#').next()?.trim().strip_prefix("deb "));
    entries
        .filter_map(|entry| {
            let entry = entry.trim();
            let (options, rest) = match entry.strip_prefix('[') {
                Some(inner) => inner.split_once(']')?,
                None => ("", entry),
            };
            let signed_by = options
                .split_whitespace()
                .find_map(|o| o.strip_prefix("signed-by="))
                .map(str::to_owned);
            let mut words = words(rest).into_iter();
            let (uri, suite) = (words.next()?, words.next()?);
            Some(AptSource {
                uris: vec![uri],
                suites: vec![suite],
                components: words.collect(),
                signed_by,
            })
        })
        .collect()
}

/// Parses the deb822 format: stanzas of `Field: value` lines, separated by empty lines.
/// Indented lines continue the value of the field above.
fn stanzas(text: &str) -> Vec<AptSource> {
    let without_comments: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let stanzas = without_comments.split(|line| line.trim().is_empty());
    stanzas.filter_map(stanza).collect()
}

/// Parses a stanza of a `.sources` file (sources.list(5)). `None` if the host does not use it for
/// binary packages.
fn stanza(lines: &[&str]) -> Option<AptSource> {
    let mut source = AptSource::default();
    let mut is_binary = false;
    let mut fields: Vec<(&str, String)> = Vec::new();
    for line in lines {
        if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                *value += "\n";
                *value += line;
            }
        } else if let Some((field, value)) = line.split_once(':') {
            fields.push((field, value.to_owned()));
        }
    }
    for (field, value) in &fields {
        match field.to_ascii_lowercase().as_str() {
            "types" => is_binary = value.split_whitespace().any(|kind| kind == "deb"),
            "uris" => source.uris = words(value),
            "suites" => source.suites = words(value),
            "components" => source.components = words(value),
            // An embedded key has several lines. It is no path, so the source is not Debian's.
            "signed-by" => source.signed_by = Some(value.trim().to_owned()),
            // The host does not use this source.
            "enabled" if value.trim().eq_ignore_ascii_case("no") => return None,
            _ => {}
        }
    }
    // Sources of source packages only are skipped.
    is_binary.then_some(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED: &str = "\
# Debian mirror
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: https://packages.example/debian
Suites: bookworm
Components: main
Signed-By: /etc/apt/keyrings/example.gpg

Enabled: no
Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
";

    fn usable(sources: Vec<AptSource>) -> Vec<String> {
        sources
            .iter()
            .filter(|s| s.is_debian())
            .flat_map(|s| s.for_release("bookworm"))
            .collect()
    }

    #[test]
    fn only_debians_own_archive_is_taken_from_stanzas() {
        let expected = [
            "deb http://mirror.example/debian bookworm main",
            "deb http://mirror.example/debian bookworm-updates main",
        ];
        assert_eq!(usable(stanzas(MIXED)), expected);
    }

    #[test]
    fn fields_may_have_several_lines() {
        let text = "\
Types:
 deb
URIs: http://mirror.example/debian
Suites: bookworm
# comment
\tbookworm-updates
Components: main
";
        let expected = [
            "deb http://mirror.example/debian bookworm main",
            "deb http://mirror.example/debian bookworm-updates main",
        ];
        assert_eq!(usable(stanzas(text)), expected);
        let embedded = text.replace("Components", "Signed-By:\n -----BEGIN KEY\n .\nComponents");
        assert!(usable(stanzas(&embedded)).is_empty());
    }

    #[test]
    fn only_debians_own_archive_is_taken_from_lines() {
        let text = "\
deb http://mirror.example/debian/ bookworm main non-free # comment
deb-src http://mirror.example/debian/ bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/cloud.gpg] https://cloud.example/debian bookworm main
deb cdrom:[Debian] bookworm main
deb https://tools.example/apt bookworm main
deb http://mirror.example/debian trixie main
";
        assert_eq!(
            usable(lines(text)),
            ["deb http://mirror.example/debian/ bookworm main"]
        );
    }

    #[test]
    fn only_transport_options_of_the_hosts_apt_are_kept() {
        assert!(is_transport_option(
            r#"Acquire::http::Proxy "http://proxy.example:3128";"#
        ));
        assert!(is_transport_option(
            r#"Acquire::http::Proxy::deb.debian.org "DIRECT";"#
        ));
        assert!(is_transport_option(
            r#"Acquire::Check-Valid-Until "false";"#
        ));
        assert!(!is_transport_option(r#"Acquire::http::Proxy "";"#));
        assert!(!is_transport_option(
            r#"Acquire::http::Proxy-Auto-Detect "/usr/bin/find-proxy";"#
        ));
        assert!(!is_transport_option(
            r#"Acquire::AllowInsecureRepositories "1";"#
        ));
        assert!(!is_transport_option(
            r#"DPkg::Post-Invoke:: "rm -f /var/cache/apt/archives/*.deb";"#
        ));
    }
}
