//! Control groups of processes that run guests: limits of memory, swap, tasks and disk I/O. CPU is
//! not limited: a VMM has as many busy threads as its guest has vCPUs, and groups with weights and
//! quotas kept the siblings of busy guests from answering for half a minute where twenty of them
//! shared two processors.
//!
//! A group lives as long as its process, also if that outlives its daemon, and is named by its
//! process id. In version 1 the groups are below the daemon's own. In version 2, where a group has
//! either processes or limited groups, they are beside it: a service manager can then restart a
//! daemon while processes of the former one run on.

use nix::unistd::AccessFlags;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Group that holds those of all processes.
const PARENT_GROUP: &str = "jiffy";
/// Time to wait, when the last user of groups closes, for the groups of VMMs that were just ended.
const LAST_GC_TIMEOUT: Duration = Duration::from_secs(1);
/// Limits of one process and its children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimits {
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Threads and processes.
    pub max_tasks: u64,
    /// True if its memory may be swapped out.
    pub swap: bool,
}

/// One cgroup hierarchy, with its controllers.
#[derive(Debug)]
struct CgroupTree {
    /// Group that holds those of processes.
    parent: PathBuf,
    version: CgroupVersion,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum CgroupVersion {
    /// Version 1 with these controllers.
    One(Vec<String>),
    Two,
}

/// Cgroup hierarchies in which processes are limited.
#[derive(Debug, Clone)]
pub struct Cgroups(Arc<CgroupTrees>);

#[derive(Debug)]
struct CgroupTrees(Vec<CgroupTree>);

/// Failure to make control groups.
#[derive(Debug, thiserror::Error)]
#[error("cannot limit processes by control groups: {path}: {source}; {CGROUP_HINT}")]
pub struct CgroupError {
    path: PathBuf,
    source: io::Error,
}

const CGROUP_HINT: &str = "it needs root, or with version 2 the right to make groups beside the daemon's own; `jiffy serve --cgroups off` \
    goes without";

fn failed(path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError { path, source }
}

impl Cgroups {
    /// Finds the hierarchies of this process. None if the host has none of the needed controllers.
    pub fn find() -> Result<Option<Self>, CgroupError> {
        let read = |path| fs::read_to_string(path).map_err(failed(Path::new(path)));
        let mounts = read("/proc/self/mountinfo")?;
        let own = read("/proc/self/cgroup")?;
        let trees = trees(&mounts, &own);
        for tree in &trees {
            tree.open()?;
        }
        let found = Self(Arc::new(CgroupTrees(trees)));
        found.gc();
        Ok((!found.0.0.is_empty()).then_some(found))
    }

    /// Makes the groups of a process that has just started, and moves it there. If it ended
    /// meanwhile, its groups are removed again: its end may have been handled before the last group
    /// was made.
    pub fn limit(&self, process: u32, limits: GroupLimits) -> Result<(), CgroupError> {
        self.make(process, Some(limits))
    }

    /// As [`Self::limit`], for a process that does nothing yet: it is limited when it is to begin.
    pub fn enter(&self, process: u32) -> Result<(), CgroupError> {
        self.make(process, None)
    }

    /// Limits a process that has entered its groups.
    pub fn set_limits(&self, process: u32, limits: GroupLimits) -> Result<(), CgroupError> {
        let mut trees = self.0.0.iter();
        trees.try_for_each(|tree| tree.limit(&tree.parent.join(process.to_string()), limits))
    }

    fn make(&self, process: u32, limits: Option<GroupLimits>) -> Result<(), CgroupError> {
        let made = self.make_groups(process, limits);
        if made.is_err() || !is_alive(OsStr::new(&process.to_string())) {
            self.remove_group(process);
        }
        made
    }

