//! Entries of Rekor, the log of signatures.
//!
//! The log proves an entry by a *promise* or by an *inclusion proof*. A promise is its signature of
//! entry and time. An inclusion proof has the hashes from the entry to the root of the log's tree
//! (RFC 9162), and a *checkpoint*, which is the signed root
//! (https://github.com/C2SP/C2SP/blob/main/tlog-checkpoint.md).

use super::image_signature::ImageSignature;
use super::json::{Base64, Integer};
use super::pem;
use super::trust_root::{Log, TrustRoot};
use crate::verified::sum_of;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use data_encoding::HEXLOWER;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

type Hash = [u8; 32];

/// Maximum number of signatures of a checkpoint that are examined. Checkpoints have one of the log
/// and a few of witnesses.
const MAX_CHECKPOINT_SIGNATURES: usize = 16;

/// Entry of a log, as bundles contain it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LogEntry {
    #[serde(default)]
    pub log_index: Integer,
    pub log_id: LogId,
    pub kind_version: KindVersion,
    pub integrated_time: Option<Integer>,
    pub inclusion_promise: Option<Promise>,
    pub inclusion_proof: Option<InclusionProof>,
    pub canonicalized_body: Base64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LogId {
    pub key_id: Base64,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct KindVersion {
    pub kind: String,
    pub version: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Promise {
    pub signed_entry_timestamp: Base64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct InclusionProof {
    #[serde(default)]
    log_index: Integer,
    #[serde(default)]
    root_hash: Base64,
    #[serde(default)]
    tree_size: Integer,
    #[serde(default)]
    hashes: Vec<Base64>,
    checkpoint: Option<Checkpoint>,
}

#[derive(Clone, Debug, Deserialize)]
struct Checkpoint {
    envelope: String,
}

/// Root of a log's tree, signed by the log.
struct TreeHead {
    size: u64,
    root: Hash,
}

impl LogEntry {
    /// Checks that a log of `root` contains the entry, and that the entry is about this signature
    /// of the key or certificate `verifier` (DER). Returns the time of the entry if the log
    /// confirms a time.
    pub fn check(
        &self,
        root: &TrustRoot,
        signature: &ImageSignature,
        verifier: &[u8],
    ) -> Result<Option<Timestamp>, String> {
        let log = self.log(root)?;
        if self.inclusion_promise.is_none() && self.inclusion_proof.is_none() {
            return Err("its log entry has no proof".to_owned());
        }
        let time = self.check_promise(log)?;
        if let Some(proof) = &self.inclusion_proof {
            self.check_proof(proof, log)?;
        }
        let is_about = self.is_about(signature, verifier);
        if is_about != Some(true) {
            return Err("its log entry is about another signature".to_owned());
        }
        Ok(time)
    }

    /// Returns the log of the entry.
    pub fn log<'r>(&self, root: &'r TrustRoot) -> Result<&'r Log, String> {
        let log = root.logs.iter().find(|log| log.id == self.log_id.key_id.0);
        log.ok_or_else(|| "its log entry is of a log that is not trusted".to_owned())
    }

    /// Returns whether the entry is of Rekor 2, whose entries have no time.
    fn is_of_second_version(&self) -> bool {
        self.kind_version.kind == "hashedrekord" && self.kind_version.version == "0.0.2"
    }

    /// Checks the promise, if any, and returns the time that it confirms.
    fn check_promise(&self, log: &Log) -> Result<Option<Timestamp>, String> {
        let Some(promise) = &self.inclusion_promise else {
            return Ok(None);
        };
        let time = self.integrated_time.unwrap_or_default().0;
        let timestamp = Timestamp::from_second(time);
        let timestamp = timestamp.map_err(|_| "the time of its log entry is not valid")?;
        // Canonical JSON (RFC 8785): sorted members. No value has characters that need an
        // escape.
        let signed = format!(
            r#"{{"body":"{}","integratedTime":{time},"logID":"{}","logIndex":{}}}"#,
            STANDARD.encode(&self.canonicalized_body.0),
            HEXLOWER.encode(&log.id),
            self.log_index.0,
        );
        let signature = &promise.signed_entry_timestamp.0;
        if !log.is_valid_at(timestamp) || !log.key.has_signed(signed.as_bytes(), signature) {
            return Err("its log entry is not signed by the log".to_owned());
        }
        if timestamp > Timestamp::now() {
            return Err("the time of its log entry is in the future".to_owned());
        }
        Ok((!self.is_of_second_version() && time > 0).then_some(timestamp))
    }

    /// Checks that the tree of the log contains the entry.
    fn check_proof(&self, proof: &InclusionProof, log: &Log) -> Result<(), String> {
        let checkpoint = proof.checkpoint.as_ref();
        let head = checkpoint.and_then(|checkpoint| tree_head(&checkpoint.envelope, log));
        let head = head.ok_or("its log entry has no checkpoint that is signed by the log")?;
        // The first version of Rekor divides an index over several trees, and repeats size and root
        // of the tree. The second version has one tree, and its copies are not used.
        let (index, size) = if self.is_of_second_version() {
            (self.log_index.0, head.size)
        } else {
            let size = u64::try_from(proof.tree_size.0).unwrap_or(0);
            let is_equal = proof.root_hash.0 == head.root;
            (proof.log_index.0, if is_equal { size } else { 0 })
        };
        let hashes = proof.hashes.iter().map(|hash| Hash::try_from(&hash.0[..]));
        let hashes = hashes.collect::<Result<Vec<Hash>, _>>().ok();
        let leaf = node(0, &[&self.canonicalized_body.0]);
        let root = u64::try_from(index).ok().zip(hashes);
        let root = root.and_then(|(index, hashes)| root_of(leaf, index, size, &hashes));
        if root == Some(head.root) {
            Ok(())
        } else {
            Err("its log entry is not in the tree of the log".to_owned())
        }
    }

    /// Returns whether the entry records this signature of `verifier`, a key or certificate in DER.
    /// `None` if the entry is malformed, or of an unknown kind.
    fn is_about(&self, signature: &ImageSignature, verifier: &[u8]) -> Option<bool> {
        let body: Value = serde_json::from_slice(&self.canonicalized_body.0).ok()?;
        let text = |pointer: &str| body.pointer(pointer)?.as_str();
        let bytes = |pointer: &str| STANDARD.decode(text(pointer)?).ok();
        let kind = (text("/kind")?, text("/apiVersion")?);
        // Kind and version outside of the body are not signed.
        if kind != (&self.kind_version.kind[..], &self.kind_version.version[..]) {
            return None;
        }
        let of_pem = |pointer: &str| {
            let text = String::from_utf8(bytes(pointer)?).ok()?;
            let certificate = pem::decode(&text, pem::CERTIFICATE);
            certificate.or_else(|| pem::decode(&text, pem::PUBLIC_KEY))
        };
        let (digest, expected, recorded, by) = match kind {
            ("hashedrekord", "0.0.1") => (
                (text("/spec/data/hash/algorithm")? == "sha256")
                    .then(|| text("/spec/data/hash/value"))??
                    .to_owned(),
                sum_of(&signature.message),
                bytes("/spec/signature/content")?,
                of_pem("/spec/signature/publicKey/content")?,
            ),
            ("hashedrekord", "0.0.2") => {
                let spec = |rest: &str| format!("/spec/hashedRekordV002/{rest}");
                let verifier = |rest: &str| bytes(&spec(&format!("signature/verifier/{rest}")));
                let certificate = verifier("x509Certificate/rawBytes");
                (
                    (text(&spec("data/algorithm"))? == "SHA2_256")
                        .then(|| bytes(&spec("data/digest")))?
                        .map(|digest| HEXLOWER.encode(&digest))?,
                    sum_of(&signature.message),
                    bytes(&spec("signature/content"))?,
                    certificate.or_else(|| verifier("publicKey/rawBytes"))?,
                )
            }
            ("dsse", "0.0.1") => (
                (text("/spec/payloadHash/algorithm")? == "sha256")
                    .then(|| text("/spec/payloadHash/value"))??
                    .to_owned(),
                sum_of(&signature.payload),
                bytes("/spec/signatures/0/signature")?,
                of_pem("/spec/signatures/0/verifier")?,
            ),
            _ => return None,
        };
        Some(digest == expected && recorded == signature.signature && by == verifier)
    }
}

/// Parses a checkpoint, and checks that it is signed by the log.
fn tree_head(envelope: &str, log: &Log) -> Option<TreeHead> {
    let (note, signatures) = envelope.split_once("\n\n")?;
    let signed = format!("{note}\n");
    // Other lines are signatures of witnesses.
    let mut lines = signatures.lines().take(MAX_CHECKPOINT_SIGNATURES);
    let is_signed = lines.any(|line| {
        let mut words = line
            .strip_prefix("\u{2014} ")
            .unwrap_or_default()
            .split(' ');
        let signature = words.nth(1).and_then(|word| STANDARD.decode(word).ok());
        // The first four bytes identify the key.
        let signature = signature
            .as_ref()
            .and_then(|bytes| bytes.split_at_checked(4));
        signature.is_some_and(|(hint, signature)| {
            log.id.starts_with(hint) && log.key.has_signed(signed.as_bytes(), signature)
        })
    });
    let mut lines = note.lines().skip(1);
    let (size, root) = (lines.next()?, lines.next()?);
    let head = TreeHead {
        size: size.parse().ok()?,
        root: STANDARD.decode(root).ok()?.try_into().ok()?,
    };
    is_signed.then_some(head)
}

/// Returns the hash of a node. The first byte distinguishes leaves from inner nodes.
fn node(kind: u8, parts: &[&[u8]]) -> Hash {
    let mut hash = Sha256::new_with_prefix([kind]);
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

/// Returns the root of a tree with `size` leaves, computed from the leaf at `index` (RFC 9162,
/// section 2.1.3.2). `None` if the number of hashes is wrong.
fn root_of(leaf: Hash, index: u64, size: u64, hashes: &[Hash]) -> Option<Hash> {
    let mut position = index;
    let mut last = size.checked_sub(1)?;
    if position > last {
        return None;
    }
    let mut root = leaf;
    for hash in hashes {
        if last == 0 {
            return None;
        }
        if position % 2 == 1 || position == last {
            root = node(1, &[hash, &root]);
            // Skip the levels on which the node has no sibling.
            while position.is_multiple_of(2) && position != 0 {
                position >>= 1;
                last >>= 1;
            }
        } else {
            root = node(1, &[&root, hash]);
        }
        position >>= 1;
        last >>= 1;
    }
    (last == 0).then_some(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the root of a tree of these leaves (RFC 9162, section 2.1.1).
    fn tree(leaves: &[Hash]) -> Hash {
        match leaves {
            [leaf] => *leaf,
            _ => {
                let half = leaves.len().next_power_of_two() / 2;
                let (left, right) = leaves.split_at(half);
                node(1, &[&tree(left), &tree(right)])
            }
        }
    }

    /// Returns the hashes that prove a leaf (RFC 9162, section 2.1.3.1).
    fn proof(leaves: &[Hash], index: usize) -> Vec<Hash> {
        if leaves.len() == 1 {
            return Vec::new();
        }
        let half = leaves.len().next_power_of_two() / 2;
        let (left, right) = leaves.split_at(half);
        if index < half {
            [proof(left, index), vec![tree(right)]].concat()
        } else {
            [proof(right, index - half), vec![tree(left)]].concat()
        }
    }

    #[test]
    fn each_leaf_of_a_tree_is_proved_by_its_own_hashes_only() {
        for size in 1_u8..=20 {
            let leaves: Vec<Hash> = (0..size).map(|n| node(0, &[&[n]])).collect();
            for (index, leaf) in leaves.iter().enumerate() {
                let hashes = proof(&leaves, index);
                let (at, all) = (index as u64, u64::from(size));
                assert_eq!(root_of(*leaf, at, all, &hashes), Some(tree(&leaves)));
                let other = node(0, &[&[size]]);
                assert_ne!(root_of(other, at, all, &hashes), Some(tree(&leaves)));
                assert_eq!(root_of(*leaf, all, all, &hashes), None);
                let longer = [&hashes[..], &[other]].concat();
                assert_eq!(root_of(*leaf, at, all, &longer), None, "{index} of {size}");
                if let Some((_, shorter)) = hashes.split_last() {
                    assert_ne!(root_of(*leaf, at, all, shorter), Some(tree(&leaves)));
                }
            }
        }
        assert_eq!(root_of([0; 32], 0, 0, &[]), None);
    }
}
