//! A hierarchy of control groups (version 1 or 2): its location, controllers and limits.

use super::{CgroupError, GroupLimits, failed};
use nix::unistd::AccessFlags;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the group that contains the groups of all processes.
const PARENT_GROUP: &str = "jiffy";

/// Cgroup hierarchy with its controllers.
#[derive(Debug)]
pub struct CgroupTree {
    /// Group that contains the groups of processes.
    pub parent: PathBuf,
    pub version: CgroupVersion,
}

/// Version of a hierarchy, which determines the names of the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupVersion {
    /// Version 1, with the controllers of the hierarchy.
    One(Vec<String>),
    Two,
}

impl CgroupTree {
    /// Creates the parent group.
    pub fn open(&self) -> Result<(), CgroupError> {
        // In version 2, a group has controllers only if its parent delegates them.
        if self.version == CgroupVersion::Two {
            delegate(self.parent.parent().unwrap_or(&self.parent))?;
        }
        fs::create_dir_all(&self.parent).map_err(failed(&self.parent))?;
        // The group may have been created by another user.
        let writable = nix::unistd::access(&self.parent, AccessFlags::W_OK);
        writable.map_err(|e| failed(&self.parent)(e.into()))?;
        if self.version == CgroupVersion::Two {
            delegate(&self.parent)?;
        }
        Ok(())
    }

    /// Sets the limits of a group.
    pub fn limit(&self, group: &Path, limits: GroupLimits) -> Result<(), CgroupError> {
        for (file, value) in self.settings(limits) {
            let path = group.join(file);
            // Skip a limit that this kernel does not support, but fail if the group does not exist.
            match set(&path, &value) {
                Err(e) if e.kind() == io::ErrorKind::NotFound && group.exists() => {}
                done => done.map_err(failed(&path))?,
            }
        }
        Ok(())
    }

    /// Returns the files and values by which the kernel enforces the limits, for this version of
    /// control groups.
    fn settings(&self, limits: GroupLimits) -> Vec<(&'static str, String)> {
        let (memory, tasks) = (limits.memory_bytes, limits.max_tasks);
        match &self.version {
            CgroupVersion::Two => {
                let mut all = vec![
                    ("memory.max", memory.to_string()),
                    ("pids.max", tasks.to_string()),
                    // All groups share the disks equally.
                    ("io.weight", "default 100".to_owned()),
                ];
                if !limits.swap {
                    all.push(("memory.swap.max", "0".to_owned()));
                }
                all
            }
            CgroupVersion::One(controllers) => {
                let all = [
                    ("memory", "memory.limit_in_bytes", memory),
                    ("pids", "pids.max", tasks),
                    ("blkio", "blkio.bfq.weight", 100),
                    // Limit of memory and swap together, which must be at least the limit of memory
                    // alone.
                    ("memory", "memory.memsw.limit_in_bytes", memory),
                ];
                let ours = all.into_iter().filter(|(controller, file, _)| {
                    (!limits.swap || *file != "memory.memsw.limit_in_bytes")
                        && controllers.iter().any(|own| own == controller)
                });
                ours.map(|(_, file, value)| (file, value.to_string()))
                    .collect()
            }
        }
    }
}

/// Writes to an existing file. Creating a file in a cgroup would fail with a misleading error.
pub fn set(path: &Path, value: &str) -> io::Result<()> {
    use std::io::Write;
    let mut file = fs::File::options().write(true).open(path)?;
    file.write_all(value.as_bytes())
}

/// Enables the controllers in groups below `group`.
fn delegate(group: &Path) -> Result<(), CgroupError> {
    let control = group.join("cgroup.subtree_control");
    for controller in ["+memory", "+pids", "+io"] {
        match set(&control, controller) {
            // Skip a missing controller.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            done => done.map_err(failed(&control))?,
        }
    }
    Ok(())
}

