//! Runs host programs that build images (`mkfs.erofs`, `mmdebstrap`, shell scripts), optionally
//! confined.
//!
//! The *jail* of a program includes a private mount namespace and a filter of its system calls.

use crate::deadline::Deadline;
use crate::jail::{self, system_calls};
use crate::lock::Lock;
use jiffy_confinement::{
    CapabilitySet, FsView, SyscallFilter, detach, own_user_id, private_mounts,
};
use std::collections::VecDeque;
use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Error of a host program.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("{program} is not installed: run `apt-get install {package}`")]
    Missing {
        program: &'static str,
        package: &'static str,
    },
    #[error(
        "cannot run {program} in a chroot, which forbids private mounts and user namespaces: {}, or \
         import a template file (`jiffy template import`)",
        jiffy_rootless::CHROOT_REMEDY
    )]
    Chroot { program: &'static str },
    #[error("cannot run {program}")]
    Run {
        program: &'static str,
        source: io::Error,
    },
    /// The program failed; with its last lines of output.
    #[error("{program} failed ({status}):\n{tail}")]
    Failed {
        program: &'static str,
        status: ExitStatus,
        tail: String,
    },
}

/// A host program and its Debian package.
pub(crate) struct Tool {
    program: &'static str,
    package: &'static str,
    command: Command,
    /// True if the program runs in a mount namespace of its own.
    private_mounts: bool,
    overlay: Option<OverlayMount>,
    jail: Option<Jail>,
    /// Time limit. `None` for no limit.
    deadline: Option<Duration>,
}

/// Confinement of a program.
struct Jail {
    /// File tree that the program sees.
    view: FsView,
    /// Capabilities of the program.
    capabilities: CapabilitySet,
    /// File that the program writes. Its owner is changed to the user of the program.
    output: CString,
    /// Filter that is applied last, before the program starts.
    filter: SyscallFilter,
}

/// Read-only overlay that is mounted in the private mount namespace of one program.
struct OverlayMount {
    /// Working directory during the mount. The mount options use names relative to it, since all
    /// options together must fit into one page.
    from: CString,
    /// Mount point.
    at: CString,
    options: CString,
}

/// Maximum number of output lines in an error message.
const MAX_TAIL_LINES: usize = 20;

impl Tool {
    pub(crate) fn new(program: &'static str, package: &'static str) -> Self {
        let mut command = Command::new(program);
        // The PATH of ordinary users lacks the directories of the file system tools.
        let mut path = env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
        path.push(":/usr/sbin:/sbin");
        command
            .env("PATH", path)
            // The output of programs is shown and parsed, so its language is fixed.
            .env("LC_ALL", "C.UTF-8")
            .stdin(Stdio::null());
        Self {
            program,
            package,
            command,
            private_mounts: false,
            overlay: None,
            jail: None,
            deadline: None,
        }
    }

    pub(crate) fn arg(&mut self, arg: impl AsRef<OsStr>) -> &mut Self {
        self.command.arg(arg);
        self
    }

    pub(crate) fn args<A: AsRef<OsStr>>(&mut self, args: impl IntoIterator<Item = A>) -> &mut Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(&mut self, name: &str, value: impl AsRef<OsStr>) -> &mut Self {
        self.command.env(name, value);
        self
    }

    /// Runs the program in a private mount namespace, so that its mounts are removed when it exits.
    /// Requires root.
    pub(crate) fn private_mounts(&mut self) -> &mut Self {
        self.private_mounts = true;
        self
    }

    /// Mounts an overlay of `lower` at the directory `at` for this program only. `lower` contains
    /// names in `from`, uppermost first. Requires root.
    pub(crate) fn overlay(
        &mut self,
        from: &Path,
        lower: &[String],
        at: &Path,
    ) -> io::Result<&mut Self> {
        let path = |path: &Path| CString::new(path.as_os_str().as_bytes());
        // Redirects (marks of overlayfs that name another directory as the origin) are not
        // followed. The unpacker sets only two kinds of marks: whiteouts for removed files and
        // opaque directories.
        let options = format!(
            "lowerdir={},redirect_dir=nofollow,metacopy=off",
            lower.join(":")
        );
        self.overlay = Some(OverlayMount {
            from: path(from)?,
            at: path(at)?,
            options: CString::new(options)?,
        });
        Ok(self.private_mounts())
    }

