//! Running fleet of `jiffy fleet try`.
//!
//! A *front* is a process without sandboxes that passes requests of clients to the hosts. The
//! *roster* of a host is the list of its sandboxes in the store, which the other hosts read after
//! its loss. The host writes it in the background after each change of its sandboxes.

use super::client::Client;
use super::sink::Sink;
use crate::site_settings::network::TestAuthority;
use crate::support::requirements::home;
use crate::support::{Done, alive, finish, jiffy, wait_for};
use jiffy_fleet::settings::Settings;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Maximum time until a state is reached.
const LIMIT: Duration = Duration::from_secs(90);
/// Maximum time until a host has written its roster after a change of its sandboxes.
const ROSTER: Duration = Duration::from_secs(4);
/// Interval of reads.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Host of the laboratory.
#[derive(Debug, Clone)]
pub struct Host {
    /// Number in the fleet, as `h1`.
    pub id: String,
    /// Name for faults, as `host1`.
    pub name: String,
    pub home: PathBuf,
    pub address: SocketAddr,
}

/// Fleet of three hosts with a front, and a receiver of the datagrams of guests.
pub struct Laboratory {
    /// Process `jiffy fleet try`, which reads faults from its standard input.
    trial: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    pub hosts: Vec<Host>,
    front: SocketAddr,
    /// Data directory of the front.
    front_home: PathBuf,
    /// Process in the network of the servers.
    pub network: u32,
    /// Address of the servers, which guests may reach.
    pub server: String,
    dir: PathBuf,
    /// Key of the tenant.
    pub key: String,
    /// Key of the administrator.
    admin_key: String,
    pub sink: Sink,
    /// Authority whose certificates all hosts and guests accept.
    pub authority: TestAuthority,
    _certificates: TempDir,
}

/// Returns a program that `scripts/test-servers` builds.
fn server(name: &str) -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools");
    let program = tools.join(name);
    let is_ci = std::env::var_os("CI").is_some();
    assert!(
        program.exists() || !is_ci,
        "{name} is missing: run scripts/test-servers"
    );
    program.exists().then_some(program)
}

fn address(url: &Value) -> SocketAddr {
    let url = url.as_str().unwrap();
    url.strip_prefix("http://").unwrap().parse().unwrap()
}