    fn make_groups(&self, process: u32, limits: Option<GroupLimits>) -> Result<(), CgroupError> {
        for tree in &self.0.0 {
            let group = tree.parent.join(process.to_string());
            // Another daemon may have removed the empty parent.
            let made = fs::create_dir_all(&group).or_else(|_| fs::create_dir_all(&group));
            made.map_err(failed(&group))?;
            if let Some(limits) = limits {
                tree.limit(&group, limits)?;
            }
            let procs = group.join("cgroup.procs");
            set(&procs, &process.to_string()).map_err(failed(&procs))?;
        }
        Ok(())
    }

    /// Number of processes in a process's group that the kernel killed at the memory limit.
    pub fn memory_kills(&self, process: u32) -> u64 {
        let groups = self
            .0
            .0
            .iter()
            .map(|tree| tree.parent.join(process.to_string()));
        let texts = groups.flat_map(|group| {
            let files = ["memory.events", "memory.oom_control"];
            files.map(|file| fs::read_to_string(group.join(file)).unwrap_or_default())
        });
        texts.map(|text| oom_kills_in(&text)).sum()
    }

    /// Removes the group of a process that has ended.
    pub fn remove_group(&self, process: u32) {
        for tree in &self.0.0 {
            // A group that a task is still leaving is removed by the next gc.
            let _ = fs::remove_dir(tree.parent.join(process.to_string()));
        }
    }

    /// Removes groups of processes that have ended: those that a task was still leaving, and those
    /// of processes that ended without a daemon.
    pub fn gc(&self) {
        let _ = self.0.gc();
    }

    /// Removes all groups when no more processes are started. Blocks for a second at most: tasks of
    /// processes that were just ended may still be leaving their groups.
    pub fn close(&self) {
        self.0.close();
    }
}

impl CgroupTrees {
    /// Removes groups of processes that have ended; returns true if one could not be removed yet.
    /// Groups of live processes are kept, so those that another daemon is making are safe.
    fn gc(&self) -> bool {
        let mut left = false;
        for tree in &self.0 {
            for group in fs::read_dir(&tree.parent).into_iter().flatten().flatten() {
                let is_group = group.file_type().is_ok_and(|t| t.is_dir());
                if is_group && !is_alive(&group.file_name()) {
                    left |= fs::remove_dir(group.path()).is_err();
                }
            }
        }
        left
    }

    fn close(&self) {
        let limit = Instant::now() + LAST_GC_TIMEOUT;
        while self.gc() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(10));
        }
        for tree in &self.0 {
            // Refused while it holds groups of running processes.
            let _ = fs::remove_dir(&tree.parent);
        }
    }
}

impl Drop for CgroupTrees {
    fn drop(&mut self) {
        self.close();
    }
}

/// Returns true if a process exists and is no zombie.
fn is_alive(pid: &OsStr) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
    // proc_pid_stat(5): the state follows the name, which is in parentheses.
    let state = |stat: String| stat.rsplit(')').next()?.trim_start().chars().next();
    stat.ok()
        .and_then(state)
        .is_some_and(|state| !"ZX".contains(state))
}

impl CgroupTree {
    /// Makes the parent group.
    fn open(&self) -> Result<(), CgroupError> {
        if self.version == CgroupVersion::Two {
            delegate(self.parent.parent().unwrap_or(&self.parent))?;
        }
        fs::create_dir_all(&self.parent).map_err(failed(&self.parent))?;
        // Another user may have made it.
        let writable = nix::unistd::access(&self.parent, AccessFlags::W_OK);
        writable.map_err(|e| failed(&self.parent)(e.into()))?;
        if self.version == CgroupVersion::Two {
            delegate(&self.parent)?;
        }
        Ok(())
    }

    /// Sets the limits of a group.
    fn limit(&self, group: &Path, limits: GroupLimits) -> Result<(), CgroupError> {
        for (file, value) in self.settings(limits) {
            let path = group.join(file);
            // A limit that this kernel lacks is skipped; one of a group that is gone is not.
            match set(&path, &value) {
                Err(e) if e.kind() == io::ErrorKind::NotFound && group.exists() => {}
                done => done.map_err(failed(&path))?,
            }
        }
        Ok(())
    }

