//! `jiffy fleet try`: a fleet of three hosts and a front on this machine, in network namespaces,
//! with an S3 server and optionally etcd. Everything is removed at exit. Lines on standard input
//! cause faults.
//!
//! A *front* is a process without sandboxes that passes connections of clients to the hosts of a
//! fleet.
//!
//! *Records* are small objects in the S3 store or in etcd, by which the hosts agree.

mod command;
mod etcd;
mod host;
mod namespace;
mod service;

use crate::cli::{FleetTryArgs, TryRecords};
use anyhow::Context;
use host::Host;
use jiffy_image::{Home, Reference};
use namespace::Namespace;
use serde_json::{Value, json};
use service::Service;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

/// Bucket and prefix of the store.
const STORE: &str = "s3://fleet/try";
/// Address of the S3 server, on the bridge.
const SERVER: &str = "10.231.77.1";
const S3_PORT: u16 = 7070;
/// Port at which a host accepts connections of other hosts, and port of its API.
const FLEET_PORT: u16 = 7946;
const API_PORT: u16 = 3000;
/// Maximum time until a server or daemon accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Lifetime of idle threads: longer than any trial.
const THREAD_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Interval at which the start of a server is checked.
const START_INTERVAL: Duration = Duration::from_millis(20);

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
        // The kernel ends the namespaces with the thread that created them, so threads must not end
        // when they are idle.
        .thread_keep_alive(THREAD_LIFETIME)
        .build()?;
    // Register the signals first, so that a signal during the start removes everything as well.
    let mut signals = runtime.block_on(async {
        anyhow::Ok([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        ])
    })?;
    let hosts = usize::from(args.hosts);
    let templates = templates(&args.templates)?;
    let is_json = args.json;
    let started = Instant::now();
    let start = runtime.spawn_blocking(move || Fleet::start(&programs, hosts, &templates, is_json));
    let [interrupt, terminate] = &mut signals;
    // After a signal, the start is still awaited: only its result, a complete fleet, can be dropped
    // and thereby removed.
    let fleet = runtime.block_on(async {
        let mut start = start;
        tokio::select! {
            fleet = &mut start => fleet.context("the start panicked")?.map(Some),
            _ = interrupt.recv() => { let _ = start.await; Ok(None) }
            _ = terminate.recv() => { let _ = start.await; Ok(None) }
        }
    })?;
    let Some(mut fleet) = fleet else {
        return Ok(());
    };
    if is_json {
        outln!("{}", fleet.description());
    } else {
        fleet.explain(started.elapsed());
    }
    let mut lines = command::read_lines();
    let mut is_open = true;
    loop {
        let line = runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => None,
                _ = terminate.recv() => None,
                line = lines.recv(), if is_open => Some(line),
            }
        });
        match line {
            None => break,
            // The end of the input does not end the fleet.
            Some(None) => is_open = false,
            Some(Some(line)) => {
                // Namespaces end with the thread that created them: use a thread of the runtime,
                // which does not end before.
                let execution = runtime.spawn_blocking(move || {
                    let answer = fleet.execute(&line);
                    (fleet, answer)
                });
                let (same, answer) = runtime.block_on(execution).context("a command panicked")?;
                fleet = same;
                print_answer(answer, is_json);
            }
        }
    }
    if !is_json {
        outln!("removing the fleet");
    }
    drop(fleet);
    Ok(())
}

fn print_answer(answer: anyhow::Result<Option<String>>, is_json: bool) {
    match answer {
        Ok(Some(text)) if is_json => outln!("{}", json!({"text": text})),
        Err(error) if is_json => outln!("{}", json!({"error": format!("{error:#}")})),
        Ok(Some(text)) => outln!("{text}"),
        Err(error) => outln!("error: {error:#}"),
        Ok(None) => {}
    }
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
    s3: Service,
    /// Bridge and servers.
    network: Namespace,
    dir: TempDir,
    is_json: bool,
}

impl Fleet {
    /// Starts a network, the servers of store and records, `count` hosts and a front. The hosts
    /// have the templates in these directories.
    fn start(
        programs: &Programs,
        count: usize,
        templates: &[PathBuf],
        is_json: bool,
    ) -> anyhow::Result<Self> {
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
        let s3 = start_s3(&network, &programs.s3, dir.path())?;
        let etcd = programs.etcd.as_ref();
        let etcd = etcd.map(|program| etcd::Cluster::start(&network, program, dir.path()));
        let mut fleet = Self {
            front: None,
            hosts: Vec::new(),
            etcd: etcd.transpose()?,
            s3,
            network,
            dir,
            is_json,
        };
        for number in 1..=count {
            let host = fleet.add(number, templates)?;
            fleet.hosts.push(host);
        }
        fleet.front = Some(fleet.start_front(count + 1)?);
        Ok(fleet)
    }

    /// Creates a machine of the trial, without content.
    fn machine(&self, name: &str, folder: &str, number: usize) -> anyhow::Result<Host> {
        Host::new(&self.network, name, number, self.dir.path().join(folder))
    }