impl Laboratory {
    /// Starts the fleet. `None` if its servers were not built.
    pub fn start(records: &str) -> Option<Self> {
        let started = Instant::now();
        let authority = TestAuthority::new("Laboratory CA");
        let certificates = tempfile::tempdir().unwrap();
        let certificate = certificates.path().join("ca.pem");
        std::fs::write(&certificate, &authority.pem).unwrap();
        let mut command = jiffy(&["fleet", "try", "--json", "--records", records]);
        command
            .env("JIFFY_HOME", home())
            .env("JIFFY_VERSITYGW", server("versitygw")?)
            .env("JIFFY_ETCD", server("etcd")?)
            .env("JIFFY_NETWORK", "on")
            // Guests reach the sink.
            .env("JIFFY_ALLOW_PRIVATE", "10.231.77.1/32")
            .env("JIFFY_GUEST_CA", &certificate)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut trial = command.spawn().unwrap();
        let mut stdout = BufReader::new(trial.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let info: Value = serde_json::from_str(&line)
            .unwrap_or_else(|e| panic!("the fleet did not start: {e}: {line:?}"));
        let hosts = info["hosts"].as_array().unwrap().iter().enumerate();
        let hosts = hosts.map(|(index, host)| Host {
            id: format!("h{}", index + 1),
            name: host["name"].as_str().unwrap().to_owned(),
            home: host["home"].as_str().unwrap().into(),
            address: address(&host["url"]),
        });
        let network = u32::try_from(info["network"]["process"].as_u64().unwrap()).unwrap();
        let server = info["network"]["address"].as_str().unwrap();
        let mut laboratory = Self {
            stdin: trial.stdin.take(),
            trial,
            stdout,
            hosts: hosts.collect(),
            front: address(&info["front"]["url"]),
            front_home: info["front"]["home"].as_str().unwrap().into(),
            network,
            server: server.to_owned(),
            dir: info["dir"].as_str().unwrap().into(),
            key: String::new(),
            admin_key: String::new(),
            sink: Sink::start(network, server),
            authority,
            _certificates: certificates,
        };
        laboratory.admin_key = laboratory.create_key("admin", "admin");
        laboratory.key = laboratory.create_key("tenant", "create");
        laboratory.until_ready();
        report("start of three hosts and a front", started.elapsed());
        Some(laboratory)
    }

    /// Sends a fault to `jiffy fleet try`, which must execute it.
    #[track_caller]
    pub fn fault(&mut self, command: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        writeln!(stdin, "{command}").unwrap();
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert!(answer["error"].is_null(), "{command}: {answer}");
    }

    /// Returns the output of `jiffy` as the administrator of a host, which must succeed.
    #[track_caller]
    pub fn admin(&self, host: &Host, args: &[&str]) -> String {
        let done = self.try_admin(host, args);
        assert_eq!(done.code, Some(0), "{} {args:?}: {done:?}", host.name);
        done.stdout.trim_end().to_owned()
    }

    /// Runs a `jiffy` command as the owner of a host, and waits for its end.
    pub fn try_admin(&self, host: &Host, args: &[&str]) -> Done {
        let mut command = jiffy(args);
        command
            .env("JIFFY_HOME", &host.home)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    }

    /// Creates an API key.
    pub fn create_key(&self, name: &str, scope: &str) -> String {
        let args = ["key", "create", "--name", name, "--scope", scope];
        self.admin(&self.hosts[0], &args)
    }

    /// Returns the state of the fleet as a host sees it.
    pub fn status(&self, host: &Host) -> Option<Value> {
        let client = Client {
            key: self.admin_key.clone(),
            ..self.at(host)
        };
        let reply = client.get("/fleet");
        (reply.status == 200).then_some(reply.body)
    }

    /// Waits until the state of the fleet as a host sees it fulfils a condition. Returns the time.
    pub fn until(&self, host: &Host, what: &str, is_reached: impl Fn(&Value) -> bool) -> Duration {
        let started = Instant::now();
        let mut last = None;
        loop {
            if let Some(status) = self.status(host) {
                if is_reached(&status) {
                    return started.elapsed();
                }
                last = Some(status);
            }
            let elapsed = started.elapsed();
            assert!(
                elapsed < LIMIT,
                "{} does not report {what}: {last:?}",
                host.name
            );
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until all hosts are up and have compared their sandboxes with the store, and the
    /// coordinator knows all sandboxes.
    pub fn until_ready(&self) {
        let count = self.hosts.len();
        for host in &self.hosts {
            self.until(host, "a complete fleet", |status| {
                let nodes = status["nodes"].as_array().unwrap();
                nodes.len() == count
                    && nodes.iter().all(|node| node["state"] == "up")
                    && ["isReady", "hasAuthority", "isDirectoryComplete"]
                        .iter()
                        .all(|&name| status[name] == true)
            });
        }
    }

    /// Returns the host that is the coordinator. After a change, waits until all hosts know it.
    pub fn coordinator(&self) -> Host {
        wait_for("agreement on the coordinator", || {
            let known = self.hosts.iter().map(|host| {
                let status = self.status(host)?;
                Some((status["coordinator"].clone(), status["term"].clone()))
            });
            let known = known.collect::<Option<Vec<_>>>()?;
            let is_agreed = known.iter().all(|one| *one == known[0]);
            let mut hosts = self.hosts.iter().filter(|_| is_agreed);
            hosts.find(|host| known[0].0 == host.id.as_str()).cloned()
        })
    }

    /// Returns the hosts except for one.
    pub fn others(&self, host: &Host) -> Vec<Host> {
        let others = self.hosts.iter().filter(|other| other.id != host.id);
        others.cloned().collect()
    }

    /// Returns a host that is not the coordinator.
    pub fn ordinary(&self) -> Host {
        let coordinator = self.coordinator();
        self.others(&coordinator).remove(0)
    }

    /// Returns the client of a host.
    pub fn at(&self, host: &Host) -> Client {
        self.client(host.address)
    }

    /// Returns the client of the front.
    pub fn front(&self) -> Client {
        self.client(self.front)
    }

    /// Returns the number of the front, as `f4`.
    pub fn front_id(&self) -> String {
        let settings = Settings::load(&self.front_home).unwrap();
        settings.unwrap().member.to_string()
    }

    pub fn front_log(&self) -> String {
        std::fs::read_to_string(self.front_home.join("daemon.log")).unwrap()
    }

    /// Returns the number of guests in the warm pools of a host, if the host answers.
    pub fn warm_guests(&self, host: &Host) -> Option<u64> {
        let status = self.status(host)?;
        let mut nodes = status["nodes"].as_array()?.iter();
        let node = nodes.find(|node| node["id"] == host.id.as_str())?;
        node["warm"].as_u64()
    }

    fn client(&self, address: SocketAddr) -> Client {
        Client {
            network: self.network,
            address,
            key: self.key.clone(),
        }
    }

    /// Runs `jiffy` as a client of a host or front.
    pub fn jiffy(&self, client: &Client, args: &[&str]) -> Done {
        let inner = jiffy(args);
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.network.to_string(), "--net", "--"])
            .arg(inner.get_program())
            .args(inner.get_args())
            .env("JIFFY_URL", client.url())
            .env("JIFFY_API_KEY", &client.key)
            .env("JIFFY_HOME", self.dir.join("client"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    }

    /// Waits until a host shows another one in a state, and returns the time.
    pub fn until_state(&self, through: &Host, host: &Host, state: &str) -> Duration {
        let what = format!("{} as {state}", host.id);
        self.until(through, &what, |status| {
            let mut nodes = status["nodes"].as_array().unwrap().iter();
            nodes.any(|node| node["id"] == host.id.as_str() && node["state"] == state)
        })
    }
}

impl Drop for Laboratory {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.trial.id().try_into().unwrap());
        let _ = kill(pid, Signal::SIGTERM);
        if std::thread::panicking() {
            self.print_logs();
            let _ = self.trial.wait();
            return;
        }
        let status = wait_for("the end of the fleet", || self.trial.try_wait().unwrap());
        assert!(status.success(), "{status}");
        assert!(!self.dir.exists(), "{} remains", self.dir.display());
        assert!(!alive(self.network), "a namespace remains");
    }
}

impl Laboratory {
    /// Waits until all hosts have written their rosters. Must be called before the loss of a host
    /// whose sandboxes the other hosts must know. The roster is encrypted, so that the test cannot
    /// read it.
    pub fn wait_for_roster() {
        std::thread::sleep(ROSTER);
    }

    /// Prints the last lines of each daemon's log.
    fn print_logs(&self) {
        let hosts = self.hosts.iter().map(|host| (&*host.name, &host.home));
        for (name, home) in hosts.chain([("the front", &self.front_home)]) {
            let log = std::fs::read_to_string(home.join("daemon.log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            eprintln!("log of {name}:");
            for line in &lines[lines.len().saturating_sub(60)..] {
                eprintln!("  {line}");
            }
        }
    }
}

/// Prints the time of a step.
pub fn report(step: &str, time: Duration) {
    println!("{:>8.2} s  {step}", time.as_secs_f64());
}
