//! Servers of the tests, on the loopback device.

use jiffy_fleet::{EtcdRecords, EtcdSettings, Records, StoreRecords};
use jiffy_store::{Backend, BackendSettings, StoreUrl};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Returns a program that `scripts/test-servers` installs. `None` if it is missing outside CI.
pub fn tool(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../target/tools")
        .join(name);
    let is_ci = std::env::var_os("CI").is_some();
    assert!(
        path.exists() || !is_ci,
        "{name} is missing: run scripts/test-servers"
    );
    if !path.exists() {
        eprintln!("skipped: {name} is not installed");
    }
    path.exists().then_some(path)
}

/// Returns an unused port of the loopback device.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Process that is killed when it is dropped.
pub struct Server(Child);

impl Server {
    pub fn start(command: &mut Command, address: SocketAddr) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut server = Self(child.unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(address).is_err() {
            let ended = server.0.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "{command:?} does not listen on {address}: {ended:?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts an S3 server over the directory `dir`.
pub fn versitygw(dir: &Path, arguments: &[&str]) -> Option<(Server, SocketAddr)> {
    let program = tool("versitygw")?;
    std::fs::create_dir_all(dir.join("bucket")).unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let mut command = Command::new(program);
    command
        .args(["--port", &address.to_string(), "--quiet"])
        .args(["--access", "test", "--secret", "testsecret"])
        .arg("posix")
        .args(arguments)
        .arg(dir);
    Some((Server::start(&mut command, address), address))
}

/// Held while environment variables are set and read.
static VARIABLES: Mutex<()> = Mutex::new(());

/// Opens the bucket of the S3 server at `address`.
pub fn bucket(address: SocketAddr) -> Backend {
    let _guard = VARIABLES.lock().unwrap();
    for (name, value) in [
        ("AWS_ENDPOINT_URL", format!("http://{address}").as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "testsecret"),
    ] {
        // SAFETY: only the standard library reads variables, and it locks them.
        unsafe { std::env::set_var(name, value) };
    }
    let url: StoreUrl = "s3://bucket/prefix".parse().unwrap();
    url.open(BackendSettings::control()).unwrap()
}

/// Limits of calls that tests of faults wait for.
pub const SHORT_ATTEMPT: Duration = Duration::from_millis(300);
pub const SHORT_CALL: Duration = Duration::from_millis(900);

/// Returns records in the bucket at `address`, with short limits if `short`.
pub fn store_records(address: SocketAddr, short: bool) -> Arc<dyn Records> {
    let mut settings = BackendSettings::control();
    if short {
        settings.request_timeout = SHORT_ATTEMPT;
        settings.deadline = SHORT_CALL;
    }
    Arc::new(StoreRecords::with_settings(&bucket(address), settings))
}

/// Starts a cluster of one member without TLS.
pub fn etcd(dir: &Path) -> Option<(Server, SocketAddr)> {
    let program = tool("etcd")?;
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    Some((
        etcd_member(&program, dir, address, free_port(), "one"),
        address,
    ))
}

/// Starts one member of etcd without TLS. `peer` is its port for other members, and `token`
/// distinguishes clusters.
pub fn etcd_member(
    program: &Path,
    dir: &Path,
    address: SocketAddr,
    peer: u16,
    token: &str,
) -> Server {
    let client = format!("http://{address}");
    let peer = format!("http://127.0.0.1:{peer}");
    let mut command = Command::new(program);
    command
        .args(["--name", "m0", "--data-dir"])
        .arg(dir)
        .args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--initial-cluster", &format!("m0={peer}")])
        .args(["--initial-cluster-token", token])
        .args(COMPACTION);
    Server::start(&mut command, address)
}

/// Arguments for the compaction that Jiffy requires of etcd.
pub const COMPACTION: [&str; 2] = [
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=5m",
];

/// Returns the settings of a client of etcd at `address`. With `short`, calls have short timeouts.
pub fn etcd_settings(address: SocketAddr, short: bool) -> EtcdSettings {
    let url = format!("etcd+http://{address}/prefix").parse().unwrap();
    let mut settings = EtcdSettings::new(url);
    if short {
        settings.attempt = SHORT_ATTEMPT;
        settings.call = SHORT_CALL;
    }
    settings
}

/// Returns the records in etcd at `address`. With `short`, calls have short timeouts.
pub fn etcd_records(address: SocketAddr, short: bool) -> Arc<dyn Records> {
    Arc::new(EtcdRecords::new(&etcd_settings(address, short)).unwrap())
}