    /// Confines the program: it sees only the files of `view`, runs as an unprivileged user with
    /// the given capabilities, and has no network. The file `output` is given to that user.
    /// Requires root.
    pub(crate) fn jailed(
        &mut self,
        view: FsView,
        capabilities: CapabilitySet,
        output: &Path,
    ) -> io::Result<&mut Self> {
        // The environment may contain secrets. PATH refers to directories of the view.
        let programs = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        self.command.env_clear();
        self.env("PATH", programs).env("LC_ALL", "C.UTF-8");
        self.jail = Some(Jail {
            view,
            capabilities,
            output: CString::new(output.as_os_str().as_bytes())?,
            filter: system_calls::program()?,
        });
        Ok(self)
    }

    /// Kills the program after this time.
    pub(crate) fn deadline(&mut self, timeout: Duration) -> &mut Self {
        self.deadline = Some(timeout);
        self
    }

    /// Runs the program until it exits and passes each line of its output to `on_line`.
    ///
    /// If this process dies, the program receives SIGTERM. The program holds `lock` until it has
    /// exited, so that no other process starts to work on the same files before that.
    pub(crate) fn run(
        mut self,
        lock: Option<&Lock>,
        on_line: &mut dyn FnMut(&str),
    ) -> Result<(), CommandError> {
        let program = self.program;
        let failed = |source| CommandError::Run { program, source };
        // Both outputs share one pipe, so that their lines stay in order.
        let (output, input) = io::pipe().map_err(failed)?;
        self.command
            .stdout(input.try_clone().map_err(failed)?)
            .stderr(input);
        // The closure runs in the child process, which shares the descriptor numbers of this
        // process.
        let lock = lock.map(|lock| lock.as_fd().as_raw_fd());
        let (private_mounts, overlay) = (self.private_mounts, self.overlay.take());
        let jail = self.jail.take();
        // SAFETY: between fork and exec only system calls are made, which is async-signal-safe; the
        // descriptor stays open because the caller's borrow of the lock outlives the spawn.
        unsafe {
            self.command.pre_exec(move || {
                // The signal refers to the thread that forks. That thread waits for the program
                // below, so it exits earlier only if the whole process dies.
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) < 0 {
                    return Err(io::Error::last_os_error());
                }
                // A jail includes a private mount namespace.
                if jail.is_some() {
                    detach()?;
                } else if private_mounts {
                    detach_mounts()?;
                }
                // The overlay is mounted before the jail is entered, since the jail's filter
                // forbids `mount`.
                if let Some(overlay) = &overlay {
                    overlay.mount()?;
                }
                if let Some(fd) = lock
                    // Clears close-on-exec: the program inherits the descriptor, which holds the
                    // lock even if this process dies.
                    && libc::fcntl(fd, libc::F_SETFD, 0) < 0
                {
                    return Err(io::Error::last_os_error());
                }
                jail.as_ref().map_or(Ok(()), Jail::enter)
            });
        }
        let mut child = self.command.spawn().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => CommandError::Missing {
                program,
                package: self.package,
            },
            // In a chroot, `/` is not a mount point, so making its mounts private fails with
            // EINVAL.
            io::ErrorKind::InvalidInput if private_mounts && jiffy_rootless::is_chroot() => {
                CommandError::Chroot { program }
            }
            _ => CommandError::Run { program, source },
        })?;
        // `self.command` also holds the write end of the pipe. While it is open, the output would
        // never end.
        drop(self.command);
        let watch = self
            .deadline
            .map(|timeout| Deadline::start(&child, timeout))
            .transpose();
        if watch.is_err() {
            // Without a deadline the program could run forever. Killing it ends the output below.
            let _ = child.kill();
        }
        // The child is reaped in any case, before an error of the output is returned.
        let tail = read_lines(output, on_line).map_err(failed);
        let status = child.wait().map_err(failed)?;
        // The deadline is dropped only after the program was reaped, so that it applies until the
        // exit. A late kill is harmless: the pidfd never refers to another process.
        drop(watch.map_err(failed)?);
        let tail = tail?;
        if status.success() {
            Ok(())
        } else {
            Err(CommandError::Failed {
                program,
                status,
                tail: Vec::from(tail).join("\n"),
            })
        }
    }
}

