//! Users and groups of the sandbox, read from `/etc/passwd` and `/etc/group` of its image. The
//! agent is a static binary, which cannot use the name service switch. Reading the files may wait
//! for a file system, so it must be done on a worker thread.

use crate::sys;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// User of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// All groups. The primary group is first.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: String,
}

impl User {
    /// Returns the superuser of an image without `/etc/passwd`.
    pub fn root() -> Self {
        Self {
            name: "root".into(),
            uid: 0,
            gid: 0,
            groups: vec![0],
            home: "/root".into(),
        }
    }

    /// Converts a client's path to an absolute path. `~` and a leading `~/` denote the home
    /// directory. Other relative paths start at `base`, or at the home directory without a base.
    pub fn resolve(&self, path: &str, base: Option<&str>) -> PathBuf {
        let home = Path::new(&self.home);
        if path == "~" || path.is_empty() && base.is_none() {
            return home.to_path_buf();
        }
        match path.strip_prefix("~/") {
            Some(rest) => home.join(rest),
            None => base.map_or(home, Path::new).join(path),
        }
    }
}

/// Error: the user does not exist. The text equals the text of E2B's envd, which clients compare.
#[derive(Debug)]
pub struct UnknownUser(pub String);

impl fmt::Display for UnknownUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.0;
        write!(
            f,
            "error looking up user '{name}': user: unknown user {name}"
        )
    }
}

impl std::error::Error for UnknownUser {}

/// User in a request, before the look-up.
#[derive(Debug, Clone)]
pub struct UserLookup {
    /// Name in the request, or the configured default.
    pub name: Option<String>,
}

impl UserLookup {
    /// Looks up the user by name. Without a name, returns `user` if it exists, and root otherwise.
    pub fn find(&self) -> Result<User, UnknownUser> {
        let users = Users::load();
        match &self.name {
            Some(name) => users.find(name).ok_or_else(|| UnknownUser(name.clone())),
            None => Ok(users
                .find("user")
                .or_else(|| users.find("root"))
                .unwrap_or_else(User::root)),
        }
    }
}

/// Maximum number of bytes that are read of each file.
const MAX_DATABASE_BYTES: u64 = 4 << 20;

/// Contents of the user database at one time.
#[derive(Default)]
pub struct Users {
    /// Content of `/etc/passwd`.
    passwd: String,
    /// Content of `/etc/group`.
    group: String,
    /// Cached names of users, by id.
    user_names: RefCell<HashMap<u32, String>>,
    /// Names of groups by id, as far as they were looked up.
    group_names: RefCell<HashMap<u32, String>>,
}

impl Users {
    /// Reads the files. A file that is missing or not a regular file counts as empty.
    pub fn load() -> Self {
        let read = |path: &str| {
            let content = sys::read_regular(Path::new(path), MAX_DATABASE_BYTES);
            String::from_utf8_lossy(&content.unwrap_or_default()).into_owned()
        };
        Self {
            passwd: read("/etc/passwd"),
            group: read("/etc/group"),
            ..Self::default()
        }
    }

    /// Looks up a user in the forms that images use: by name or number, optionally with a group
    /// (`1000:1000`, `www:staff`). `root` and all numbers exist always, since an image may contain
    /// no list of users.
    pub fn find(&self, name: &str) -> Option<User> {
        let Some((name, group)) = name.split_once(':') else {
            return self.listed(name).or_else(|| unlisted(name));
        };
        let mut user = self.find(name)?;
        user.gid = match group.parse() {
            // The kernel reserves the largest number for "not set".
            Ok(u32::MAX) => return None,
            Ok(gid) => gid,
            Err(_) => id_of(&self.group, group)?,
        };
        // A group in the request replaces all other groups of the user.
        user.groups = vec![user.gid];
        Some(user)
    }

