//! Subordinate users and groups of a user, as `newuidmap` and `newgidmap` know them.

use nix::unistd::{Uid, User};
use std::fs;
use std::path::{Path, PathBuf};

/// Most ids that are mapped.
const MAX_COUNT: u64 = 65_536;
/// Places of programs that the search path may leave out.
const PLACES: [&str; 4] = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"];

/// Ids of the host that a user may map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub first: u64,
    pub count: u64,
}

/// Subordinate ids, and the programs that map them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ranges {
    pub users: Range,
    pub groups: Range,
    pub newuidmap: PathBuf,
    pub newgidmap: PathBuf,
}

/// Path of the program `name`.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let named = std::env::split_paths(&path).filter(|place| place.is_absolute());
    let mut places = named.chain(PLACES.iter().map(PathBuf::from));
    places.find_map(|place| Some(place.join(name)).filter(|path| path.is_file()))
}

/// Those of `uid`; why there are none.
pub(crate) fn of(uid: Uid) -> Result<Ranges, String> {
    let find = |name: &str| program(name).ok_or_else(|| format!("`{name}` is not installed"));
    let name = User::from_uid(uid).ok().flatten().map(|user| user.name);
    if name.is_none() {
        return Err(format!("uid {uid} has no name (/etc/passwd)"));
    }
    let range = |file: &str| {
        let text = fs::read_to_string(Path::new(file)).unwrap_or_default();
        longest(&text, uid.as_raw(), name.as_deref())
            .ok_or_else(|| format!("{file} has no range for uid {uid}"))
    };
    Ok(Ranges {
        users: range("/etc/subuid")?,
        groups: range("/etc/subgid")?,
        newuidmap: find("newuidmap")?,
        newgidmap: find("newgidmap")?,
    })
}

/// Longest range of the user in a file as subuid(5) has it.
fn longest(text: &str, uid: u32, name: Option<&str>) -> Option<Range> {
    let range = |line: &str| {
        let mut words = line.trim().split(':');
        let owner = words.next()?;
        let own = owner.parse() == Ok(uid) || (name == Some(owner));
        let first = words.next()?.parse().ok()?;
        let count: u64 = words.next()?.parse().ok()?;
        let count = count.min(MAX_COUNT);
        (own && count > 0).then_some(Range { first, count })
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
        let range = |first, count| Some(Range { first, count });
        assert_eq!(longest(text, 1000, Some("me")), range(300_000, 65_536));
        assert_eq!(longest(text, 1001, Some("me")), range(200_000, 1000));
        assert_eq!(longest(text, 1001, None), None);
        assert_eq!(longest("me:1:0", 1, Some("me")), None);
    }
}
