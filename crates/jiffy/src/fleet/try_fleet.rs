//! `jiffy fleet try`: a fleet of three hosts and a front on this machine, in network namespaces,
//! with an S3 server and optionally etcd. Everything is removed at exit.

mod etcd;
mod namespace;

use crate::cli::{FleetTryArgs, TryRecords};
use anyhow::Context;
use jiffy_image::Home;
use namespace::Namespace;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

/// Template that the hosts have.
const TEMPLATE: &str = "base";
/// Bucket and prefix of the store.
const STORE: &str = "s3://fleet/try";
/// Address of the S3 server, on the bridge.
const SERVER: &str = "10.231.77.1";
const S3_PORT: u16 = 7070;
/// Ports of members and of their APIs.
const FLEET_PORT: u16 = 7946;
const API_PORT: u16 = 3000;
/// Maximum time until a server or daemon accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Lifetime of idle threads: longer than any trial.
const THREAD_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Returns the address of a host on the bridge.
fn address(number: usize) -> String {
    format!("10.231.77.{}", 10 + number)
}

/// Starts the fleet, prints how to use it, and removes it after a signal.
pub fn run(args: &FleetTryArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        rustix::process::geteuid().is_root(),
        "network namespaces need root: run `sudo jiffy fleet try`"
    );
    let programs = Programs::find(args.records)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        // The kernel ends the namespaces with the thread that created them.
        .thread_keep_alive(THREAD_LIFETIME)
        .build()?;
    // Registered first, so that a signal during the start removes everything as well.
    let mut signals = runtime.block_on(async {
        anyhow::Ok([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        ])
    })?;
    let hosts = usize::from(args.hosts);
    let started = Instant::now();
    let start = runtime.spawn_blocking(move || Fleet::start(&programs, hosts));
    let [interrupt, terminate] = &mut signals;
    let fleet = runtime.block_on(async {
        let mut start = start;
        tokio::select! {
            fleet = &mut start => fleet.context("the start panicked")?.map(Some),
            _ = interrupt.recv() => { let _ = start.await; Ok(None) }
            _ = terminate.recv() => { let _ = start.await; Ok(None) }
        }
    })?;
    if let Some(fleet) = &fleet {
        fleet.explain(started.elapsed());
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        outln!("removing the fleet");
    }
    drop(fleet);
    Ok(())
}

/// Servers of the trial.
struct Programs {
    s3: PathBuf,
    /// `None` if the records are in the store.
    etcd: Option<PathBuf>,
}

impl Programs {
    fn find(records: TryRecords) -> anyhow::Result<Self> {
        let s3 = find_program("versitygw", "JIFFY_VERSITYGW").context(
            "versitygw, the S3 server of the trial, is not in PATH: install it with `go install \
             github.com/versity/versitygw/cmd/versitygw@v1.8.0`, or set JIFFY_VERSITYGW",
        )?;
        let etcd = match records {
            TryRecords::Store => None,
            TryRecords::Etcd => Some(find_program("etcd", "JIFFY_ETCD").context(
                "etcd is not in PATH: install the package etcd-server, or set JIFFY_ETCD",
            )?),
        };
        Ok(Self { s3, etcd })
    }
}

/// Finds a program in a variable or in the `PATH`.
fn find_program(name: &str, variable: &str) -> Option<PathBuf> {
    let given = std::env::var_os(variable).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut in_path = std::env::split_paths(&path).map(|folder| folder.join(name));
    given
        .filter(|file| file.is_file())
        .or_else(|| in_path.find(|file| file.is_file()))
}

/// Running fleet. Fields are dropped in this order.
struct Fleet {
    front: Option<Host>,
    hosts: Vec<Host>,
    etcd: Option<etcd::Cluster>,
    /// Bridge and servers.
    network: Namespace,
    dir: TempDir,
}

/// Host with its data directory.
struct Host {
    namespace: Namespace,
    home: PathBuf,
    address: String,
}

