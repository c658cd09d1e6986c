//! Records in an etcd cluster of three members (servers of etcd) with mutual TLS.

use super::contract::{key, value};
use super::servers::{COMPACTION, Server, free_port, tool};
use jiffy_fleet::check::{CheckOptions, check};
use jiffy_fleet::{EtcdRecords, EtcdSettings, RecordError, Records, Written};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, IsCa,
};
use rcgen::{Issuer, KeyPair};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Authority that signs the certificates of members and clients.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    file: PathBuf,
    dir: PathBuf,
}

impl Authority {
    fn new(dir: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let file = dir.join(format!("{name}.pem"));
        std::fs::write(&file, params.self_signed(&key).unwrap().pem()).unwrap();
        Self {
            issuer: Issuer::new(params, key),
            file,
            dir: dir.to_owned(),
        }
    }

    /// Writes a certificate without a common name, and its key.
    fn sign(&self, name: &str, uses: &[ExtendedKeyUsagePurpose]) -> (PathBuf, PathBuf) {
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.extended_key_usages = uses.to_vec();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = ["crt", "key"].map(|kind| self.dir.join(format!("{name}.{kind}")));
        let [certificate_file, key_file] = &files;
        std::fs::write(certificate_file, certificate.pem()).unwrap();
        std::fs::write(key_file, key.serialize_pem()).unwrap();
        files.into()
    }
}

const SERVER: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ServerAuth;
const CLIENT: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ClientAuth;

/// Three members of one cluster.
struct Cluster {
    program: PathBuf,
    dir: PathBuf,
    authority: Authority,
    identity: (PathBuf, PathBuf),
    clients: Vec<u16>,
    peers: Vec<u16>,
    members: Vec<Option<Server>>,
}

impl Cluster {
    fn start(program: &Path, dir: &Path, uses: &[ExtendedKeyUsagePurpose]) -> Self {
        let authority = Authority::new(dir, "ca");
        let identity = authority.sign("server", uses);
        let mut cluster = Self {
            program: program.to_owned(),
            dir: dir.to_owned(),
            authority,
            identity,
            clients: (0..3).map(|_| free_port()).collect(),
            peers: (0..3).map(|_| free_port()).collect(),
            members: Vec::new(),
        };
        cluster.members = (0..3).map(|index| Some(cluster.member(index))).collect();
        cluster
    }

    /// Starts a member of the cluster.
    fn member(&self, index: usize) -> Server {
        let peer = |index: usize| format!("http://127.0.0.1:{}", self.peers[index]);
        let client = format!("https://127.0.0.1:{}", self.clients[index]);
        let all: Vec<String> = (0..3).map(|n| format!("m{n}={}", peer(n))).collect();
        let mut command = Command::new(&self.program);
        command
            .args(["--name", &format!("m{index}"), "--data-dir"])
            .arg(self.dir.join(format!("m{index}")))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args(["--listen-peer-urls", &peer(index)])
            .args(["--initial-advertise-peer-urls", &peer(index)])
            .args(["--initial-cluster", &all.join(","), "--client-cert-auth"])
            .arg("--cert-file")
            .arg(&self.identity.0)
            .arg("--key-file")
            .arg(&self.identity.1)
            .arg("--trusted-ca-file")
            .arg(&self.authority.file)
            .args(COMPACTION);
        let address = SocketAddr::from(([127, 0, 0, 1], self.clients[index]));
        Server::start(&mut command, address)
    }

    /// Returns the settings of a client of all members.
    fn settings(&self) -> EtcdSettings {
        let members: Vec<String> = self
            .clients
            .iter()
            .map(|p| format!("127.0.0.1:{p}"))
            .collect();
        let url = format!("etcd://{}/jiffy", members.join(","))
            .parse()
            .unwrap();
        EtcdSettings {
            ca: Some(self.authority.file.clone()),
            identity: Some(self.authority.sign("client", &[CLIENT])),
            ..EtcdSettings::new(url)
        }
    }
}

