//! Claims of address ranges. Each data directory of this machine claims one range, whose addresses
//! its slots use. A *slot* is the network namespace of one guest. Several daemons may share a host,
//! for example in tests, so their ranges must not overlap.
//!
//! A claim is a file and a blackhole route of the range in the host. The route shows other programs
//! that the range is in use, and drops packets to removed sandboxes.

use crate::NetError;
use crate::namespace;
use crate::program;
use data_encoding::HEXLOWER;
use ipnet::Ipv4Net;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket};
use nix::{getsockopt_impl, sockopt_impl};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Preferred candidates: reserved for benchmarks of networks (RFC 2544), so not used by real
/// networks.
const PREFERRED_RANGE: (Ipv4Addr, u8) = (Ipv4Addr::new(198, 18, 0, 0), 15);
/// Candidates if all preferred ranges are taken.
const FALLBACK_RANGE: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 224, 0, 0), 11);

sockopt_impl!(
    /// Cookie of a socket's network namespace, unique until the next boot (Linux 5.14).
    NetnsCookie,
    GetOnly,
    libc::SOL_SOCKET,
    libc::SO_NETNS_COOKIE,
    u64
);

/// Returns the cookie of this thread's network namespace. `None` on older kernels.
fn netns_cookie() -> Option<u64> {
    let (family, kind) = (AddressFamily::Unix, SockType::Datagram);
    let any = socket(family, kind, SockFlag::SOCK_CLOEXEC, None).ok()?;
    getsockopt(&any, NetnsCookie).ok()
}

/// Lock that must be held while claims are created and released. Each network namespace in which
/// daemons run has its own directory, which exists while it contains claims.
pub(crate) struct RangeClaims {
    directory: PathBuf,
    _lock: Flock<File>,
}

/// File whose lock protects the claims.
const LOCK_FILE: &str = "lock";
/// File with the cookie of the namespace that the claims belong to.
const IDENTITY_FILE: &str = "identity";

/// Claim of one data directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RangeClaim {
    /// The data directory.
    pub home: PathBuf,
    /// Address range of its slots.
    pub range: Ipv4Net,
    /// Mount namespace in which the data directory has this path. `None` in claims of earlier
    /// versions.
    #[serde(default)]
    pub mounts: Option<u64>,
}

impl RangeClaim {
    /// Creates the claim of `range` by this process for `home`.
    fn new(home: &Path, range: Ipv4Net) -> Self {
        Self {
            home: fs::canonicalize(home).unwrap_or_else(|_| home.to_owned()),
            range,
            mounts: mount_namespace("thread-self"),
        }
    }

    /// Returns whether the data directory was removed. In another mount namespace, the path may
    /// exist unseen: such a claim is valid while a process is in that namespace.
    pub fn is_orphaned(&self) -> bool {
        if !matches!(self.home.try_exists(), Ok(false)) {
            return false;
        }
        match self.mounts {
            None => true,
            Some(mounts) if mount_namespace("thread-self") == Some(mounts) => true,
            Some(mounts) => !is_used(mounts),
        }
    }
}

/// Returns the inode of a thread's mount namespace. `thread` is a path below `/proc`.
fn mount_namespace(thread: &str) -> Option<u64> {
    let data = fs::metadata(format!("/proc/{thread}/ns/mnt")).ok()?;
    Some(data.ino())
}

/// Returns true if a thread is in the mount namespace `mounts`, or if this cannot be determined.
fn is_used(mounts: u64) -> bool {
    let numbers = |directory: &str| {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name.bytes().all(|b| b.is_ascii_digit()))
    };
    // Without a readable /proc, assume that the namespace is in use: otherwise the network of a
    // running daemon could be removed.
    let mut processes = numbers("/proc").peekable();
    processes.peek().is_none()
        || processes.any(|process| {
            let mut threads = numbers(&format!("/proc/{process}/task"));
            threads
                .any(|thread| mount_namespace(&format!("{process}/task/{thread}")) == Some(mounts))
        })
}

