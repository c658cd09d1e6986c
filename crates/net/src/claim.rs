//! Which data directory of this machine has which range of addresses. Several daemons share a host, those of tests for example.
//!
//! A claim is a file, and a blackhole route of the range in the host: other programs that look for a free range see it, and packets to a
//! sandbox that is gone do not leave the host.

use crate::NetError;
use crate::namespace;
use crate::program;
use ipnet::Ipv4Net;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where ranges are looked for first: set aside for benchmarks of networks (RFC 2544), so in use nowhere.
const FIRST: (Ipv4Addr, u8) = (Ipv4Addr::new(198, 18, 0, 0), 15);
/// And then, if all of that is taken.
const SECOND: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 224, 0, 0), 11);

/// Held while claims are made and given up. One file for each network namespace that daemons run in.
pub(crate) struct Claims {
    directory: PathBuf,
    _lock: Flock<File>,
}

/// What one data directory has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// The data directory.
    pub home: PathBuf,
    /// Its addresses.
    pub range: Ipv4Net,
}

/// Six digits for a data directory.
pub(crate) fn tag(home: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let home = fs::canonicalize(home).unwrap_or_else(|_| home.to_owned());
    let digest = Sha256::digest(home.as_os_str().as_bytes());
    digest.iter().take(3).map(|b| format!("{b:02x}")).collect()
}

impl Claims {
    /// Waits for others that are at it.
    pub fn lock() -> Result<Self, NetError> {
        let failed =
            |what: &Path| NetError::host(format!("claims on addresses in {}", what.display()));
        let namespace = Path::new("/proc/thread-self/ns/net");
        let inode = fs::metadata(namespace).map_err(failed(namespace))?.ino();
        let directory = namespace::place().join(inode.to_string());
        fs::create_dir_all(&directory).map_err(failed(&directory))?;
        let path = directory.join("lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(failed(&path))?;
        let lock =
            Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| failed(&path)(e.into()))?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }

    /// All claims, by tag.
    pub fn all(&self) -> Vec<(String, Claim)> {
        let Ok(entries) = fs::read_dir(&self.directory) else {
            return Vec::new();
        };
        let names = entries.filter_map(|e| e.ok()?.file_name().into_string().ok());
        names
            .filter_map(|name| {
                let tag = name.strip_suffix(".json")?.to_owned();
                Some((tag.clone(), self.read(&tag)?))
            })
            .collect()
    }

    fn path(&self, tag: &str) -> PathBuf {
        self.directory.join(format!("{tag}.json"))
    }

    /// Another file beside the claims.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn read(&self, tag: &str) -> Option<Claim> {
        serde_json::from_slice(&fs::read(self.path(tag)).ok()?).ok()
    }

    /// The range of `tag`, its own of before if that is as long as it has to be.
    pub fn make(
        &self,
        tag: &str,
        home: &Path,
        wanted: Option<Ipv4Net>,
        length: u8,
    ) -> Result<Ipv4Net, NetError> {
        if let Some(before) = self.read(tag) {
            let fits = match wanted {
                Some(wanted) => before.range == wanted,
                None => before.range.prefix_len() <= length,
            };
            if fits {
                // It may be gone with the file's writer in between.
                let _ = program::ip(&[blackhole("add", before.range)]);
                return Ok(before.range);
            }
            self.give_up(tag);
        }
        self.remove_stray_routes();
        let routes = routes()?;
        let taken = |range: &Ipv4Net| routes.iter().find(|r| overlap(r, range));
        let range = match wanted {
            Some(range) => match taken(&range) {
                Some(with) => {
                    return Err(NetError::RangeTaken {
                        range: range.to_string(),
                        with: with.to_string(),
                    });
                }
                None => range,
            },
            None => candidates(length)
                .find(|range| taken(range).is_none())
                .ok_or(NetError::NoRange)?,
        };
        program::ip(&[blackhole("add", range)])?;
        let claim = Claim {
            home: home.to_owned(),
            range,
        };
        let path = self.path(tag);
        let text = serde_json::to_vec(&claim).map_err(|e| NetError::Unable(e.to_string()))?;
        fs::write(&path, text).map_err(NetError::host(format!("writing {}", path.display())))?;
        Ok(range)
    }

    /// Removes routes of claims whose file is gone: their ranges would be taken for ever.
    fn remove_stray_routes(&self) {
        let text = program::run("ip", &["-4", "route", "show", "type", "blackhole"], "");
        let claimed: Vec<Ipv4Net> = self.all().iter().map(|(_, claim)| claim.range).collect();
        for line in text.unwrap_or_default().lines() {
            let own = line.trim_end().ends_with(&format!("metric {METRIC}"));
            let stray = destination(line).filter(|range| own && !claimed.contains(range));
            if let Some(range) = stray {
                // One that is gone meanwhile is as it should be.
                let _ = program::ip(&[blackhole("del", range)]);
            }
        }
    }

    /// Takes the claim of `tag` back; what lay in it must be gone.
    pub fn give_up(&self, tag: &str) {
        if let Some(claim) = self.read(tag) {
            // Nothing to do if it is gone.
            let _ = program::ip(&[blackhole("del", claim.range)]);
        }
        let _ = fs::remove_file(self.path(tag));
    }
}

