//! [`SignaturePolicy`]: which signatures an image must have.

use super::certificate::SigningCertificate;
use super::image_signature::ImageSignature;
use super::timestamp;
use super::trust_root::TrustRoot;
use super::verify_key::VerifyKey;
use jiffy_engine_api::{
    MAX_IDENTITY_BYTES, MAX_TRUST_ROOT_BYTES, MAX_VERIFY_IDENTITIES, MAX_VERIFY_KEYS,
    SignerIdentity,
};
use std::sync::Arc;

/// Keys and identities of which one must have signed an image.
#[derive(Clone, Debug, Default)]
pub struct SignaturePolicy {
    keys: Vec<VerifyKey>,
    identities: Vec<SignerIdentity>,
    /// Trusted authorities and logs. If set, signatures of keys must be in a log, too.
    trust_root: Option<Arc<TrustRoot>>,
}

impl SignaturePolicy {
    /// Creates a policy. `keys` are public keys in PEM, and `trust_root` is the content of a
    /// `trusted_root.json` of Sigstore, which identities require.
    ///
    /// # Errors
    /// The error is a message for the author of the build.
    pub fn new(
        keys: &[String],
        identities: &[SignerIdentity],
        trust_root: Option<&str>,
    ) -> Result<Self, String> {
        if keys.len() > MAX_VERIFY_KEYS {
            return Err(format!(
                "too many keys for signatures of images: at most {MAX_VERIFY_KEYS}"
            ));
        }
        if identities.len() > MAX_VERIFY_IDENTITIES {
            return Err(format!(
                "too many signers of images: at most {MAX_VERIFY_IDENTITIES}"
            ));
        }
        for identity in identities {
            check_identity(identity)?;
        }
        let keys = keys.iter().map(|pem| VerifyKey::from_pem(pem));
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        if trust_root.is_none() && !identities.is_empty() {
            return Err(
                "signers of images require a trusted root: pass a trusted_root.json of Sigstore"
                    .to_owned(),
            );
        }
        if trust_root.is_some() && identities.is_empty() && keys.is_empty() {
            return Err(
                "a trusted root requires a key or a signer that must have signed images".to_owned(),
            );
        }
        if trust_root.is_some_and(|text| text.len() > MAX_TRUST_ROOT_BYTES) {
            let most = MAX_TRUST_ROOT_BYTES >> 10;
            return Err(format!("the trusted root is larger than {most} KiB"));
        }
        let trust_root = trust_root.map(TrustRoot::parse).transpose()?;
        Ok(Self {
            keys,
            identities: identities.to_vec(),
            trust_root: trust_root.map(Arc::new),
        })
    }

    /// Returns whether images need no signature.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.identities.is_empty()
    }

    /// Checks a signature of the image whose manifest has this SHA-256. The error states why the
    /// signature is not accepted.
    pub(super) fn check(&self, signature: &ImageSignature, sha256: &str) -> Result<(), String> {
        self.check_signer(signature)?;
        if signature.names(sha256) {
            Ok(())
        } else {
            Err("it is of another image".to_owned())
        }
    }

    /// Checks that a key or identity of the policy has made a signature.
    fn check_signer(&self, signature: &ImageSignature) -> Result<(), String> {
        let (message, bytes) = (&signature.message, &signature.signature);
        let mut keys = self.keys.iter();
        if let Some(key) = keys.find(|key| key.has_signed(message, bytes)) {
            return match &self.trust_root {
                Some(root) => proofs(root, signature, key.der()).map(|_times| ()),
                None => Ok(()),
            };
        }
        match (&self.trust_root, &signature.certificate) {
            (Some(root), Some(certificate)) if !self.identities.is_empty() => {
                self.check_identity(root, signature, certificate)
            }
            _ => Err("another key has made it".to_owned()),
        }
    }

    /// Checks a signature whose key has a certificate.
    fn check_identity(
        &self,
        root: &TrustRoot,
        signature: &ImageSignature,
        der: &[u8],
    ) -> Result<(), String> {
        let certificate = SigningCertificate::parse(der)?;
        let (message, bytes) = (&signature.message, &signature.signature);
        if !certificate.key.has_signed(message, bytes) {
            return Err("it was not made with the key of its certificate".to_owned());
        }
        // Each time is checked: otherwise one wrong time would suffice to use an old key.
        let times = proofs(root, signature, der)?;
        if times.is_empty() {
            return Err("neither a log nor a timestamp confirms its time".to_owned());
        }
        for time in times {
            certificate.check(root, time)?;
        }
        if certificate.names(&self.identities) {
            Ok(())
        } else {
            Err(format!("it is of {}", certificate.identity()))
        }
    }
}

