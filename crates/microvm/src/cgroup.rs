//! Control groups of VMMs: what the kernel gives each of them of the host's memory, tasks and disks. Not of its processors: a VMM has as
//! many threads that compute as its guest has vCPUs, and groups with weights and quotas kept busy guests' siblings from answering for half
//! a minute where twenty of them shared two processors.
//!
//! A group lives as long as its VMM, also if that outlives its daemon, and has its process id for a name. In version 1 they lie beneath
//! the group of whoever makes them. In version 2, where a group has either processes or groups that are limited, they lie beside it: so
//! a daemon that a service manager started can be started anew while VMMs of the former one run on.

use nix::unistd::AccessFlags;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The group that holds those of all VMMs.
const PARENT: &str = "jiffy";
/// Threads and processes of one VMM: vCPUs, event loop, writers of snapshots.
const MAX_TASKS: u64 = 64;
/// What a VMM needs besides its guest's memory, in bytes; measured are 0.4 MiB of its own and what the kernel keeps for KVM's tables.
const OVERHEAD: u64 = 128 << 20;
/// How long the last user of groups waits for those of VMMs that were just ended.
const LAST_SWEEP_LIMIT: Duration = Duration::from_secs(1);
/// What one VMM may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Memory of the guest in bytes.
    pub memory: u64,
}

/// One tree of groups, with the controllers that it has.
#[derive(Debug)]
struct Tree {
    /// Where groups of VMMs are made.
    parent: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Version {
    /// With these controllers.
    One(Vec<String>),
    Two,
}

/// Where the groups of VMMs are made.
#[derive(Debug, Clone)]
pub struct Cgroups(Arc<Trees>);

#[derive(Debug)]
struct Trees(Vec<Tree>);

/// Groups cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot limit VMMs by control groups: {path}: {source}; {HINT}")]
pub struct CgroupError {
    path: PathBuf,
    source: io::Error,
}

const HINT: &str = "it needs root, or with version 2 the right to make groups beside the daemon's own; `jiffy serve --cgroups off` \
    goes without";

fn failed(path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError { path, source }
}

impl Cgroups {
    /// The groups below this process's own. None if the host has none of the controllers that limit anything.
    pub fn find() -> Result<Option<Self>, CgroupError> {
        let read = |path| fs::read_to_string(path).map_err(failed(Path::new(path)));
        let mounts = read("/proc/self/mountinfo")?;
        let own = read("/proc/self/cgroup")?;
        let trees = trees(&mounts, &own);
        for tree in &trees {
            tree.open()?;
        }
        let found = Self(Arc::new(Trees(trees)));
        found.sweep();
        Ok((!found.0.0.is_empty()).then_some(found))
    }

    /// Makes the group of `vmm`, a process that has done nothing yet, and puts it there. Nothing stays
    /// of one that ended meanwhile: its end may have been noticed before the last group was made.
    pub(crate) fn limit(&self, vmm: u32, limits: Limits) -> Result<(), CgroupError> {
        let limited = self.make(vmm, limits);
        if limited.is_err() || !lives(OsStr::new(&vmm.to_string())) {
            self.forget(vmm);
        }
        limited
    }

    fn make(&self, vmm: u32, limits: Limits) -> Result<(), CgroupError> {
        for tree in &self.0.0 {
            let group = tree.parent.join(vmm.to_string());
            // Another daemon may have found the parent empty, and removed it.
            let made = fs::create_dir_all(&group).or_else(|_| fs::create_dir_all(&group));
            made.map_err(failed(&group))?;
            for (file, value) in tree.settings(limits) {
                let path = group.join(file);
                // What this kernel does not have limits nobody.
                match set(&path, &value) {
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    done => done.map_err(failed(&path))?,
                }
            }
            let procs = group.join("cgroup.procs");
            set(&procs, &vmm.to_string()).map_err(failed(&procs))?;
        }
        Ok(())
    }

    /// Number of processes in the group of a VMM that the kernel killed for its limit of memory.
    pub(crate) fn memory_kills(&self, vmm: u32) -> u64 {
        let groups = self
            .0
            .0
            .iter()
            .map(|tree| tree.parent.join(vmm.to_string()));
        let texts = groups.flat_map(|group| {
            let files = ["memory.events", "memory.oom_control"];
            files.map(|file| fs::read_to_string(group.join(file)).unwrap_or_default())
        });
        texts.map(|text| kills_in(&text)).sum()
    }

