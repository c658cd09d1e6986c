//! Control groups of processes that run guests: limits of memory, swap, tasks and disk I/O. CPU is
//! not limited: a VMM has as many busy threads as its guest has vCPUs, and groups with weights and
//! quotas kept the siblings of busy guests from answering for half a minute where twenty of them
//! shared two processors.
//!
//! A group lives as long as its process, also if that outlives its daemon, and is named by its
//! process id. In version 1 the groups are below the daemon's own. In version 2, where a group has
//! either processes or limited groups, they are beside it: a service manager can then restart a
//! daemon while processes of the former one run on.

mod tree;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tree::{CgroupTree, set, trees};

/// Time to wait, when the last user of groups closes, for the groups of VMMs that were just ended.
const LAST_GC_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time between the making of a group and the entry of its process.
const MAX_EMPTY: Duration = Duration::from_secs(10);
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

    /// Removes all groups when no more processes are started. Blocks for 5 s at most: tasks of
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
            let groups = fs::read_dir(&tree.parent).into_iter().flatten().flatten();
            for group in groups.filter(|g| g.file_type().is_ok_and(|kind| kind.is_dir())) {
                if !is_alive(&group.file_name()) {
                    left |= fs::remove_dir(group.path()).is_err();
                } else if is_older(&group, MAX_EMPTY) {
                    // Refused while it has processes. Otherwise its number is another's by now.
                    let _ = fs::remove_dir(group.path());
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

/// Returns true if a group was made that long ago, as far as the kernel remembers: at times it
/// takes one for younger than it is.
fn is_older(group: &fs::DirEntry, age: Duration) -> bool {
    let made = group.metadata().and_then(|metadata| metadata.modified());
    made.is_ok_and(|made| made.elapsed().is_ok_and(|elapsed| elapsed > age))
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

/// Reads the count of OOM kills from a group's memory events.
fn oom_kills_in(events: &str) -> u64 {
    let mut lines = events.lines();
    let count = lines.find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
    count.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tree::CgroupVersion;

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
    fn a_group_whose_number_another_process_has_by_now_goes() {
        let parent = tempfile::tempdir().unwrap();
        let tree = CgroupTree {
            parent: parent.path().to_owned(),
            version: CgroupVersion::Two,
        };
        let trees = CgroupTrees(vec![tree]);
        let group = parent.path().join(std::process::id().to_string());
        fs::create_dir(&group).unwrap();
        trees.gc();
        assert!(group.exists(), "its process may be about to enter");
        let long_ago = std::time::SystemTime::now() - MAX_EMPTY * 2;
        let file = fs::File::open(&group).unwrap();
        file.set_modified(long_ago).unwrap();
        trees.gc();
        assert!(!group.exists());
        fs::create_dir(&group).unwrap();
        fs::create_dir(group.join("process")).unwrap();
        fs::File::open(&group)
            .unwrap()
            .set_modified(long_ago)
            .unwrap();
        trees.gc();
        assert!(group.exists(), "it is in use");
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