/// Any route of somebody else is preferred to ours, and no other program's has this metric.
const METRIC: u32 = 4_294_967;

fn blackhole(verb: &str, range: Ipv4Net) -> String {
    format!("route {verb} blackhole {range} metric {METRIC}")
}

fn overlap(a: &Ipv4Net, b: &Ipv4Net) -> bool {
    a.contains(b) || b.contains(a)
}

/// Ranges of that prefix length, in the order in which they are tried.
fn candidates(length: u8) -> impl Iterator<Item = Ipv4Net> {
    [FIRST, SECOND]
        .into_iter()
        .flat_map(move |(address, prefix)| {
            let whole = Ipv4Net::new_assert(address, prefix);
            whole.subnets(length.max(prefix)).into_iter().flatten()
        })
}

/// Where the host has routes to, in all its tables; the default route leads everywhere and does not count.
fn routes() -> Result<Vec<Ipv4Net>, NetError> {
    let text = program::run("ip", &["-4", "route", "show", "table", "all"], "")?;
    Ok(text.lines().filter_map(destination).collect())
}

/// The destination in a line of `ip route`, which may begin with the route's type.
fn destination(line: &str) -> Option<Ipv4Net> {
    let mut words = line.split_whitespace();
    words
        .find_map(|word| {
            let net = word.parse::<Ipv4Net>().ok();
            net.or_else(|| word.parse::<Ipv4Addr>().ok().map(Ipv4Net::from))
                .or_else(|| (word == "default").then(Ipv4Net::default))
        })
        .filter(|net| net.prefix_len() > 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_route_is_known_by_its_destination() {
        let net = |text: &str| Some(text.parse::<Ipv4Net>().unwrap());
        assert_eq!(destination("default via 10.0.0.1 dev eth0"), None);
        assert_eq!(
            destination("10.1.0.0/16 dev x src 10.1.0.2"),
            net("10.1.0.0/16")
        );
        assert_eq!(destination("blackhole 198.18.0.0/19"), net("198.18.0.0/19"));
        assert_eq!(destination("local 127.0.0.1 dev lo"), net("127.0.0.1/32"));
    }

    #[test]
    fn ranges_are_tried_one_beside_the_other() {
        let all: Vec<Ipv4Net> = candidates(19).collect();
        assert_eq!(all.len(), 16 + 256);
        assert_eq!(all[1].to_string(), "198.18.32.0/19");
        assert!(
            all.iter()
                .enumerate()
                .all(|(i, a)| all[..i].iter().all(|b| !overlap(a, b)))
        );
    }

    #[test]
    fn a_data_directory_has_one_tag() {
        let tag = tag(Path::new("/nonexistent/home"));
        assert!(tag.len() == 6 && tag.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(tag, super::tag(Path::new("/nonexistent/home")));
    }
}
