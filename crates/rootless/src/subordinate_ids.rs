//! Subordinate user and group ids of a user, which `newuidmap` and `newgidmap` map into a user
//! namespace.

use nix::unistd::{Uid, User};
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of ids that are mapped.
const MAX_MAPPED_IDS: u64 = 65_536;
/// Directories of programs that `PATH` may lack.
const PROGRAM_DIRECTORIES: [&str; 4] = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"];

/// Range of host ids that a user may map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubIdRange {
    pub first: u64,
    pub count: u64,
}

/// Subordinate ids and the programs that map them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SubIds {
    pub users: SubIdRange,
    pub groups: SubIdRange,
    pub newuidmap: PathBuf,
    pub newgidmap: PathBuf,
}

/// Returns the path of program `name`.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let configured = std::env::split_paths(&path).filter(|directory| directory.is_absolute());
    let mut directories = configured.chain(PROGRAM_DIRECTORIES.iter().map(PathBuf::from));
    directories.find_map(|directory| Some(directory.join(name)).filter(|path| path.is_file()))
}

/// Returns the subordinate ids of `uid`, or the reason for their absence.
pub(crate) fn for_user(uid: Uid) -> Result<SubIds, String> {
    let find = |name: &str| find_program(name).ok_or_else(|| format!("`{name}` is not installed"));
    let name = User::from_uid(uid).ok().flatten().map(|user| user.name);
    if name.is_none() {
        return Err(format!("uid {uid} has no name (/etc/passwd)"));
    }
    let range = |file: &str| {
        let text = fs::read_to_string(Path::new(file)).unwrap_or_default();
        longest_range(&text, uid.as_raw(), name.as_deref())
            .ok_or_else(|| format!("{file} has no range for uid {uid}"))
    };
    Ok(SubIds {
        users: range("/etc/subuid")?,
        groups: range("/etc/subgid")?,
        newuidmap: find("newuidmap")?,
        newgidmap: find("newgidmap")?,
    })
}

/// Returns the longest range of a user in a file in the format of subuid(5).
fn longest_range(text: &str, uid: u32, name: Option<&str>) -> Option<SubIdRange> {
    let range = |line: &str| {
        let mut words = line.trim().split(':');
        let owner = words.next()?;
        let is_owner = owner.parse() == Ok(uid) || (name == Some(owner));
        let first = words.next()?.parse().ok()?;
        let count: u64 = words.next()?.parse().ok()?;
        let count = count.min(MAX_MAPPED_IDS);
        (is_owner && count > 0).then_some(SubIdRange { first, count })
    };
    text.lines()
        .filter_map(range)
        .max_by_key(|range| range.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_range_of_a_user_is_taken_by_name_or_number() {
        let text = "other:100000:65536\nme:200000:1000\n# me\nme:x:1\n1000:300000:99999\n";
        let range = |first, count| Some(SubIdRange { first, count });
        assert_eq!(
            longest_range(text, 1000, Some("me")),
            range(300_000, 65_536)
        );
        assert_eq!(longest_range(text, 1001, Some("me")), range(200_000, 1000));
        assert_eq!(longest_range(text, 1001, None), None);
        assert_eq!(longest_range("me:1:0", 1, Some("me")), None);
    }
}