    /// Removes the group of a VMM that is gone.
    pub(crate) fn forget(&self, vmm: u32) {
        for tree in &self.0.0 {
            // One that a task is still leaving is removed by the next sweep.
            let _ = fs::remove_dir(tree.parent.join(vmm.to_string()));
        }
    }

    /// Removes groups of VMMs that are gone: those that a task was still leaving when they were to go,
    /// and those of VMMs that ended while no daemon was there, or with the last one.
    pub fn sweep(&self) {
        let _ = self.0.sweep();
    }

    /// Removes what is left when no VMM is started any more. Blocks for a second at most: tasks of
    /// VMMs that were just ended may still be on their way out of their groups.
    pub fn close(&self) {
        self.0.close();
    }
}

impl Trees {
    /// Removes groups of VMMs that are gone; tells whether one could not be removed yet. Groups of
    /// others that are just being made are left alone: their VMMs live.
    fn sweep(&self) -> bool {
        let mut left = false;
        for tree in &self.0 {
            for group in fs::read_dir(&tree.parent).into_iter().flatten().flatten() {
                let is_group = group.file_type().is_ok_and(|t| t.is_dir());
                if is_group && !lives(&group.file_name()) {
                    left |= fs::remove_dir(group.path()).is_err();
                }
            }
        }
        left
    }

    fn close(&self) {
        let limit = Instant::now() + LAST_SWEEP_LIMIT;
        while self.sweep() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(10));
        }
        for tree in &self.0 {
            // Refused while VMMs run on, or others have theirs there.
            let _ = fs::remove_dir(&tree.parent);
        }
    }
}

impl Drop for Trees {
    fn drop(&mut self) {
        self.close();
    }
}

/// Whether a process is there, and more of it than its end to be noticed.
fn lives(pid: &OsStr) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
    // proc_pid_stat(5): the state follows the name, which is in parentheses.
    let state = |stat: String| stat.rsplit(')').next()?.trim_start().chars().next();
    stat.ok()
        .and_then(state)
        .is_some_and(|state| !"ZX".contains(state))
}

impl Tree {
    /// Makes the parent.
    fn open(&self) -> Result<(), CgroupError> {
        if self.version == Version::Two {
            delegate(self.parent.parent().unwrap_or(&self.parent))?;
        }
        fs::create_dir_all(&self.parent).map_err(failed(&self.parent))?;
        // It may be there since another user made it.
        let writable = nix::unistd::access(&self.parent, AccessFlags::W_OK);
        writable.map_err(|e| failed(&self.parent)(e.into()))?;
        if self.version == Version::Two {
            delegate(&self.parent)?;
        }
        Ok(())
    }

    fn settings(&self, limits: Limits) -> Vec<(&'static str, String)> {
        // The writer of a snapshot shares memory with its guest until that changes it: the worst case is twice the guest.
        let memory = limits.memory.saturating_mul(2).saturating_add(OVERHEAD);
        match &self.version {
            Version::Two => vec![
                ("memory.max", memory.to_string()),
                ("pids.max", MAX_TASKS.to_string()),
                ("io.weight", "default 100".to_owned()),
            ],
            Version::One(controllers) => {
                let all = [
                    ("memory", "memory.limit_in_bytes", memory),
                    ("pids", "pids.max", MAX_TASKS),
                    ("blkio", "blkio.bfq.weight", 100),
                ];
                let ours = all
                    .into_iter()
                    .filter(|(c, ..)| controllers.iter().any(|own| own == c));
                ours.map(|(_, file, value)| (file, value.to_string()))
                    .collect()
            }
        }
    }
}

/// The count in a group's events of memory.
fn kills_in(events: &str) -> u64 {
    let mut lines = events.lines();
    let count = lines.find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
    count.unwrap_or(0)
}

/// Writes to a file that is there: an attempt to make one is refused in other words.
fn set(path: &Path, value: &str) -> io::Result<()> {
    use std::io::Write;
    let mut file = fs::File::options().write(true).open(path)?;
    file.write_all(value.as_bytes())
}