/// Returns the hierarchies whose controllers limit processes. `mounts` is the content of
/// `/proc/self/mountinfo`, `own` the content of `/proc/self/cgroup`.
pub fn trees(mounts: &str, own: &str) -> Vec<CgroupTree> {
    let limiting = ["memory", "pids", "blkio"];
    mounts
        .lines()
        .filter_map(|line| {
            // 36 35 0:30 ROOT MOUNT-POINT rw - cgroup cgroup rw,memory (proc_pid_mountinfo(5))
            let (place, kind) = line.split_once(" - ")?;
            let mut place = place.split(' ').skip(3);
            let (root, at) = (place.next()?, place.next()?);
            let mut kind = kind.split(' ');
            let (kind, options) = (kind.next()?, kind.nth(1)?);
            let version = match kind {
                "cgroup2" => CgroupVersion::Two,
                "cgroup" => {
                    let controllers = options.split(',').filter(|o| limiting.contains(o));
                    CgroupVersion::One(controllers.map(str::to_owned).collect())
                }
                _ => return None,
            };
            let group = own.lines().find_map(|line| {
                // Version 1: `4:memory:/path`. Version 2: `0::/path`.
                let (_, line) = line.split_once(':')?;
                let (controllers, path) = line.split_once(':')?;
                let ours = match &version {
                    CgroupVersion::Two => controllers.is_empty(),
                    CgroupVersion::One(ours) => {
                        controllers.split(',').any(|c| ours.iter().any(|o| o == c))
                    }
                };
                ours.then_some(path)
            })?;
            // In a container, the mount shows only a part of the hierarchy, which starts at `root`.
            let below = group
                .strip_prefix(root.trim_end_matches('/'))
                .unwrap_or(group);
            let own = Path::new(at).join(below.trim_start_matches('/'));
            // In version 2, a group with processes cannot delegate controllers. The daemon's own
            // group has processes, so the groups become its siblings. The root of the mount has no
            // siblings, so the groups of a daemon in the root are below the root.
            let above = match &version {
                CgroupVersion::Two if below.trim_matches('/').is_empty() => &own,
                CgroupVersion::Two => own.parent()?,
                CgroupVersion::One(_) => &own,
            };
            Some(CgroupTree {
                parent: above.join(PARENT_GROUP),
                version,
            })
        })
        .filter(|tree| match tree.version {
            CgroupVersion::One(_) => true,
            // On a host with version 1, version 2 may be mounted without any of these controllers.
            CgroupVersion::Two => {
                let own = tree.parent.parent().unwrap_or(&tree.parent);
                let controllers = fs::read_to_string(own.join("cgroup.controllers"));
                let limits = |c: &str| ["memory", "pids", "io"].contains(&c);
                controllers.is_ok_and(|c| c.split_whitespace().any(limits))
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_CGROUPS: &str =
        "5:blkio:/\n4:memory:/api/30179\n3:cpuset:/\n2:cpu,cpuacct:/\n1:pids,misc:/\n0::/user\n";

    /// Returns the parent and version of each tree in the text of a `mountinfo` file.
    fn found(mounts: &str) -> Vec<(String, CgroupVersion)> {
        let trees = trees(mounts, OWN_CGROUPS).into_iter();
        trees
            .map(|t| (t.parent.display().to_string(), t.version.clone()))
            .collect()
    }

    #[test]
    fn in_version_1_groups_are_below_the_daemons_group_of_each_hierarchy() {
        let mounts = "\
            30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
            31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            32 30 0:28 / /sys/fs/cgroup/pids,misc rw shared:9 - cgroup cgroup rw,pids,misc\n\
            33 30 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
            34 30 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n";
        let one = |c: &str| CgroupVersion::One(vec![c.to_owned()]);
        assert_eq!(
            found(mounts),
            [
                (
                    "/sys/fs/cgroup/memory/api/30179/jiffy".to_owned(),
                    one("memory")
                ),
                ("/sys/fs/cgroup/pids,misc/jiffy".to_owned(), one("pids")),
            ]
        );
    }

    #[test]
    fn a_container_sees_its_group_as_the_root() {
        let mounts = "31 30 0:27 /api/30179 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        assert_eq!(found(mounts)[0].0, "/sys/fs/cgroup/memory/jiffy");
    }

    #[test]
    fn in_version_2_groups_are_siblings_of_the_daemons_group() {
        let root = tempfile::tempdir().unwrap();
        let at = root.path().display();
        let mounts = format!("31 30 0:27 / {at} rw - cgroup2 cgroup2 rw,nsdelegate\n");
        let own = "0::/system.slice/jiffy.service\n";
        let slice = root.path().join("system.slice");
        fs::create_dir(&slice).unwrap();
        for (controllers, count) in [("cpuset hugetlb\n", 0), ("cpuset cpu memory pids\n", 1)] {
            fs::write(slice.join("cgroup.controllers"), controllers).unwrap();
            let trees = trees(&mounts, own);
            assert_eq!(trees.len(), count, "{controllers}");
            assert!(trees.iter().all(|t| t.parent == slice.join("jiffy")));
        }
    }

    #[test]
    fn limits_of_memory_swap_and_tasks_are_written_in_the_formats_of_both_versions() {
        let limits = GroupLimits {
            memory_bytes: 1 << 30,
            max_tasks: 64,
            swap: false,
        };
        let tree = |version| CgroupTree {
            parent: PathBuf::new(),
            version,
        };
        let two = tree(CgroupVersion::Two).settings(limits);
        assert!(two.contains(&("memory.max", (1 << 30).to_string())));
        assert!(two.contains(&("memory.swap.max", "0".to_owned())));
        assert!(two.contains(&("pids.max", "64".to_owned())));
        let one = |controller: &str, swap| {
            let version = CgroupVersion::One(vec![controller.to_owned()]);
            tree(version).settings(GroupLimits { swap, ..limits })
        };
        assert_eq!(one("pids", false), [("pids.max", "64".to_owned())]);
        let files = |all: Vec<(&'static str, String)>| all.into_iter().map(|(file, _)| file);
        let memory = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"];
        assert!(files(one("memory", false)).eq(memory));
        assert!(files(one("memory", true)).eq([memory[0]]));
    }
}
