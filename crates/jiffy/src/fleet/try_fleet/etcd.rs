//! etcd cluster of `jiffy fleet try --records etcd`: three members with mutual TLS.
//!
//! A *member* in this module is a process of etcd, not a host of the fleet.

use super::namespace::Namespace;
use super::service::Service;
use super::{SERVER, wait_for};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair,
};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Ports for clients, one per process of etcd. The port for other processes of etcd is the next
/// number.
const PORTS: [u16; 3] = [2379, 2479, 2579];
/// Settings without which the history of etcd grows.
const COMPACTION: [&str; 2] = [
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=5m",
];

/// Running cluster. It ends with the namespace.
pub struct Cluster {
    members: Vec<Service>,
    authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Cluster {
    /// Starts the members with their data below `dir`.
    pub fn start(network: &Namespace, program: &Path, dir: &Path) -> anyhow::Result<Self> {
        let dir = dir.join("etcd");
        std::fs::create_dir(&dir)?;
        let authority = Authority::new(&dir)?;
        // The gateway of etcd connects to its own server with the same certificate.
        let uses = [
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let (server, server_key) = authority.sign("server", &uses)?;
        let (certificate, key) =
            authority.sign("client", &[ExtendedKeyUsagePurpose::ClientAuth])?;
        let peer = |port: u16| format!("http://{SERVER}:{}", port + 1);
        let all = PORTS.map(|port| format!("m{port}={}", peer(port)));
        let mut members = Vec::new();
        for port in PORTS {
            let client = format!("https://{SERVER}:{port}");
            let log = File::create(dir.join(format!("m{port}.log")))?;
            let mut command = network.command(program);
            command
                .args(["--name", &format!("m{port}"), "--data-dir"])
                .arg(dir.join(format!("m{port}")))
                .args(["--listen-client-urls", &client])
                .args(["--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &peer(port)])
                .args(["--initial-advertise-peer-urls", &peer(port)])
                .args(["--initial-cluster", &all.join(","), "--client-cert-auth"])
                .arg("--cert-file")
                .arg(&server)
                .arg("--key-file")
                .arg(&server_key)
                .arg("--trusted-ca-file")
                .arg(&authority.file)
                .args(COMPACTION)
                .stdout(log.try_clone()?)
                .stderr(log);
            members.push(Service::start(command)?);
        }
        for port in PORTS {
            wait_for("etcd", || network.accepts(SERVER, port))?;
        }
        Ok(Self {
            members,
            authority: authority.file,
            certificate,
            key,
        })
    }

    /// Returns the names of the members.
    pub fn names(&self) -> impl Iterator<Item = String> {
        (1..=self.members.len()).map(|number| format!("etcd{number}"))
    }

    /// Returns a member.
    pub fn member(&mut self, name: &str) -> Option<&mut Service> {
        let index = self.names().position(|own| own == name)?;
        self.members.get_mut(index)
    }

    /// Returns the options of `jiffy fleet init`.
    pub fn options(&self) -> Vec<String> {
        let members = PORTS.map(|port| format!("{SERVER}:{port}")).join(",");
        let path = |path: &Path| path.display().to_string();
        [
            ("--records", format!("etcd://{members}/try")),
            ("--records-ca", path(&self.authority)),
            ("--records-cert", path(&self.certificate)),
            ("--records-key", path(&self.key)),
        ]
        .into_iter()
        .flat_map(|(name, value)| [name.to_owned(), value])
        .collect()
    }
}

/// Authority that signs the certificates of members and clients.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    file: PathBuf,
    dir: PathBuf,
}

impl Authority {
    fn new(dir: &Path) -> anyhow::Result<Self> {
        let mut params = CertificateParams::new([])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        let file = dir.join("ca.pem");
        std::fs::write(&file, params.self_signed(&key)?.pem())?;
        Ok(Self {
            issuer: Issuer::new(params, key),
            file,
            dir: dir.to_owned(),
        })
    }

    /// Writes a certificate without a common name, and its key.
    fn sign(
        &self,
        name: &str,
        uses: &[ExtendedKeyUsagePurpose],
    ) -> anyhow::Result<(PathBuf, PathBuf)> {
        let mut params = CertificateParams::new([SERVER.to_owned()])?;
        params.distinguished_name = DistinguishedName::new();
        params.extended_key_usages = uses.to_vec();
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let [certificate_file, key_file] =
            ["crt", "key"].map(|kind| self.dir.join(format!("{name}.{kind}")));
        std::fs::write(&certificate_file, certificate.pem())?;
        std::fs::write(&key_file, key.serialize_pem())?;
        Ok((certificate_file, key_file))
    }
}