/// Returns six hexadecimal digits that identify a data directory.
pub(crate) fn tag(home: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let home = fs::canonicalize(home).unwrap_or_else(|_| home.to_owned());
    let digest = Sha256::digest(home.as_os_str().as_bytes());
    HEXLOWER.encode(&digest[..3])
}

impl RangeClaims {
    /// Waits for the lock and acquires it.
    pub fn lock() -> Result<Self, NetError> {
        let failed =
            |path: &Path| NetError::host(format!("claiming addresses in {}", path.display()));
        let namespace = Path::new("/proc/thread-self/ns/net");
        let inode = fs::metadata(namespace).map_err(failed(namespace))?.ino();
        let directory = namespace::base_dir().join(inode.to_string());
        let path = directory.join(LOCK_FILE);
        let lock = lock_file(&directory, &path).map_err(failed(&path))?;
        let claims = Self {
            directory,
            _lock: lock,
        };
        // Kernels before 5.14 have no cookies. On these kernels, existing claims are trusted,
        // although a reused inode number would go unnoticed.
        if let Some(cookie) = netns_cookie() {
            claims.remove_stale(cookie).map_err(failed(&path))?;
        }
        Ok(claims)
    }

    /// Returns true if the directory has only the lock file and the identity file. Returns false if
    /// the directory is unreadable.
    fn is_empty(&self) -> bool {
        let is_own = |entry: io::Result<fs::DirEntry>| {
            let name = entry.map(|entry| entry.file_name());
            name.is_ok_and(|name| name == LOCK_FILE || name == IDENTITY_FILE)
        };
        fs::read_dir(&self.directory).is_ok_and(|mut entries| entries.all(is_own))
    }

    /// Removes the claims of an earlier namespace: the kernel reuses the inode number of a removed
    /// namespace.
    fn remove_stale(&self, cookie: u64) -> io::Result<()> {
        let file = self.file(IDENTITY_FILE);
        let cookie = cookie.to_string();
        match fs::read_to_string(&file) {
            Ok(owner) if owner == cookie => return Ok(()),
            Ok(_) => {
                for entry in fs::read_dir(&self.directory)? {
                    let entry = entry?;
                    if entry.file_name() != LOCK_FILE && entry.file_name() != IDENTITY_FILE {
                        fs::remove_file(entry.path())?;
                    }
                }
            }
            // A new directory, or claims of a version of Jiffy that wrote no cookie, which remain
            // valid.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        // Write atomically: a partial cookie would look like another namespace.
        let draft = self.file("identity.new");
        fs::write(&draft, cookie)?;
        fs::rename(draft, file)
    }

    /// Returns all claims with their tags.
    pub fn all(&self) -> Vec<(String, RangeClaim)> {
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

    /// Returns the path of the file with the claim of `tag`.
    fn path(&self, tag: &str) -> PathBuf {
        self.directory.join(format!("{tag}.json"))
    }

    /// Returns the path of another file in the directory of the claims.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Reads the claim of `tag`. `None` if it is missing or unreadable.
    fn read(&self, tag: &str) -> Option<RangeClaim> {
        serde_json::from_slice(&fs::read(self.path(tag)).ok()?).ok()
    }

    /// Claims the range `wanted` for `tag`, or a free range with the prefix length `length`.
    /// Retains the previous range if it is `wanted` or, without `wanted`, at least as large as
    /// requested.
    pub fn claim(
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
                // Ignore the error: the route usually exists already. It is added again in case
                // another program removed it.
                let _ = program::ip(&[blackhole("add", before.range)]);
                // This process may be in another mount namespace than the previous daemon.
                let claim = RangeClaim::new(home, before.range);
                if claim != before {
                    self.write(tag, &claim)?;
                }
                return Ok(before.range);
            }
            self.release(tag);
        }
        // Routes without a claim would make candidates appear to be taken.
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
        // Add the route before writing the file: after a crash in between, `remove_stray_routes`
        // removes the route.
        program::ip(&[blackhole("add", range)])?;
        self.write(tag, &RangeClaim::new(home, range))?;
        Ok(range)
    }