/// Repeats a creation until it succeeds, while the members elect a leader.
async fn create_when_ready(records: &dyn Records, text: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match records.create(&key(text), value(text)).await {
            Ok(Written::Done(_)) => return,
            Ok(lost) => panic!("{text}: {lost:?}"),
            Err(e) => assert!(e.is_temporary() && Instant::now() < deadline, "{e}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_members_with_mutual_tls_survive_the_loss_of_one_and_stop_without_a_quorum() {
    let Some(program) = tool("etcd") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(&program, dir.path(), &[SERVER, CLIENT]);
    let records = Arc::new(EtcdRecords::new(&cluster.settings()).unwrap());
    create_when_ready(&*records, "fleet/start").await;
    assert_eq!(records.warnings().await.unwrap(), Vec::<String>::new());
    let shared: Arc<dyn Records> = records.clone();
    let options = CheckOptions {
        rounds: 2,
        writers: 32,
    };
    check(&shared, options).await.unwrap();

    // The loss of any one member, which may be the leader, interrupts writes only briefly.
    for index in 0..3 {
        cluster.members[index] = None;
        let start = Instant::now();
        create_when_ready(&*records, &format!("fleet/without-{index}")).await;
        assert!(start.elapsed() < Duration::from_secs(30), "member {index}");
        cluster.members[index] = Some(cluster.member(index));
        create_when_ready(&*records, &format!("fleet/with-{index}")).await;
    }

    // Without a quorum (two of three members), calls end with an error at their limit.
    cluster.members[0] = None;
    cluster.members[1] = None;
    let start = Instant::now();
    let error = records
        .create(&key("fleet/none"), value("none"))
        .await
        .unwrap_err();
    assert!(matches!(error, RecordError::Unknown { .. }), "{error}");
    // A call is limited to 6 s.
    assert!(
        start.elapsed() < Duration::from_secs(12),
        "{:?}",
        start.elapsed()
    );
    let error = records.get(&key("fleet/start")).await.unwrap_err();
    assert!(matches!(error, RecordError::Unavailable { .. }), "{error}");
    cluster.members[0] = Some(cluster.member(0));
    cluster.members[1] = Some(cluster.member(1));
    create_when_ready(&*records, "fleet/quorum").await;
    assert!(records.get(&key("fleet/start")).await.unwrap().is_some());

    // A client with a certificate of another authority is rejected by the servers. A client that
    // trusts only another authority rejects the servers.
    let stranger = Authority::new(dir.path(), "stranger");
    let short = EtcdSettings {
        call: Duration::from_millis(500),
        ..cluster.settings()
    };
    let (own, identity) = (&cluster.authority.file, stranger.sign("client2", &[CLIENT]));
    let error = read_with(&short, own, identity).await;
    // The server may close the connection before its alert is read.
    assert!(matches!(error, RecordError::Unavailable { .. }), "{error}");
    let identity = cluster.authority.sign("client3", &[CLIENT]);
    let error = read_with(&short, &stranger.file, identity).await;
    assert!(error.to_string().contains("certificate"), "{error}");
}

/// Returns the error of a read with these certificates.
async fn read_with(
    settings: &EtcdSettings,
    ca: &Path,
    identity: (PathBuf, PathBuf),
) -> RecordError {
    let settings = EtcdSettings {
        ca: Some(ca.to_owned()),
        identity: Some(identity),
        ..settings.clone()
    };
    let records = EtcdRecords::new(&settings).unwrap();
    records.get(&key("fleet/start")).await.unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_certificate_without_client_authentication_is_rejected_with_the_reason() {
    let Some(program) = tool("etcd") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(&program, dir.path(), &[SERVER]);
    let records = EtcdRecords::new(&cluster.settings()).unwrap();
    // The HTTP gateway of etcd presents the server's certificate to its own server, as a client.
    // While the members elect a leader, the gateway reports other errors.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let error = records.get(&key("fleet/start")).await.unwrap_err();
        if error.to_string().contains("clientAuth") {
            return;
        }
        assert!(error.is_temporary() && Instant::now() < deadline, "{error}");
    }
}
