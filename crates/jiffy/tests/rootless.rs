//! Tests for sandboxes of an unprivileged user, who has root privileges only in user namespaces.

use crate::support::lab::{
    HOST, HOST6, Lab, PRIVATE, PRIVATE6, PUBLIC, PUBLIC6, ip, mount_separate_run, with_lab,
    with_lab6,
};
use crate::support::{Done, alive, engine, finish, network_probe, programs, skip, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::mount::{MsFlags, mount};
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use tempfile::TempDir;

/// First of the unnamed user ids. Each id belongs to one test, which kills remaining processes.
const FIRST_USER: u32 = 42_420;
/// Devices that udev makes accessible to all users or to a group.
const DEVICES: [(&str, u64, u64); 2] = [("/dev/kvm", 10, 232), ("/dev/net/tun", 10, 200)];

/// Directory with the tested programs, in a mount namespace of the test.
const PROGRAMS: &str = "/run/programs";

/// Unprivileged user with a data directory.
struct User {
    uid: u32,
    dir: TempDir,
}

/// Returns a user id that no other test uses.
fn new_uid() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Other processes run other tests of this file at the same time. A process uses at most four
    // ids.
    let of_process = FIRST_USER + std::process::id() % 10_000 * 4;
    of_process + NEXT.fetch_add(1, Ordering::Relaxed)
}

