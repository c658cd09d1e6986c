//! Control groups of processes that run guests, with limits for memory, swap, tasks and disk I/O.
//!
//! CPU time is not limited: a VMM has as many busy threads as its guest has vCPUs. With weights and
//! quotas, guests did not answer for up to half a minute while twenty busy guests shared two
//! processors.
//!
//! A group exists as long as its process, which may outlive its daemon, and is named by the process
//! id. In version 1, the groups are below the daemon's own group. In version 2, a group has either
//! processes or limited subgroups, so the groups are siblings of the daemon's group. A service
//! manager can then restart a daemon while processes of the previous daemon continue to run.

mod tree;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tree::{CgroupTree, set, trees};

/// Maximum time for which [`Cgroups::close`] waits for terminated processes to leave their groups.
const LAST_GC_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time between the creation of a group and the entry of its process. An older empty group
/// is abandoned.
const MAX_EMPTY: Duration = Duration::from_secs(10);
/// Limits of one process and its children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimits {
    /// Maximum memory, in bytes.
    pub memory_bytes: u64,
    /// Maximum number of threads and processes.
    pub max_tasks: u64,
    /// True if memory may be swapped out.
    pub swap: bool,
}

/// Cgroup hierarchies in which processes are limited.
#[derive(Debug, Clone)]
pub struct Cgroups(Arc<CgroupTrees>);

/// Mounted hierarchies of control groups: one of version 2, or several of version 1.
#[derive(Debug)]
struct CgroupTrees(Vec<CgroupTree>);

/// Error of creating or configuring control groups.
#[derive(Debug, thiserror::Error)]
#[error("cannot limit processes with control groups: {path}: {source}; {CGROUP_HINT}")]
pub struct CgroupError {
    path: PathBuf,
    source: io::Error,
}

// Part of every error, since most errors are missing privileges.
const CGROUP_HINT: &str = "this requires root or, with version 2, permission to create siblings of the daemon's group; `jiffy serve --cgroups off` \
    disables these limits";

fn failed(path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError { path, source }
}

impl Cgroups {
    /// Finds the hierarchies of this process. `None` if the host has none of the required
    /// controllers.
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

    /// Creates the groups of a process that was just started, and moves the process there with
    /// limits. If the process has exited meanwhile, its groups are removed again, because its exit
    /// may have been handled before the last group was created.
    pub fn limit(&self, process: u32, limits: GroupLimits) -> Result<(), CgroupError> {
        self.make(process, Some(limits))
    }

    /// Moves an idle process into new groups without limits. [`Self::set_limits`] sets the limits
    /// later.
    pub fn enter(&self, process: u32) -> Result<(), CgroupError> {
        self.make(process, None)
    }

    /// Sets the limits of a process that has entered its groups.
    pub fn set_limits(&self, process: u32, limits: GroupLimits) -> Result<(), CgroupError> {
        let mut trees = self.0.0.iter();
        trees.try_for_each(|tree| tree.limit(&tree.parent.join(process.to_string()), limits))
    }

    /// Creates the groups of a process. Removes them again after a failure, or if the process has
    /// exited.
    fn make(&self, process: u32, limits: Option<GroupLimits>) -> Result<(), CgroupError> {
        let made = self.make_groups(process, limits);
        // A zombie can enter a group, so the result does not show whether the process runs.
        if made.is_err() || !is_alive(OsStr::new(&process.to_string())) {
            self.remove_group(process);
        }
        made
    }

    /// Creates the control groups of a process, sets their limits, and moves the process into them.
    fn make_groups(&self, process: u32, limits: Option<GroupLimits>) -> Result<(), CgroupError> {
        for tree in &self.0.0 {
            let group = tree.parent.join(process.to_string());
            // Retry: another daemon may have removed the empty parent.
            let made = fs::create_dir_all(&group).or_else(|_| fs::create_dir_all(&group));
            made.map_err(failed(&group))?;
            if let Some(limits) = limits {
                tree.limit(&group, limits)?;
            }
            // The limits are set first, so that the process is never in a group without limits.
            let procs = group.join("cgroup.procs");
            set(&procs, &process.to_string()).map_err(failed(&procs))?;
        }
        Ok(())
    }