    /// Returns a user of `/etc/passwd`, by login name or number.
    fn listed(&self, name: &str) -> Option<User> {
        for line in self.passwd.lines() {
            let mut fields = line.split(':');
            let (Some(login), Some(_), Some(uid), Some(gid)) =
                (fields.next(), fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if login != name && uid != name {
                continue;
            }
            // Malformed lines are skipped, as by the C library.
            let (Ok(uid), Ok(gid)) = (uid.parse(), gid.parse()) else {
                continue;
            };
            // The field between group and home directory is a comment.
            let home = fields.nth(1).filter(|h| !h.is_empty()).unwrap_or("/");
            return Some(User {
                name: login.to_owned(),
                uid,
                gid,
                groups: self.groups_of(login, gid),
                home: home.to_owned(),
            });
        }
        (name == "root" || name == "0").then(User::root)
    }

    /// Returns the name for a user id, or the number.
    pub fn user_name(&self, uid: u32) -> String {
        let mut names = self.user_names.borrow_mut();
        let name = names.entry(uid);
        name.or_insert_with(|| name_of(&self.passwd, uid)).clone()
    }

    /// Returns the name for a group id, or the number.
    pub fn group_name(&self, gid: u32) -> String {
        let mut names = self.group_names.borrow_mut();
        let name = names.entry(gid);
        name.or_insert_with(|| name_of(&self.group, gid)).clone()
    }

    /// Returns the groups of a user, the primary group first.
    fn groups_of(&self, login: &str, primary: u32) -> Vec<u32> {
        let mut groups = vec![primary];
        for line in self.group.lines() {
            let mut fields = line.split(':');
            let (Some(gid), Some(members)) = (fields.nth(2), fields.next()) else {
                continue;
            };
            if let Ok(gid) = gid.parse()
                && members.split(',').any(|m| m == login)
                && !groups.contains(&gid)
            {
                groups.push(gid);
            }
        }
        groups
    }
}

/// Returns a user that exists only as a number in the request.
fn unlisted(name: &str) -> Option<User> {
    // The kernel reserves the largest number for "not set".
    let uid = name.parse().ok().filter(|uid| *uid != u32::MAX)?;
    Some(User {
        name: name.to_owned(),
        uid,
        gid: 0,
        groups: vec![0],
        home: "/".to_owned(),
    })
}

/// Returns the number for a name.
fn id_of(database: &str, name: &str) -> Option<u32> {
    let mut lines = database.lines().map(|line| line.split(':'));
    let mut fields =
        lines.find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))?;
    fields.nth(1)?.parse().ok()
}

/// Returns the first name with this number, or the number as text.
fn name_of(database: &str, id: u32) -> String {
    for line in database.lines() {
        let mut fields = line.split(':');
        if let (Some(name), Some(found)) = (fields.next(), fields.nth(1))
            && found.parse() == Ok(id)
        {
            return name.to_owned();
        }
    }
    id.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a user database with an invalid line.
    fn users() -> Users {
        Users {
            passwd:
                "root:x:0:0:root:/root:/bin/sh\nbroken\nuser:x:1000:1000::/home/user:/bin/bash\n"
                    .into(),
            group: "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:\n".into(),
            ..Users::default()
        }
    }

    #[test]
    fn a_user_has_home_and_all_groups() {
        let user = users().find("user").unwrap();
        assert_eq!((user.uid, user.home.as_str()), (1000, "/home/user"));
        assert_eq!(user.groups, [1000, 27]);
        assert_eq!(users().find("1000").unwrap().name, "user");
        assert_eq!(users().find("nobody"), None);
        assert_eq!(users().group_name(27), "sudo");
        assert_eq!(users().user_name(4), "4");
    }

    #[test]
    fn a_number_is_a_user_and_a_group_may_be_named() {
        let ids = |name| users().find(name).map(|u| (u.uid, u.gid, u.groups));
        assert_eq!(ids("65532"), Some((65532, 0, vec![0])));
        assert_eq!(ids("65532:65533"), Some((65532, 65533, vec![65533])));
        assert_eq!(ids("user:sudo"), Some((1000, 27, vec![27])));
        for bad in [
            "user:nobody",
            "-1",
            "4294967295",
            "user:4294967295",
            ":",
            "",
            "nobody:0",
        ] {
            assert_eq!(ids(bad), None, "{bad}");
        }
    }

    #[test]
    fn paths_are_relative_to_home() {
        let user = users().find("user").unwrap();
        assert_eq!(user.resolve("a/b", None), Path::new("/home/user/a/b"));
        assert_eq!(user.resolve("~", None), Path::new("/home/user"));
        assert_eq!(user.resolve("~/x", Some("/w")), Path::new("/home/user/x"));
        assert_eq!(user.resolve("x", Some("/w")), Path::new("/w/x"));
        assert_eq!(user.resolve("/etc", None), Path::new("/etc"));
    }
}