impl User {
    /// Creates a user with the stock template and the tested programs.
    fn new(uid: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let user = Self { uid, dir };
        let home = user.home();
        let real = std::env::var_os("JIFFY_HOME")
            .map_or_else(|| PathBuf::from("/var/lib/jiffy"), PathBuf::from);
        let manifest = fs::read_to_string(real.join("templates/base/template.json")).unwrap();
        for name in ["images", "templates/base"] {
            fs::create_dir_all(home.join(name)).unwrap();
        }
        fs::write(home.join("templates/base/template.json"), &manifest).unwrap();
        for image in fs::read_dir(real.join("images")).unwrap().flatten() {
            let name = image.file_name().into_string().unwrap();
            let digest = name.trim_start_matches("sha256-").split('.').next();
            if name.ends_with(".erofs") && manifest.contains(digest.unwrap()) {
                fs::copy(image.path(), home.join("images").join(name)).unwrap();
            }
        }
        set_owner_recursively(user.dir.path(), uid);
        fs::set_permissions(user.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        user
    }

    fn home(&self) -> PathBuf {
        self.dir.path().join("home/.local/share/jiffy")
    }

    /// Returns a `jiffy` command of the user, without root's environment.
    fn jiffy(&self, args: &[&str]) -> Command {
        let mut command = Command::new(Path::new(PROGRAMS).join("jiffy"));
        command
            .args(args)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", self.dir.path().join("home"))
            .current_dir("/")
            // `uid` also removes supplementary groups, because the caller is root.
            .uid(self.uid)
            .gid(self.uid)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(engine) = engine::wanted() {
            command.env("JIFFY_ENGINE", engine);
        }
        command
    }

    fn call(&self, args: &[&str]) -> Done {
        finish(self.jiffy(args).spawn().unwrap())
    }

    fn ok(&self, args: &[&str]) -> String {
        let done = self.call(args);
        assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
        done.stdout.trim_end().to_owned()
    }

    fn sh(&self, id: &str, script: &str) -> String {
        self.ok(&["exec", id, "--", "sh", "-c", script])
    }

    /// Starts a daemon in the foreground, and waits until it listens.
    fn serve(&self, options: &[&str]) -> Child {
        let options = [&["serve", "--no-listen", "--warm-pool", "0"], options].concat();
        let mut daemon = self.jiffy(&options);
        let mut daemon = daemon
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        wait_for("the daemon", || {
            assert_eq!(daemon.try_wait().unwrap(), None, "{options:?}");
            let status = self.call(&["daemon", "status"]);
            (status.code == Some(0)).then_some(())
        });
        daemon
    }

    /// Returns the answer at TCP port 80 of `host` in a guest: name of the server, or of the error.
    fn reach(&self, id: &str, host: &str) -> String {
        let program = format!("{}\nprint(tcp({host:?}))", network_probe::PRELUDE);
        self.ok(&["exec", id, "--", "python3", "-c", &program])
    }

    /// Returns the processes of the user and of the user's subordinate ids.
    fn processes(&self) -> Vec<String> {
        let home = self.dir.path().to_str().unwrap();
        let all = fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|process| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let uid = fs::metadata(process.path()).ok()?.uid();
            let own = uid == self.uid || line.contains(home);
            (own && alive(pid)).then(|| format!("{pid} {line}"))
        })
        .collect()
    }

    /// Waits until the user has no processes.
    fn wait_until_gone(&self) {
        wait_for("the user's last process to exit", || {
            let remaining = self.processes();
            remaining.is_empty().then_some(())
        });
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // Processes of a failed test.
        for process in self.processes() {
            let pid = process.split(' ').next().unwrap().parse().unwrap();
            let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Makes the user the owner of `path` and of everything below.
fn set_owner_recursively(path: &Path, uid: u32) {
    chown(path, Some(uid), Some(uid)).unwrap();
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        set_owner_recursively(&entry.path(), uid);
    }
}

/// Mounts `from` on `to` as well.
fn bind(from: &Path, to: &Path) {
    let none = None::<&str>;
    mount(Some(from), to, none, MsFlags::MS_BIND, none).unwrap();
}

/// Runs `work` in a lab where unprivileged users may open the devices, as on other machines.
fn with_users(work: impl FnOnce() + Send) {
    with_users_in(false, work);
}

/// Like `with_users`, in a lab with IPv6.
fn with_users6(work: impl FnOnce() + Send) {
    with_users_in(true, work);
}

/// Like `with_users`, in a lab with or without IPv6. Skips the test if no program for the *uplink*
/// is installed, which connects a user's network namespace to the network of the host.
fn with_users_in(ipv6: bool, work: impl FnOnce() + Send) {
    let pasta = ["/usr/bin/pasta", "/usr/bin/slirp4netns"]
        .iter()
        .any(|p| Path::new(p).exists());
    if !pasta {
        return skip("neither pasta nor slirp4netns is installed");
    }
    let work = |_: &Lab| {
        mount_separate_run(MsFlags::MS_PRIVATE);
        let devices = Path::new("/run/devices");
        fs::create_dir(devices).unwrap();
        for (path, major, minor) in DEVICES {
            let own = devices.join(path.rsplit('/').next().unwrap());
            let mode = Mode::from_bits_truncate(0o666);
            mknod(&own, SFlag::S_IFCHR, mode, makedev(major, minor)).unwrap();
            fs::set_permissions(&own, fs::Permissions::from_mode(0o666)).unwrap();
            if Path::new(path).exists() {
                bind(&own, Path::new(path));
            }
        }
        // A directory that all users can read, and that no user removes.
        fs::create_dir(PROGRAMS).unwrap();
        bind(&programs(), Path::new(PROGRAMS));
        work();
    };
    if ipv6 {
        with_lab6(work)
    } else {
        with_lab(work)
    }
}

/// Hides these programs of `/usr/bin`.
fn hide(programs: &[&str]) {
    for program in programs {
        let path = Path::new("/usr/bin").join(program);
        if path.exists() {
            bind(Path::new("/dev/null"), &path);
        }
    }
}

/// Assigns a range of subordinate user and group ids to the user.
fn subordinate(uid: u32) {
    let file = Path::new("/run/subordinate");
    // The ids of all users of tests fit into 32 bits.
    let first = 100_000 + (uid - FIRST_USER) * 65_536;
    fs::write(file, format!("{uid}:{first}:65536\n")).unwrap();
    for path in ["/etc/subuid", "/etc/subgid"] {
        if Path::new(path).exists() {
            bind(file, Path::new(path));
        }
    }
    // The programs that map the ids require the user's name.
    let names = Path::new("/run/passwd");
    let accounts = fs::read_to_string("/etc/passwd").unwrap();
    fs::write(
        names,
        format!("{accounts}rootless:x:{uid}:{uid}::/:/bin/sh\n"),
    )
    .unwrap();
    bind(names, Path::new("/etc/passwd"));
}

fn a_command_of_an_ordinary_user_runs_and_leaves_nothing() {
    with_users(|| {
        let user = User::new(new_uid());
        let done = user.call(&["run", "--", "sh", "-c", "echo hi; echo no >&2; exit 7"]);
        assert_eq!((done.code, &done.stdout[..]), (Some(7), "hi\n"), "{done:?}");
        assert!(
            done.stderr.contains("without root: ") && done.stderr.ends_with("no\n"),
            "{done:?}"
        );
        // The restrictions without root are reported once.
        let done = user.call(&["run", "--", "sh", "-c", "kill -9 $$"]);
        assert_eq!(
            (done.code, done.stderr.contains("without root")),
            (Some(137), false),
            "{done:?}"
        );
        user.wait_until_gone();
        let program = format!(
            "{}\nprint(tcp({:?}), tcp({HOST:?}) == \"host\")",
            network_probe::PRELUDE,
            PUBLIC[1]
        );
        let run = ["run", "--network", "on", "--", "python3", "-c", &program];
        assert_eq!(user.ok(&run), "internet False");
        user.wait_until_gone();
        let mut run = user
            .jiffy(&["run", "--", "sh", "-c", "echo up; sleep 600"])
            .spawn()
            .unwrap();
        crate::support::read_until(run.stdout.as_mut().unwrap(), "up");
        run.kill().unwrap();
        run.wait().unwrap();
        user.wait_until_gone();
    });
}

#[jiffy_test(engine = "microvm", lab)]
fn a_virtual_machine_of_an_ordinary_user_leaves_nothing() {
    a_command_of_an_ordinary_user_runs_and_leaves_nothing();
}

#[jiffy_test(engine = "gvisor", lab)]
fn a_sandbox_on_gvisor_of_an_ordinary_user_leaves_nothing() {
    a_command_of_an_ordinary_user_runs_and_leaves_nothing();
}

/// Tests the lifetime of sandboxes with a network, in the same way for both engines.
fn sandboxes_live(user: &User) {
    let mut daemon = user.serve(&["--network", "on"]);
    let id = user.ok(&["create"]);
    let refused = |id: &str, host: &str| {
        let received = user.reach(id, host);
        assert!(
            received.ends_with("Error") || received == "timeout",
            "{host}: {received}"
        );
    };
    for host in PUBLIC {
        assert_eq!(user.reach(&id, host), "internet", "{host}");
    }
    assert_eq!(user.reach(&id, "some.example"), "internet");
    for host in PRIVATE.iter().chain(&[HOST, "127.0.0.1", "198.18.0.1"]) {
        refused(&id, host);
    }
    // A later address of the host is protected as well.
    ip("addr add 11.7.7.7/32 dev lo");
    wait_for("the host's new address to be denied", || {
        (user.reach(&id, "11.7.7.7") != "host").then_some(())
    });
    user.sh(&id, "echo kept >/tmp/note");
    let snapshot = user.ok(&["snapshot", &id]);
    let twin = user.ok(&["fork", &id]);
    user.sh(&id, "rm /tmp/note");
    assert_eq!(user.sh(&twin, "cat /tmp/note"), "kept");
    assert_eq!(user.reach(&twin, PUBLIC[1]), "internet");
    user.ok(&["rollback", &id, &snapshot]);
    assert_eq!(user.sh(&id, "cat /tmp/note"), "kept");
    user.ok(&["pause", &id]);
    user.ok(&["resume", &id]);
    assert_eq!(user.reach(&id, PUBLIC[1]), "internet");
    refused(&id, HOST);
    // Sandboxes keep running without their daemon, and the next daemon finds them in their
    // namespaces.
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    let mut daemon = user.serve(&["--network", "on"]);
    assert_eq!(user.sh(&id, "cat /tmp/note"), "kept");
    assert_eq!(user.reach(&twin, PUBLIC[1]), "internet");
    refused(&twin, PRIVATE[0]);
    let status: Value = serde_json::from_str(&user.ok(&["daemon", "status", "--json"])).unwrap();
    let rootless = status["rootless"].as_str().unwrap_or_default();
    assert!(
        rootless.contains("no jail, separate users on gVisor"),
        "{status}"
    );
    user.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
    user.wait_until_gone();
}

#[jiffy_test(engine = "microvm", lab)]
fn virtual_machines_of_an_ordinary_user_reach_the_internet_and_nothing_of_the_host() {
    with_users(|| {
        let uid = new_uid();
        subordinate(uid);
        sandboxes_live(&User::new(uid));
    });
}

#[jiffy_test(engine = "gvisor", lab)]
fn gvisor_sandboxes_of_an_ordinary_user_reach_the_internet_and_nothing_of_the_host() {
    with_users(|| {
        let uid = new_uid();
        subordinate(uid);
        sandboxes_live(&User::new(uid));
    });
}

#[jiffy_test(engine = "gvisor", lab)]
fn two_users_of_one_machine_see_nothing_of_each_other() {
    with_users(|| {
        let (one, two) = (User::new(new_uid()), User::new(new_uid()));
        let ids = [&one, &two].map(|user| user.ok(&["create"]));
        for (user, (own, foreign)) in [(&one, (&ids[0], &ids[1])), (&two, (&ids[1], &ids[0]))] {
            assert_eq!(user.reach(own, PUBLIC[1]), "internet");
            assert!(!user.ok(&["ls", "--json"]).contains(foreign.as_str()));
            assert_ne!(user.call(&["exec", foreign, "--", "true"]).code, Some(0));
        }
        one.ok(&["daemon", "stop", "--kill-sandboxes"]);
        one.wait_until_gone();
        // The daemon and the uplink of the second user still run.
        assert_eq!(two.reach(&ids[1], PUBLIC[1]), "internet");
        two.ok(&["daemon", "stop", "--kill-sandboxes"]);
        two.wait_until_gone();
    });
}

#[jiffy_test(engine = "gvisor", lab)]
fn without_an_uplink_sandboxes_reach_nothing_and_the_reason_is_reported() {
    with_users(|| {
        hide(&["pasta", "pasta.avx2", "slirp4netns"]);
        let user = User::new(new_uid());
        let done = user.call(&["serve", "--no-listen", "--network", "on"]);
        assert!(
            done.code != Some(0) && done.stderr.contains("passt"),
            "{done:?}"
        );
        let id = user.ok(&["create"]);
        assert_ne!(user.reach(&id, PUBLIC[1]), "internet");
        let doctor = user.call(&["doctor"]);
        assert!(
            doctor.stdout.contains("passt") && doctor.stdout.contains("uidmap"),
            "{doctor:?}"
        );
        user.ok(&["daemon", "stop", "--kill-sandboxes"]);
        user.wait_until_gone();
    });
}

/// Returns the answers that a command of the user gets at TCP port 80 of these hosts.
fn reached_by_a_run(user: &User, hosts: &[&str]) -> Vec<String> {
    let program = format!(
        "{}\nfor host in {hosts:?}: print(tcp(host))",
        network_probe::PRELUDE
    );
    let run = ["run", "--network", "on", "--", "python3", "-c", &program];
    user.ok(&run).lines().map(str::to_owned).collect()
}

#[jiffy_test(lab)]
fn sandboxes_of_an_ordinary_user_reach_the_ipv6_internet_and_nothing_of_the_host() {
    if !Path::new("/usr/bin/pasta").exists() {
        return skip("pasta is not installed");
    }
    with_users6(|| {
        let user = User::new(new_uid());
        let open = [PUBLIC6[0], PUBLIC6[1], PUBLIC[1]];
        assert_eq!(reached_by_a_run(&user, &open), ["internet"; 3]);
        let closed = [HOST6, PRIVATE6[0], HOST, PRIVATE[0]];
        for (host, who) in closed.iter().zip(reached_by_a_run(&user, &closed)) {
            assert_eq!(who, "ConnectionRefusedError", "{host}");
        }
        user.wait_until_gone();
    });
}

#[jiffy_test(lab)]
fn slirp4netns_is_the_uplink_without_pasta() {
    if !Path::new("/usr/bin/slirp4netns").exists() {
        return skip("slirp4netns is not installed");
    }
    with_users(|| {
        hide(&["pasta", "pasta.avx2"]);
        let user = User::new(new_uid());
        let doctor = user.call(&["doctor"]).stdout;
        assert!(
            doctor.contains("slirp4netns connects sandboxes"),
            "{doctor}"
        );
        assert_eq!(reached_by_a_run(&user, &PUBLIC), ["internet"; 3]);
        // slirp4netns routes 10.0.2.2 to the host's loopback address.
        let closed = [HOST, PRIVATE[0], "10.0.2.2"];
        for (host, who) in closed.iter().zip(reached_by_a_run(&user, &closed)) {
            assert_eq!(who, "ConnectionRefusedError", "{host}");
        }
        user.wait_until_gone();
    });
}