    /// Writes the file of a claim atomically.
    fn write(&self, tag: &str, claim: &RangeClaim) -> Result<(), NetError> {
        let (path, draft) = (self.path(tag), self.file(&format!("{tag}.new")));
        let text = serde_json::to_vec(claim).map_err(|e| NetError::Unable(e.to_string()))?;
        let written = fs::write(&draft, text).and_then(|()| fs::rename(&draft, &path));
        written.map_err(NetError::host(format!("writing {}", path.display())))
    }

    /// Removes routes of claims without a file, whose ranges would otherwise remain taken.
    fn remove_stray_routes(&self) {
        let text = program::run("ip", &["-4", "route", "show", "type", "blackhole"], "");
        let claimed: Vec<Ipv4Net> = self.all().iter().map(|(_, claim)| claim.range).collect();
        for line in text.unwrap_or_default().lines() {
            let own = line.trim_end().ends_with(&format!("metric {METRIC}"));
            let stray = destination(line).filter(|range| own && !claimed.contains(range));
            if let Some(range) = stray {
                // Ignore the error: the route may have been removed concurrently.
                let _ = program::ip(&[blackhole("del", range)]);
            }
        }
    }

    /// Releases the claim of `tag`. The range must be unused.
    pub fn release(&self, tag: &str) {
        if let Some(claim) = self.read(tag) {
            // Ignore the error: the route may not exist.
            let _ = program::ip(&[blackhole("del", claim.range)]);
        }
        let _ = fs::remove_file(self.path(tag));
    }
}

impl Drop for RangeClaims {
    /// Removes the directory while holding the lock if no claims or other files are left.
    fn drop(&mut self) {
        if self.is_empty() {
            // Ignore errors: the files may not exist.
            for name in [IDENTITY_FILE, LOCK_FILE] {
                let _ = fs::remove_file(self.file(name));
            }
            let _ = fs::remove_dir(&self.directory);
        }
    }
}

/// Creates and locks the file `path` in `directory`. The previous holder may have removed both.
fn lock_file(directory: &Path, path: &Path) -> io::Result<Flock<File>> {
    loop {
        match fs::create_dir_all(directory) {
            // Another process removed or recreated the directory between the failed creation and
            // the call of `symlink_metadata`.
            Err(e)
                if e.kind() == io::ErrorKind::AlreadyExists
                    && fs::symlink_metadata(directory).map_or(true, |entry| entry.is_dir()) =>
            {
                continue;
            }
            created => created?,
        }
        // Fail on a dangling symbolic link instead of treating it as a removed file.
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path);
        let file = match file {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        let own = file.metadata()?.ino();
        let lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e)?;
        // While this process waited for the lock, the previous holder may have removed the file,
        // and another process may have created and locked a new one. Then try again.
        if fs::metadata(path).is_ok_and(|current| current.ino() == own) {
            return Ok(lock);
        }
    }
}

/// Metric of the blackhole routes. The high value makes all other routes preferred. The exact value
/// identifies the routes of this program.
const METRIC: u32 = 4_294_967;

/// Returns an `ip` command that changes the route of a claim. `verb` is `add` or `del`.
fn blackhole(verb: &str, range: Ipv4Net) -> String {
    format!("route {verb} blackhole {range} metric {METRIC}")
}

fn overlap(a: &Ipv4Net, b: &Ipv4Net) -> bool {
    a.contains(b) || b.contains(a)
}

/// Returns the candidate ranges with the given prefix length, in order of preference.
fn candidates(length: u8) -> impl Iterator<Item = Ipv4Net> {
    [PREFERRED_RANGE, FALLBACK_RANGE]
        .into_iter()
        .flat_map(move |(address, prefix)| {
            let whole = Ipv4Net::new_assert(address, prefix);
            // `subnets` rejects a prefix length below the prefix length of `whole`.
            whole.subnets(length.max(prefix)).into_iter().flatten()
        })
}