impl OverlayMount {
    /// Mounts the overlay. Runs between fork and exec, and therefore makes system calls only and
    /// does not allocate.
    fn mount(&self) -> io::Result<()> {
        // SAFETY: all pointers refer to zero-terminated strings that live through the calls.
        let done = unsafe {
            libc::chdir(self.from.as_ptr()) == 0
                && libc::mount(
                    c"overlay".as_ptr(),
                    self.at.as_ptr(),
                    c"overlay".as_ptr(),
                    libc::MS_RDONLY,
                    self.options.as_ptr().cast(),
                ) == 0
        };
        if done {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Jail {
    /// Confines the calling process. Runs between fork and exec, and therefore makes system calls
    /// only and does not allocate.
    fn enter(&self) -> io::Result<()> {
        // The process id, from which the user is derived, does not change at the exec.
        let user = own_user_id();
        // SAFETY: the string is zero-terminated.
        if unsafe { libc::chown(self.output.as_ptr(), user, user) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // The output was changed above, since the view hides its path.
        self.view.enter()?;
        jail::drop_privileges(self.capabilities)?;
        self.filter.apply()
    }
}

/// Moves the calling process into a new mount namespace.
fn detach_mounts() -> io::Result<()> {
    // SAFETY: no pointers.
    match unsafe { libc::unshare(libc::CLONE_NEWNS) } {
        0 => Ok(private_mounts()?),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Passes lines on and returns the last lines. A carriage return ends a line as well, since
/// progress bars use it.
fn read_lines(output: impl Read, on_line: &mut dyn FnMut(&str)) -> io::Result<VecDeque<String>> {
    let mut tail = VecDeque::new();
    for chunk in BufReader::new(output).split(b'\n') {
        let chunk = chunk?;
        // Programs may print names of files that are not UTF-8.
        for line in String::from_utf8_lossy(&chunk)
            .split('\r')
            .map(str::trim_end)
            .filter(|line| !line.is_empty())
        {
            on_line(line);
            // Only the last lines are retained, so a talkative program uses little memory.
            if tail.len() == MAX_TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(line.to_owned());
        }
    }
    Ok(tail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skipped;

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let error = Tool::new("mkfs.nonexistent", "nonexistent-utils")
            .run(None, &mut |_| ())
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "mkfs.nonexistent is not installed: run `apt-get install nonexistent-utils`"
        );
    }

    #[test]
    fn a_failure_shows_the_last_lines() {
        let mut shell = Tool::new("sh", "dash");
        shell.args([
            "-c",
            "for i in $(seq 50); do echo line $i; done; echo oops >&2; exit 3",
        ]);
        let mut lines = 0;
        let message = shell
            .run(None, &mut |_| lines += 1)
            .unwrap_err()
            .to_string();
        assert_eq!(lines, 51);
        assert!(
            message.starts_with("sh failed (exit status: 3):\nline 32\n"),
            "{message}"
        );
        assert!(message.ends_with("oops"));
    }

    #[test]
    fn private_mounts_are_removed_when_the_program_exits() {
        if !nix::unistd::Uid::effective().is_root() {
            skipped(
                "command::tests::private_mounts_are_removed_when_the_program_exits",
                "needs root",
            );
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let mut shell = Tool::new("sh", "dash");
        shell
            .private_mounts()
            .arg("-c")
            .arg(r#"mount -t tmpfs none "$1" && touch "$1/inside" && ls "$1""#);
        shell.arg("sh").arg(dir.path());
        let mut output = String::new();
        shell.run(None, &mut |line| output += line).unwrap();
        assert_eq!(output, "inside");
        assert!(
            !std::fs::read_to_string("/proc/self/mountinfo")
                .unwrap()
                .contains(dir.path().to_str().unwrap())
        );
    }

    #[test]
    fn the_lock_is_free_after_the_program_that_inherited_it_has_exited() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = Lock::take(&path, || ()).unwrap();
        // The program waits for input while `hold` is open.
        let (gate, hold) = io::pipe().unwrap();
        let mut shell = Tool::new("sh", "dash");
        shell.args(["-c", "read -r line || :"]);
        shell.command.stdin(gate);
        std::thread::scope(|scope| {
            let child = scope.spawn(|| {
                let mut shell = shell;
                shell.args(["sh"]);
                shell.run(Some(&lock), &mut |_| ())
            });
            // The program exits when its input is closed.
            drop(hold);
            child.join().unwrap().unwrap();
        });
        drop(lock);
        // A program that another test starts at this moment holds a copy of the descriptor until
        // its exec.
        let free = (0..100).any(|_| {
            let mut waited = false;
            drop(Lock::take(&path, || waited = true).unwrap());
            !waited
        });
        assert!(free);
    }
}