    /// Prints a line of a command on a machine.
    fn report(&self, machine: &str, line: &str) {
        if !self.is_json {
            outln!("{machine}# {}", jiffy_client::terminal::line(line));
        }
    }

    /// Returns the address of a host and a new token for it.
    fn token(first: &Host) -> anyhow::Result<[String; 2]> {
        let token = first.run(&["fleet", "token", "--json"])?;
        let token: Value = serde_json::from_str(&token)?;
        Ok(["joinUrl", "token"].map(|name| token[name].as_str().unwrap_or_default().to_owned()))
    }

    /// Starts a front, which joins the fleet.
    fn start_front(&self, number: usize) -> anyhow::Result<Host> {
        let mut front = self.machine("front1", "front", number)?;
        std::fs::create_dir(&front.home)?;
        let first = self.hosts.first().context("the fleet has no host")?;
        let [url, token] = Self::token(first)?;
        let listen = format!("{}:{API_PORT}", front.address);
        front.start(&[
            "front", "--join", &url, &token, "--name", "front1", "--listen", &listen,
        ])?;
        let text = std::fs::read_to_string(front.log()).unwrap_or_default();
        for line in text.lines().filter(|line| line.starts_with("joined")) {
            self.report("front1", line);
        }
        Ok(front)
    }

    /// Starts a host, which creates the fleet or joins it.
    fn add(&self, number: usize, templates: &[PathBuf]) -> anyhow::Result<Host> {
        let name = format!("host{number}");
        let mut host = self.machine(&name, &format!("h{number}"), number)?;
        // Only the first host of a fleet has the templates: the others receive them from the store.
        let templates = if number == 1 { templates } else { &[] };
        create_home(&host.home, templates)?;
        let listen = format!("{}:{FLEET_PORT}", host.address);
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
            self.report(&name, line);
        }
        let listen = format!("{}:{API_PORT}", host.address);
        // Control groups are named by process ids, which are the same in the namespaces of all
        // hosts.
        host.start(&["serve", "--listen", &listen, "--cgroups", "off"])?;
        Ok(host)
    }

    /// Returns addresses, data directories and processes, for programs.
    fn description(&self) -> Value {
        let machine = |machine: &Host| {
            json!({
                "name": machine.name,
                "home": machine.home,
                "url": format!("http://{}:{API_PORT}", machine.address),
                "log": machine.log(),
            })
        };
        json!({
            "hosts": self.hosts.iter().map(machine).collect::<Vec<_>>(),
            "front": self.front.as_ref().map(machine),
            "names": self.names(),
            "network": {"process": self.network.process(), "address": SERVER},
            "dir": self.dir.path(),
        })
    }

    /// Prints the addresses of the machines and commands to try.
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
            front.namespace().map_or(0, Namespace::process),
            front.address
        );
        outln!("  log of the front: {}", front.log().display());
        outln!(
            "Faults, as lines on standard input, for {}:",
            self.names().join(", ")
        );
        outln!("{}", command::HELP);
    }
}

/// Returns the directories of stock templates of this machine. Hosts build missing ones themselves.
fn templates(names: &[String]) -> anyhow::Result<Vec<PathBuf>> {
    let all = Home::locate()?.path().join("templates");
    let mut found = Vec::new();
    for name in names {
        anyhow::ensure!(
            Reference::parse(name).is_ok_and(|reference| reference.is_stock()),
            "`{}` is not a stock template: `jiffy template ls` lists them",
            jiffy_client::terminal::line(name)
        );
        found.push(all.join(name));
    }
    found.retain(|template| template.exists());
    Ok(found)
}

/// Creates a data directory with the programs and images of this host, and with the templates in
/// these directories.
fn create_home(home: &Path, from: &[PathBuf]) -> anyhow::Result<()> {
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
        // Lock files are shared as well, so that only one user of a shared directory creates its
        // missing files.
        symlink(own.join("locks").join(name), locks.join(name))?;
    }
    for template in from {
        symlink(
            template,
            templates.join(template.file_name().unwrap_or_default()),
        )?;
    }
    Ok(())
}

/// Starts the S3 server of the trial.
fn start_s3(network: &Namespace, server: &Path, dir: &Path) -> anyhow::Result<Service> {
    let data = dir.join("s3");
    std::fs::create_dir_all(data.join("fleet"))?;
    let mut command = network.command(server);
    command
        .args(["--port", &format!("{SERVER}:{S3_PORT}"), "--quiet"])
        .args(["--access", "trial", "--secret", "trial-secret", "posix"])
        .arg(&data)
        .stdout(File::create(dir.join("s3.log"))?)
        .stderr(File::create(dir.join("s3.err"))?);
    let service = Service::start(command)?;
    wait_for("the S3 server", || network.accepts(SERVER, S3_PORT))?;
    Ok(service)
}

fn wait_for(what: &str, mut is_ready: impl FnMut() -> bool) -> anyhow::Result<()> {
    let started = Instant::now();
    while !is_ready() {
        anyhow::ensure!(
            started.elapsed() < START_TIMEOUT,
            "{what} did not start within {} s",
            START_TIMEOUT.as_secs()
        );
        std::thread::sleep(START_INTERVAL);
    }
    Ok(())
}
