//! [`HostFigures`]: free memory, disk space, tasks and pressure of the host, read from `/proc`, the
//! control group and the file system. The admission of each guest reads them.

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::statvfs;
use parking_lot::Mutex;
use std::fmt::Debug;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Share of time for which tasks waited for a resource, in percent of the last ten seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pressure {
    /// At least one task waited for a processor.
    pub cpu_some: f64,
    /// At least one task waited for memory.
    pub memory_some: f64,
    /// All tasks waited for memory.
    pub memory_full: f64,
    /// All tasks waited for disks.
    pub io_full: f64,
}

/// Free resources of the host. A figure that the kernel does not report is `None` and rejects no
/// request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HostFigures {
    /// Total memory, in MiB: the machine's, or the control group's limit if that is smaller.
    pub memory_total_mib: Option<u64>,
    /// Memory that is available without swapping, in MiB.
    pub memory_available_mib: Option<u64>,
    /// Free space for unprivileged users on the data directory's disk, in MiB.
    pub disk_free_mib: Option<u64>,
    /// Size of the data directory's disk, in MiB.
    pub disk_total_mib: Option<u64>,
    /// Tasks (processes and threads) that can still be started.
    pub tasks_free: Option<u64>,
    /// Descriptors that this process can still open.
    pub descriptors_free: Option<u64>,
    /// Pressure stall information. `None` if the kernel does not support it.
    pub pressure: Option<Pressure>,
}

/// Source of the free resources of a host.
pub trait HostReader: Debug + Send + Sync + 'static {
    /// Returns the present figures. Called before every operation that needs memory, so the call
    /// must take microseconds.
    fn read(&self) -> HostFigures;
}

/// Time for which slow figures are cached. The kernel updates the pressure every two seconds, and
/// only an administrator changes the maximum number of tasks.
const SLOW_PERIOD: Duration = Duration::from_millis(500);

/// Figures that change slowly.
#[derive(Debug, Clone, Copy)]
struct SlowFigures {
    /// Maximum number of tasks.
    max_tasks: Option<u64>,
    pressure: Option<Pressure>,
}

impl SlowFigures {
    fn read() -> Self {
        let (ids, threads) = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max");
        let [ids, threads] = [ids, threads].map(|file| number(&text(file)?));
        Self {
            max_tasks: ids.zip(threads).map(|(ids, threads)| ids.min(threads)),
            pressure: pressure(),
        }
    }
}

/// Reads the figures of the machine on which this process runs.
#[derive(Debug)]
pub struct KernelReader {
    data: PathBuf,
    /// Directory of the control group of this process. `None` if there is none.
    group: Option<PathBuf>,
    /// Figures that take long to read, with the time of the reading.
    slow: Mutex<Option<(Instant, SlowFigures)>>,
}