impl Fleet {
    fn start(programs: &Programs, count: usize) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("jiffy-fleet-")
            .tempdir_in("/var/tmp")
            .context("cannot create a directory in /var/tmp")?;
        let network = Namespace::new()?;
        for arguments in [
            "link add br0 type bridge".to_owned(),
            format!("addr add {SERVER}/24 dev br0"),
            "link set br0 up".to_owned(),
            "link set lo up".to_owned(),
        ] {
            network.ip(&arguments)?;
        }
        start_s3(&network, &programs.s3, dir.path())?;
        let etcd = programs.etcd.as_ref();
        let etcd = etcd.map(|program| etcd::Cluster::start(&network, program, dir.path()));
        let mut fleet = Self {
            front: None,
            hosts: Vec::new(),
            etcd: etcd.transpose()?,
            network,
            dir,
        };
        for number in 1..=count {
            let host = fleet.add(number)?;
            fleet.hosts.push(host);
        }
        fleet.front = Some(fleet.start_front(count + 1)?);
        Ok(fleet)
    }

    /// Creates a machine of the trial, without content.
    fn machine(&self, name: &str, number: usize) -> anyhow::Result<Host> {
        let namespace = Namespace::new()?;
        let address = address(number);
        self.network.connect(&namespace, number, &address)?;
        Ok(Host {
            namespace,
            home: self.dir.path().join(name),
            address,
        })
    }

    /// Returns the address of a host and a new token for it.
    fn token(first: &Host) -> anyhow::Result<[String; 2]> {
        let token = first.run(&["fleet", "token", "--json"])?;
        let token: serde_json::Value = serde_json::from_str(&token)?;
        Ok(["joinUrl", "token"].map(|name| token[name].as_str().unwrap_or_default().to_owned()))
    }

    /// Starts a front, which joins the fleet.
    fn start_front(&self, number: usize) -> anyhow::Result<Host> {
        let front = self.machine("front", number)?;
        std::fs::create_dir(&front.home)?;
        let first = self.hosts.first().context("the fleet has no host")?;
        let [url, token] = Self::token(first)?;
        let listen = format!("{}:{API_PORT}", front.address);
        front.start(
            &[
                "front", "--join", &url, &token, "--name", "front1", "--listen", &listen,
            ],
            |front| front.namespace.accepts(&front.address, API_PORT),
        )?;
        let text = std::fs::read_to_string(front.log()).unwrap_or_default();
        for line in text.lines().filter(|line| line.starts_with("joined")) {
            outln!("front1# {}", jiffy_client::terminal::line(line));
        }
        Ok(front)
    }

    /// Starts a host, which creates the fleet or joins it.
    fn add(&self, number: usize) -> anyhow::Result<Host> {
        let host = self.machine(&format!("h{number}"), number)?;
        create_home(&host.home, number == 1)?;
        let listen = format!("{}:{FLEET_PORT}", host.address);
        let name = format!("host{number}");
        let common = ["--fleet-listen", &listen, "--name", &name];
        let text = match self.hosts.first() {
            None => {
                let records = self.etcd.as_ref().map(etcd::Cluster::options);
                let records = records.unwrap_or_default();
                let records: Vec<_> = records.iter().map(String::as_str).collect();
                let init = ["fleet", "init", "--store", STORE];
                host.run(&[&init, &records[..], &common[..]].concat())?
            }
            Some(first) => {
                let [url, token] = Self::token(first)?;
                host.run(&[&["fleet", "join", &url, &token], &common[..]].concat())?
            }
        };
        for line in text.lines() {
            outln!("host{number}# {}", jiffy_client::terminal::line(line));
        }
        let listen = format!("{}:{API_PORT}", host.address);
        host.start(&["serve", "--listen", &listen], |host| {
            UnixStream::connect(host.home.join("run/jiffy.sock")).is_ok()
        })?;
        Ok(host)
    }

    fn explain(&self, time: Duration) {
        outln!("");
        outln!(
            "{} hosts run after {} s. Ctrl-C removes them.",
            self.hosts.len(),
            time.as_secs()
        );
        outln!("Each host has a data directory. In another shell, as root:");
        for host in &self.hosts {
            outln!(
                "  JIFFY_HOME={} jiffy fleet status      # host {}, log in {}",
                host.home.display(),
                host.address,
                host.log().display()
            );
        }
        let (first, last) = match (self.hosts.first(), self.hosts.last()) {
            (Some(first), Some(last)) => (first.home.display(), last.home.display()),
            _ => return,
        };
        outln!("Create a sandbox on the first host and list it on the last one:");
        outln!("  JIFFY_HOME={first} jiffy create --name demo");
        outln!("  JIFFY_HOME={last} jiffy ls");
        let Some(front) = &self.front else { return };
        outln!(
            "The front {} has no sandboxes: it passes calls to the hosts. Its network is separate:",
            front.address
        );
        outln!("  JIFFY_HOME={first} jiffy key create --name demo   # prints an API key");
        outln!(
            "  JIFFY_API_KEY=KEY nsenter --target {} --net jiffy ls --url http://{}:{API_PORT}",
            front.namespace.process(),
            front.address
        );
        outln!("  log of the front: {}", front.log().display());
    }
}