    fn settings(&self, limits: GroupLimits) -> Vec<(&'static str, String)> {
        let (memory, tasks) = (limits.memory_bytes, limits.max_tasks);
        match &self.version {
            CgroupVersion::Two => {
                let mut all = vec![
                    ("memory.max", memory.to_string()),
                    ("pids.max", tasks.to_string()),
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
                    // Memory and swap together, at least as much as memory alone.
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

/// Reads the count of OOM kills from a group's memory events.
fn oom_kills_in(events: &str) -> u64 {
    let mut lines = events.lines();
    let count = lines.find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
    count.unwrap_or(0)
}

/// Writes to an existing file: creating one in a cgroup fails with a misleading error.
fn set(path: &Path, value: &str) -> io::Result<()> {
    use std::io::Write;
    let mut file = fs::File::options().write(true).open(path)?;
    file.write_all(value.as_bytes())
}

/// Enables the controllers in groups below `group`.
fn delegate(group: &Path) -> Result<(), CgroupError> {
    let control = group.join("cgroup.subtree_control");
    for controller in ["+memory", "+pids", "+io"] {
        match set(&control, controller) {
            // A missing controller is skipped.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            done => done.map_err(failed(&control))?,
        }
    }
    Ok(())
}

/// Finds the hierarchies with controllers that limit processes, from the mounts
/// (`/proc/self/mountinfo`) and groups (`/proc/self/cgroup`) of a process.
fn trees(mounts: &str, own: &str) -> Vec<CgroupTree> {
    let wanted = ["memory", "pids", "blkio"];
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
                    let controllers = options.split(',').filter(|o| wanted.contains(o));
                    CgroupVersion::One(controllers.map(str::to_owned).collect())
                }
                _ => return None,
            };
            let group = own.lines().find_map(|line| {
                // 4:memory:/path, and 0::/path of version 2
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
            let below = group
                .strip_prefix(root.trim_end_matches('/'))
                .unwrap_or(group);
            let own = Path::new(at).join(below.trim_start_matches('/'));
            // CgroupVersion 2: beside it, unless it is the root group.
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
            // CgroupVersion 2 is mounted beside version 1 without any of these controllers.
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

    fn found(mounts: &str) -> Vec<(String, CgroupVersion)> {
        let trees = trees(mounts, OWN_CGROUPS).into_iter();
        trees
            .map(|t| (t.parent.display().to_string(), t.version.clone()))
            .collect()
    }

    #[test]
    fn groups_are_below_the_daemons_own_in_each_hierarchy_with_controllers() {
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
    fn in_version_2_groups_are_beside_the_daemons_own() {
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
    fn oom_kills_are_counted_in_the_formats_of_both_versions() {
        let two = "low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n";
        let one = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n";
        assert_eq!(
            (oom_kills_in(two), oom_kills_in(one), oom_kills_in("")),
            (1, 2, 0)
        );
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

    #[test]
    fn no_group_of_an_ended_process_stays() {
        // Without root, or without groups, there is nothing to test.
        let Ok(Some(cgroups)) = Cgroups::find() else {
            return;
        };
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        while is_alive(OsStr::new(&pid.to_string())) {
            std::thread::yield_now();
        }
        // A zombie can still be moved to a group.
        let limits = GroupLimits {
            memory_bytes: 1 << 20,
            max_tasks: 4,
            swap: true,
        };
        let _ = cgroups.limit(pid, limits);
        let mut groups = cgroups.0.0.iter().map(|t| t.parent.join(pid.to_string()));
        let left: Vec<_> = groups.by_ref().filter(|g| g.exists()).collect();
        child.wait().unwrap();
        assert!(left.is_empty(), "{left:?}");
    }
}