    /// Returns the number of processes in the group that the kernel killed at the memory limit.
    pub fn memory_kills(&self, process: u32) -> u64 {
        let groups = self
            .0
            .0
            .iter()
            .map(|tree| tree.parent.join(process.to_string()));
        let texts = groups.flat_map(|group| {
            // Each version has one of the files.
            let files = ["memory.events", "memory.oom_control"];
            files.map(|file| fs::read_to_string(group.join(file)).unwrap_or_default())
        });
        texts.map(|text| oom_kills_in(&text)).sum()
    }

    /// Removes the groups of an exited process.
    pub fn remove_group(&self, process: u32) {
        for tree in &self.0.0 {
            // Ignore the error: if a task is still leaving the group, the next `gc` removes it.
            let _ = fs::remove_dir(tree.parent.join(process.to_string()));
        }
    }

    /// Removes the groups of exited processes. They exist if a task was still leaving the group, or
    /// if the process exited while no daemon was running.
    pub fn gc(&self) {
        // Ignore the result: remaining groups are removed by the next call.
        let _ = self.0.gc();
    }

    /// Removes all groups. No processes may be started afterwards. Blocks for at most 5 s, because
    /// tasks of terminated processes may still be leaving their groups.
    pub fn close(&self) {
        self.0.close();
    }
}

impl CgroupTrees {
    /// Removes the groups of exited processes. Returns whether a group could not be removed yet.
    /// Groups of running processes remain, so groups that another daemon is creating are safe.
    fn gc(&self) -> bool {
        let mut is_incomplete = false;
        for tree in &self.0 {
            let groups = fs::read_dir(&tree.parent).into_iter().flatten().flatten();
            for group in groups.filter(|g| g.file_type().is_ok_and(|kind| kind.is_dir())) {
                if !is_alive(&group.file_name()) {
                    is_incomplete |= fs::remove_dir(group.path()).is_err();
                } else if is_older(&group, MAX_EMPTY) {
                    // Removes an empty group: its process id was reused, or its process never
                    // entered. This fails if the group has processes, which is the usual case.
                    let _ = fs::remove_dir(group.path());
                }
            }
        }
        is_incomplete
    }

    /// Removes the groups of exited processes, and then the parent groups. A process that was just
    /// terminated leaves its group after some milliseconds, so failed removals are repeated.
    fn close(&self) {
        let limit = Instant::now() + LAST_GC_TIMEOUT;
        while self.gc() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(10));
        }
        for tree in &self.0 {
            // Ignore the error: the removal fails while the parent contains groups of running
            // processes.
            let _ = fs::remove_dir(&tree.parent);
        }
    }
}

impl Drop for CgroupTrees {
    fn drop(&mut self) {
        self.close();
    }
}

/// Returns whether a group was created at least `age` ago. The kernel may report a later time, so
/// old groups can count as young.
fn is_older(group: &fs::DirEntry, age: Duration) -> bool {
    let made = group.metadata().and_then(|metadata| metadata.modified());
    made.is_ok_and(|made| made.elapsed().is_ok_and(|elapsed| elapsed > age))
}

/// Returns whether a process exists and is not a zombie.
fn is_alive(pid: &OsStr) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
    // proc_pid_stat(5): the state follows the name, which is in parentheses and may contain others.
    let state = |stat: String| stat.rsplit(')').next()?.trim_start().chars().next();
    stat.ok()
        .and_then(state)
        .is_some_and(|state| !"ZX".contains(state))
}

/// Parses the number of OOM kills in the memory events of a group.
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
    fn gc_removes_an_empty_group_whose_process_id_was_reused() {
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
    fn limit_removes_the_groups_of_an_exited_process() {
        // Without root or control groups, this cannot be tested.
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
        // Ignore the result: only the groups that it leaves are checked.
        let _ = cgroups.limit(pid, limits);
        let mut groups = cgroups.0.0.iter().map(|t| t.parent.join(pid.to_string()));
        let left: Vec<_> = groups.by_ref().filter(|g| g.exists()).collect();
        child.wait().unwrap();
        assert!(left.is_empty(), "{left:?}");
    }
}