/// Returns the destinations of the host's routes in all tables, except default routes.
fn routes() -> Result<Vec<Ipv4Net>, NetError> {
    let text = program::run("ip", &["-4", "route", "show", "table", "all"], "")?;
    Ok(text.lines().filter_map(destination).collect())
}

/// Returns the destination in a line of `ip route`, which may start with the type of the route.
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
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    #[test]
    fn a_route_is_parsed_to_its_destination() {
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
    fn candidate_ranges_are_adjacent() {
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
    fn claims_of_a_removed_namespace_are_discarded_if_its_number_is_reused() {
        let directory = std::env::temp_dir().join(format!("jiffy-claims-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let file = File::create(directory.join(LOCK_FILE)).unwrap();
        let lock = Flock::lock(file, FlockArg::LockExclusive).unwrap();
        let claims = RangeClaims {
            directory: directory.clone(),
            _lock: lock,
        };
        let claim = r#"{"home":"/","range":"198.18.0.0/19"}"#;
        // The namespace has the cookie 7 first, and 8 after its removal. Claims of a version of
        // Jiffy that wrote no cookie remain.
        fs::write(claims.path("abcdef"), claim).unwrap();
        claims.remove_stale(7).unwrap();
        assert_eq!(claims.all().len(), 1);
        claims.remove_stale(7).unwrap();
        assert_eq!(claims.all().len(), 1);
        fs::write(claims.file("forwarding"), "x 0").unwrap();
        claims.remove_stale(8).unwrap();
        assert!(claims.all().is_empty() && !claims.file("forwarding").exists());
        assert!(directory.join(LOCK_FILE).exists());
        fs::write(claims.path("abcdef"), claim).unwrap();
        claims.remove_stale(8).unwrap();
        assert_eq!(claims.all().len(), 1);
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn the_lock_is_exclusive_and_leaves_no_files() {
        let done = crate::test_slot::in_slot(|| {
            let directory = RangeClaims::lock().unwrap().directory.clone();
            assert!(!directory.exists(), "{}", directory.display());
            let (held, rounds) = (AtomicBool::new(false), 50);
            let hold = || {
                for _ in 0..rounds {
                    let claims = RangeClaims::lock().unwrap();
                    assert!(!held.swap(true, Ordering::SeqCst));
                    assert!(claims.file(IDENTITY_FILE).exists());
                    held.store(false, Ordering::SeqCst);
                }
            };
            thread::scope(|scope| {
                let others: Vec<_> = (0..4).map(|_| scope.spawn(hold)).collect();
                others.into_iter().for_each(|other| other.join().unwrap());
            });
            assert!(!directory.exists(), "{}", directory.display());
            // Another file in the directory prevents its removal.
            let claims = RangeClaims::lock().unwrap();
            let note = claims.file("forwarding");
            fs::write(&note, "").unwrap();
            drop(claims);
            assert!(note.exists());
            fs::remove_file(&note).unwrap();
            drop(RangeClaims::lock().unwrap());
            assert!(!directory.exists(), "{}", directory.display());
            // An unusable lock file results in an error instead of endless waiting.
            fs::create_dir(&directory).unwrap();
            symlink("nowhere/lock", directory.join(LOCK_FILE)).unwrap();
            assert!(RangeClaims::lock().is_err());
            fs::remove_dir_all(&directory).unwrap();
        });
        if done.is_none() {
            eprintln!("skipped: network namespaces are needed");
        }
    }

    #[test]
    fn a_namespace_has_one_identity() {
        let own = netns_cookie();
        assert_eq!(own, std::thread::spawn(netns_cookie).join().unwrap());
    }

    #[test]
    fn a_data_directory_has_one_tag() {
        let tag = tag(Path::new("/nonexistent/home"));
        assert!(tag.len() == 6 && tag.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(tag, super::tag(Path::new("/nonexistent/home")));
    }
}