/// Checks all proofs of a signature by `verifier`, a key or certificate in DER. At least one log
/// entry is required. Returns the times that logs and authorities confirm.
fn proofs(
    root: &TrustRoot,
    signature: &ImageSignature,
    verifier: &[u8],
) -> Result<Vec<jiff::Timestamp>, String> {
    if signature.log_entries.is_empty() {
        return Err("no log has an entry of it".to_owned());
    }
    let mut times = Vec::new();
    for entry in &signature.log_entries {
        times.extend(entry.check(root, signature, verifier)?);
    }
    let authorities = &root.timestamp_authorities;
    for given in &signature.timestamps {
        times.push(timestamp::check(given, &signature.signature, authorities)?);
    }
    for entry in &signature.log_entries {
        let log = entry.log(root)?;
        if !times.iter().all(|time| log.is_valid_at(*time)) {
            return Err("its log was not in use at the time of the signature".to_owned());
        }
    }
    Ok(times)
}

/// Checks an identity that the author of a build specifies.
fn check_identity(identity: &SignerIdentity) -> Result<(), String> {
    let SignerIdentity { subject, issuer } = identity;
    let is_valid = |text: &str| (1..=MAX_IDENTITY_BYTES).contains(&text.len());
    if !is_valid(subject) || !is_valid(issuer) {
        return Err(format!(
            "subject and issuer of a signer of images have 1 to {MAX_IDENTITY_BYTES} bytes"
        ));
    }
    if subject.trim_end_matches('*').is_empty() {
        return Err("the subject of a signer of images must be more than `*`".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::signing_key::SigningKey;
    use super::super::test_sigstore::{ISSUER_URL, SUBJECT, TestSigstore};
    use super::*;
    use serde_json::json;

    fn identity(subject: &str, issuer: &str) -> Vec<SignerIdentity> {
        vec![SignerIdentity {
            subject: subject.to_owned(),
            issuer: issuer.to_owned(),
        }]
    }

    #[test]
    fn a_policy_that_cannot_be_checked_is_rejected() {
        let sigstore = TestSigstore::new();
        let root = sigstore.trust_root();
        let (key, text) = (SigningKey::generate().public_pem, root.to_string());
        let new = |keys: &[String], identities: &[SignerIdentity], root: Option<&str>| {
            let policy = SignaturePolicy::new(keys, identities, root);
            policy.map(|policy| policy.is_empty())
        };
        let ours = identity(SUBJECT, ISSUER_URL);
        assert_eq!(new(&[], &[], None), Ok(true));
        assert_eq!(
            new(std::slice::from_ref(&key), &ours, Some(&text)),
            Ok(false)
        );
        let many = vec![ours[0].clone(); 17];
        let mut without_logs = root.clone();
        without_logs["tlogs"] = json!([]);
        let mut without_certificates = root.clone();
        without_certificates["certificateAuthorities"][0]["certChain"]["certificates"] = json!([]);
        for (keys, identities, root, reason) in [
            (vec![key; 17], &ours, Some(text.clone()), "too many keys"),
            (Vec::new(), &many, Some(text.clone()), "too many signers"),
            (Vec::new(), &ours, None, "require a trusted root"),
            (
                Vec::new(),
                &Vec::new(),
                Some(text.clone()),
                "requires a key or a signer",
            ),
            (Vec::new(), &ours, Some("[".to_owned()), "not valid"),
            (
                Vec::new(),
                &ours,
                Some(without_logs.to_string()),
                "no transparency log",
            ),
            (
                Vec::new(),
                &ours,
                Some(without_certificates.to_string()),
                "no certificate",
            ),
            (
                Vec::new(),
                &ours,
                Some(" ".repeat(200 << 10)),
                "larger than",
            ),
            (
                Vec::new(),
                &identity("*", ISSUER_URL),
                Some(text.clone()),
                "more than `*`",
            ),
            (Vec::new(), &identity(SUBJECT, ""), Some(text), "1 to 1024"),
        ] {
            let message = new(&keys, identities, root.as_deref()).unwrap_err();
            assert!(message.contains(reason), "{message}");
        }
    }
}