impl KernelReader {
    /// Creates a reader for a host whose data directory is `data`.
    pub fn new(data: &Path) -> Self {
        let group = fs::read_to_string("/proc/self/cgroup").ok();
        // The line of control groups v2 is `0::/PATH`.
        let group = group.and_then(|text| {
            let path = text.lines().find_map(|l| l.strip_prefix("0::"))?;
            Some(Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/')))
        });
        Self {
            data: data.to_owned(),
            group,
            slow: Mutex::default(),
        }
    }

    /// Reads a number of the control group. `None` if the file is missing or contains `max`.
    fn group(&self, file: &str) -> Option<u64> {
        number(&text(self.group.as_ref()?.join(file))?)
    }

    /// Returns the memory use of the control group in bytes, without the page cache that the kernel
    /// can reclaim.
    fn group_used_bytes(&self) -> u64 {
        let used = self.group("memory.current").unwrap_or(0);
        let files = self.group.as_ref().map(|group| group.join("memory.stat"));
        let cached = files.and_then(text).map_or(0, |text| cached_bytes(&text));
        used.saturating_sub(cached)
    }

    /// Figures that are expensive to read. They are read again after [`SLOW_PERIOD`].
    fn slow(&self) -> SlowFigures {
        let mut slow = self.slow.lock();
        match *slow {
            Some((read, figures)) if read.elapsed() < SLOW_PERIOD => figures,
            _ => {
                let figures = SlowFigures::read();
                *slow = Some((Instant::now(), figures));
                figures
            }
        }
    }

    /// Number of tasks (processes and threads) that can still start, on the host and in the control
    /// group.
    fn tasks_free(&self, max_tasks: Option<u64>) -> Option<u64> {
        // Format of the file: `0.50 0.40 0.30 2/345 6789`. The fourth field has the numbers of
        // runnable and existing tasks.
        let load = text("/proc/loadavg")?;
        let existing = load.split_whitespace().nth(3)?.split_once('/')?.1;
        let existing: u64 = existing.parse().ok()?;
        let free = max_tasks?.saturating_sub(existing);
        let group_free = self
            .group("pids.max")
            .map(|limit| limit.saturating_sub(self.group("pids.current").unwrap_or(0)));
        Some(group_free.map_or(free, |group_free| group_free.min(free)))
    }
}

impl HostReader for KernelReader {
    fn read(&self) -> HostFigures {
        let slow = self.slow();
        let memory = text("/proc/meminfo").unwrap_or_default();
        let (mut total, mut available) = (mib(&memory, "MemTotal:"), mib(&memory, "MemAvailable:"));
        if let Some(limit) = self.group("memory.max").map(|bytes| bytes >> 20) {
            let used = self.group_used_bytes() >> 20;
            // The smaller limit applies: a group may be configured with more than the machine has.
            total = Some(total.map_or(limit, |t| t.min(limit)));
            let free = limit.saturating_sub(used);
            available = Some(available.map_or(free, |a| a.min(free)));
        }
        // A missing figure rejects no request, so errors are not reported.
        let disk = statvfs(&self.data).ok();
        let disk_mib = |blocks: u64, size: u64| blocks.saturating_mul(size) >> 20;
        HostFigures {
            memory_total_mib: total,
            memory_available_mib: available,
            disk_free_mib: disk.map(|d| disk_mib(d.blocks_available(), d.fragment_size())),
            disk_total_mib: disk.map(|d| disk_mib(d.blocks(), d.fragment_size())),
            tasks_free: self.tasks_free(slow.max_tasks),
            descriptors_free: descriptors_free(),
            pressure: slow.pressure,
        }
    }
}

/// Reads the first 4 KiB of a kernel file. No figure comes later in these files.
fn text(file: impl AsRef<Path>) -> Option<String> {
    let mut buffer = [0; 4096];
    let read = File::open(file).ok()?.read(&mut buffer).ok()?;
    String::from_utf8(buffer.get(..read)?.to_vec()).ok()
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

fn mib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(number(line.trim_end().strip_suffix("kB")?)? >> 10)
}

/// Returns the bytes of reclaimable page cache according to a `memory.stat`: file pages that are
/// neither dirty nor under writeback.
fn cached_bytes(text: &str) -> u64 {
    let bytes = |name: &str| {
        let mut lines = text.lines();
        let value = lines.find_map(|line| number(line.strip_prefix(name)?.strip_prefix(' ')?));
        value.unwrap_or(0)
    };
    let cached = bytes("active_file").saturating_add(bytes("inactive_file"));
    cached.saturating_sub(bytes("file_dirty").saturating_add(bytes("file_writeback")))
}

/// Number of file descriptors that this process can still open.
fn descriptors_free() -> Option<u64> {
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    // Since Linux 6.2 the size of the directory is the number of descriptors. Older kernels report
    // 0.
    let open = match fs::metadata("/proc/self/fd").ok()?.len() {
        0 => u64::try_from(fs::read_dir("/proc/self/fd").ok()?.count()).ok()?,
        open => open,
    };
    Some(soft.saturating_sub(open))
}

/// Pressure of the host: the shares of time in which tasks waited for processor, memory and disks.
fn pressure() -> Option<Pressure> {
    let read = |what: &str| text(format!("/proc/pressure/{what}"));
    let (cpu, memory, io) = (read("cpu")?, read("memory")?, read("io")?);
    Some(Pressure {
        cpu_some: average(&cpu, "some")?,
        memory_some: average(&memory, "some")?,
        memory_full: average(&memory, "full")?,
        io_full: average(&io, "full")?,
    })
}

/// Returns `avg10` of one line of a pressure file.
fn average(text: &str, line: &str) -> Option<f64> {
    let mut words = text.lines().find(|l| l.starts_with(line))?.split(' ');
    words.find_map(|w| w.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_files_are_parsed() {
        let memory = "MemTotal:       24684348 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n";
        assert_eq!(mib(memory, "MemTotal:"), Some(24_105));
        assert_eq!(mib(memory, "MemAvailable:"), Some(2));
        assert_eq!(mib(memory, "Swap:"), None);
        let file = "some avg10=2.10 avg60=9.90 avg300=35.89 total=4593\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(average(file, "some"), Some(2.1));
        assert_eq!(average(file, "full"), Some(0.5));
        assert_eq!(average("", "full"), None);
        assert_eq!(number("max\n"), None);
        let group = "anon 7\nfile 900\nfile_dirty 30\nfile_writeback 20\nshmem 100\n\
                     inactive_file 500\nactive_file 300\n";
        assert_eq!(cached_bytes(group), 750);
        assert_eq!(cached_bytes("file_dirty 30\n"), 0);
    }

    #[test]
    fn figures_of_this_host_are_read() {
        let figures = KernelReader::new(Path::new("/")).read();
        let (total, free) = (figures.memory_total_mib, figures.memory_available_mib);
        assert!(free.unwrap() > 0 && free <= total, "{figures:?}");
        assert!(
            figures.disk_free_mib <= figures.disk_total_mib,
            "{figures:?}"
        );
        assert!(figures.tasks_free.unwrap() > 0, "{figures:?}");
        let before = descriptors_free().unwrap();
        let files: Vec<_> = (0..50).map(|_| fs::File::open("/").unwrap()).collect();
        assert!(descriptors_free().unwrap() < before, "{}", files.len());
    }
}