/// Creates a data directory with the programs and images of this host. Only the first host of a
/// fleet has the template: the others receive it from the store.
fn create_home(home: &Path, has_template: bool) -> anyhow::Result<()> {
    let own = Home::locate()?;
    let own = own.path();
    std::fs::create_dir(home)?;
    let images = home.join("images");
    let templates = home.join("templates");
    let locks = home.join("locks");
    for folder in [&images, &templates, &locks] {
        std::fs::create_dir(folder)?;
    }
    for image in std::fs::read_dir(own.join("images")).into_iter().flatten() {
        let image = image?;
        symlink(image.path(), images.join(image.file_name()))?;
    }
    for name in ["kernel", "disks"] {
        symlink(own.join(name), home.join(name))?;
        // Only one user of a shared directory creates its missing files.
        symlink(own.join("locks").join(name), locks.join(name))?;
    }
    let template = own.join("templates").join(TEMPLATE);
    if has_template && template.exists() {
        symlink(template, templates.join(TEMPLATE))?;
    }
    Ok(())
}

fn start_s3(network: &Namespace, server: &Path, dir: &Path) -> anyhow::Result<()> {
    let data = dir.join("s3");
    std::fs::create_dir_all(data.join("fleet"))?;
    network
        .command(server)
        .args(["--port", &format!("{SERVER}:{S3_PORT}"), "--quiet"])
        .args(["--access", "trial", "--secret", "trial-secret", "posix"])
        .arg(&data)
        .stdout(File::create(dir.join("s3.log"))?)
        .stderr(File::create(dir.join("s3.err"))?)
        .spawn()
        .context("cannot start the S3 server")?;
    wait_for("the S3 server", || network.accepts(SERVER, S3_PORT))
}

fn wait_for(what: &str, mut is_ready: impl FnMut() -> bool) -> anyhow::Result<()> {
    let started = Instant::now();
    while !is_ready() {
        anyhow::ensure!(
            started.elapsed() < START_TIMEOUT,
            "{what} did not start within {} s",
            START_TIMEOUT.as_secs()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

impl Host {
    fn log(&self) -> PathBuf {
        self.home.join("daemon.log")
    }

    /// Returns a command of `jiffy` on this host.
    fn jiffy(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = self.namespace.command(std::env::current_exe()?);
        command
            .args(arguments)
            .env("JIFFY_HOME", &self.home)
            .env("AWS_ENDPOINT_URL", format!("http://{SERVER}:{S3_PORT}"))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_REGION", "us-east-1")
            .env("AWS_ACCESS_KEY_ID", "trial")
            .env("AWS_SECRET_ACCESS_KEY", "trial-secret");
        Ok(command)
    }

    /// Runs a command and returns its output.
    fn run(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.jiffy(arguments)?.output()?;
        anyhow::ensure!(
            output.status.success(),
            "`jiffy {}` failed on {}: {}",
            arguments
                .iter()
                .take(2)
                .copied()
                .collect::<Vec<_>>()
                .join(" "),
            self.address,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts the daemon or front, and waits until it is ready.
    fn start(&self, arguments: &[&str], is_ready: impl Fn(&Self) -> bool) -> anyhow::Result<()> {
        let log = File::create(self.log())?;
        let mut daemon = self
            .jiffy(arguments)?
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut exit = None;
        let started = wait_for("the daemon", || {
            exit = daemon.try_wait().ok().flatten();
            exit.is_some() || is_ready(self)
        });
        // The directory is removed with the fleet.
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let last = text.lines().last().unwrap_or_default();
        anyhow::ensure!(
            exit.is_none(),
            "the daemon exited: {}",
            jiffy_client::terminal::line(last)
        );
        started.with_context(|| format!("last line of its log: {last}"))
    }
}
