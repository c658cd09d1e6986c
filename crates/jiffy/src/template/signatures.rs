//! Options of `jiffy template build` for signatures of images.

use crate::cli::SignatureArgs;
use anyhow::{Context, anyhow};
use jiffy_engine_api::SignerIdentity;
use jiffy_image::{SignaturePolicy, VerifyKey};
use std::fs;
use std::path::Path;

/// Signatures that images must have, with the contents of the files that the options name.
#[derive(Debug)]
pub struct RequiredSignatures {
    /// Public keys in PEM.
    pub keys: Vec<String>,
    pub identities: Vec<SignerIdentity>,
    /// Content of a `trusted_root.json`.
    pub trust_root: Option<String>,
}

impl RequiredSignatures {
    /// Reads the files of the options. Checks each file, so that an error names it.
    pub fn read(args: &SignatureArgs) -> anyhow::Result<Self> {
        let mut keys = Vec::new();
        for file in &args.verify_key {
            let key = read("--verify-key", file)?;
            VerifyKey::from_pem(&key).map_err(|why| unusable("--verify-key", file, &why))?;
            keys.push(key);
        }
        let issuer = args.verify_issuer.clone().unwrap_or_default();
        let identities = args.verify_identity.iter();
        let identities: Vec<SignerIdentity> = identities
            .map(|subject| SignerIdentity {
                subject: subject.clone(),
                issuer: issuer.clone(),
            })
            .collect();
        let mut trust_root = None;
        if let Some(file) = &args.trust_root {
            let text = read("--trust-root", file)?;
            let checked = SignaturePolicy::new(&keys, &identities, Some(&text));
            checked.map_err(|why| unusable("--trust-root", file, &why))?;
            trust_root = Some(text);
        }
        Ok(Self {
            keys,
            identities,
            trust_root,
        })
    }

    /// Returns the policy for an import by this process.
    pub fn policy(&self) -> anyhow::Result<SignaturePolicy> {
        let trust_root = self.trust_root.as_deref();
        let policy = SignaturePolicy::new(&self.keys, &self.identities, trust_root);
        policy.map_err(anyhow::Error::msg)
    }
}

fn read(option: &str, file: &Path) -> anyhow::Result<String> {
    fs::read_to_string(file).with_context(|| format!("{option}: cannot read {}", file.display()))
}

fn unusable(option: &str, file: &Path, why: &str) -> anyhow::Error {
    anyhow!("{option} {}: {why}", file.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_option_and_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| {
            let path = dir.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let missing = dir.path().join("missing.pub");
        let (bad_key, bad_root) = (file("wrong.pub", "{}"), file("root.json", "[]"));
        for (key, root, option) in [
            (Some(&missing), None, "--verify-key"),
            (Some(&bad_key), None, "--verify-key"),
            (None, Some(&missing), "--trust-root"),
            (None, Some(&bad_root), "--trust-root"),
        ] {
            let args = SignatureArgs {
                verify_key: key.into_iter().cloned().collect(),
                verify_identity: vec!["a@example.com".to_owned()],
                verify_issuer: Some("https://issuer.example".to_owned()),
                trust_root: root.cloned(),
            };
            let message = format!("{:#}", RequiredSignatures::read(&args).unwrap_err());
            let name = key.or(root).unwrap().display().to_string();
            assert!(
                message.contains(&name) && message.contains(option),
                "{message}"
            );
        }
    }
}