/// Lets groups below `group` be limited.
fn delegate(group: &Path) -> Result<(), CgroupError> {
    let control = group.join("cgroup.subtree_control");
    for controller in ["+memory", "+pids", "+io"] {
        match set(&control, controller) {
            // A controller that is not there limits nobody.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            done => done.map_err(failed(&control))?,
        }
    }
    Ok(())
}

/// The trees with controllers that limit VMMs, of a process with these mounts (`/proc/self/mountinfo`) in these groups
/// (`/proc/self/cgroup`).
fn trees(mounts: &str, own: &str) -> Vec<Tree> {
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
                "cgroup2" => Version::Two,
                "cgroup" => {
                    let controllers = options.split(',').filter(|o| wanted.contains(o));
                    Version::One(controllers.map(str::to_owned).collect())
                }
                _ => return None,
            };
            let group = own.lines().find_map(|line| {
                // 4:memory:/path, and 0::/path of version 2
                let (_, line) = line.split_once(':')?;
                let (controllers, path) = line.split_once(':')?;
                let ours = match &version {
                    Version::Two => controllers.is_empty(),
                    Version::One(ours) => {
                        controllers.split(',').any(|c| ours.iter().any(|o| o == c))
                    }
                };
                ours.then_some(path)
            })?;
            let below = group
                .strip_prefix(root.trim_end_matches('/'))
                .unwrap_or(group);
            let own = Path::new(at).join(below.trim_start_matches('/'));
            // Version 2: beside it, unless it is the root of all.
            let above = match &version {
                Version::Two if below.trim_matches('/').is_empty() => &own,
                Version::Two => own.parent()?,
                Version::One(_) => &own,
            };
            Some(Tree {
                parent: above.join(PARENT),
                version,
            })
        })
        .filter(|tree| match tree.version {
            Version::One(_) => true,
            // Version 2 is mounted beside version 1 without any of these controllers.
            Version::Two => {
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

    const OWN: &str =
        "5:blkio:/\n4:memory:/api/30179\n3:cpuset:/\n2:cpu,cpuacct:/\n1:pids,misc:/\n0::/user\n";

    fn found(mounts: &str) -> Vec<(String, Version)> {
        let trees = trees(mounts, OWN).into_iter();
        trees
            .map(|t| (t.parent.display().to_string(), t.version.clone()))
            .collect()
    }

    #[test]
    fn groups_lie_below_our_own_in_each_tree_that_limits() {
        let mounts = "\
            30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
            31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            32 30 0:28 / /sys/fs/cgroup/pids,misc rw shared:9 - cgroup cgroup rw,pids,misc\n\
            33 30 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
            34 30 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n";
        let one = |c: &str| Version::One(vec![c.to_owned()]);
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
    fn in_version_2_they_lie_beside_our_own_whose_controllers_count() {
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
    fn kills_for_memory_are_counted_in_the_words_of_both_versions() {
        let two = "low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n";
        let one = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n";
        assert_eq!((kills_in(two), kills_in(one), kills_in("")), (1, 2, 0));
    }

    #[test]
    fn a_vmm_gets_room_for_its_guest_and_a_copy_and_few_tasks() {
        let limits = Limits { memory: 1 << 30 };
        let tree = |version| Tree {
            parent: PathBuf::new(),
            version,
        };
        let two = tree(Version::Two).settings(limits);
        let room = (2u64 << 30) + OVERHEAD;
        assert!(two.contains(&("memory.max", room.to_string())));
        assert!(two.contains(&("pids.max", "64".to_owned())));
        let one = tree(Version::One(vec!["pids".to_owned()])).settings(limits);
        assert_eq!(one, [("pids.max", "64".to_owned())]);
    }

    #[test]
    fn a_process_that_has_ended_gets_no_group_that_stays() {
        // Without root, or without groups, there is nothing to leave.
        let Ok(Some(cgroups)) = Cgroups::find() else {
            return;
        };
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        while lives(OsStr::new(&pid.to_string())) {
            std::thread::yield_now();
        }
        // Not yet waited for, it can still be moved.
        let _ = cgroups.limit(pid, Limits { memory: 1 << 20 });
        let mut groups = cgroups.0.0.iter().map(|t| t.parent.join(pid.to_string()));
        let left: Vec<_> = groups.by_ref().filter(|g| g.exists()).collect();
        child.wait().unwrap();
        assert!(left.is_empty(), "{left:?}");
    }
}
