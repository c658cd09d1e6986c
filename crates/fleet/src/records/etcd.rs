//! Records in etcd 3.4 or later, through its HTTP/JSON gateway.
//!
//! A write is a transaction that compares the revision at which the key was last modified, and
//! reads the key if the comparison fails. The gateway is used instead of gRPC, because the HTTP
//! client is a dependency already. Leases, locks and watches of etcd are not used.

mod client;
mod settings;

use super::etcd_answer::{RangeAnswer, TxnAnswer};
use super::{
    BackendVersion, MAX_PAGE_KEYS, Page, RecordError, RecordKey, Records, Version, Versioned,
    Written, check_size,
};
use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use client::{Client, Failure};
use serde_json::{Value, json};

pub use settings::{EtcdSettings, EtcdUrl};

/// Records as keys of etcd below a prefix.
#[derive(Debug)]
pub struct EtcdRecords {
    client: Client,
    prefix: String,
}

impl EtcdRecords {
    /// Uses the cluster of `settings`. Sends no request.
    pub fn new(settings: &EtcdSettings) -> Result<Self, RecordError> {
        Ok(Self {
            client: Client::new(settings)?,
            prefix: settings.url.prefix().to_owned(),
        })
    }

    fn key(&self, key: &RecordKey) -> String {
        STANDARD.encode(self.path(key.as_str()))
    }

    fn path(&self, key: &str) -> String {
        if self.prefix.is_empty() {
            key.to_owned()
        } else {
            format!("{}/{key}", self.prefix)
        }
    }

    async fn read(&self, key: &RecordKey, body: &Value) -> Result<RangeAnswer, RecordError> {
        let answer = self.client.call("/v3/kv/range", body).await;
        let answer = answer.map_err(|failure| failure.of_read(key))?;
        RangeAnswer::decode(&answer).map_err(|reason| damaged(key, reason))
    }

    /// Writes a record if its key was last modified at revision `expected` (0 if it must not
    /// exist).
    async fn write(
        &self,
        key: &RecordKey,
        value: Bytes,
        expected: i64,
    ) -> Result<Written, RecordError> {
        check_size(key, &value)?;
        let name = self.key(key);
        let body = json!({
            "compare": [{
                "key": name, "target": "MOD", "result": "EQUAL",
                "mod_revision": expected.to_string(),
            }],
            "success": [{"request_put": {"key": name, "value": STANDARD.encode(&value)}}],
            "failure": [{"request_range": {"key": name}}],
        });
        // Each attempt sends the same transaction, of which at most one can succeed.
        let answer = self.client.call("/v3/kv/txn", &body).await;
        let answer = answer.map_err(|failure| failure.of_write(key))?;
        let answer = TxnAnswer::decode(&answer).map_err(|reason| damaged(key, reason))?;
        Ok(match answer {
            TxnAnswer::Written(revision) => Written::Done(version(revision)),
            // An earlier attempt succeeded, but its response was lost.
            TxnAnswer::Current(Some((current, revision))) if current == value => {
                Written::Done(version(revision))
            }
            TxnAnswer::Current(current) => Written::Lost(current.map(versioned)),
        })
    }

    /// Returns warnings about settings of the cluster that endanger the records.
    pub async fn warnings(&self) -> Result<Vec<String>, RecordError> {
        self.client.warnings().await
    }
}

fn version(revision: i64) -> Version {
    Version(BackendVersion::Revision(revision))
}

fn versioned((value, revision): (Bytes, i64)) -> Versioned {
    Versioned {
        value,
        version: version(revision),
    }
}

/// Checks that a listing has at most `limit` keys, in ascending order, after the key `after`.
fn check_listing(
    keys: &[RecordKey],
    after: Option<&RecordKey>,
    limit: usize,
) -> Result<(), String> {
    if keys.len() > limit {
        let count = keys.len();
        return Err(format!(
            "the listing has {count} keys, but at most {limit} were requested"
        ));
    }
    let follows = |keys: &[RecordKey]| keys[0] < keys[1];
    if !keys.windows(2).all(follows) || keys.first().is_some_and(|first| after >= Some(first)) {
        return Err("the listing is not in ascending order".to_owned());
    }
    Ok(())
}

fn damaged(key: &RecordKey, reason: String) -> RecordError {
    RecordError::Damaged {
        record: key.clone(),
        reason,
    }
}

#[async_trait]
impl Records for EtcdRecords {
    async fn get(&self, key: &RecordKey) -> Result<Option<Versioned>, RecordError> {
        let read = self.read(key, &json!({"key": self.key(key)})).await?;
        Ok(read
            .records
            .into_iter()
            .next()
            .map(|record| versioned(record.1)))
    }

    async fn create(&self, key: &RecordKey, value: Bytes) -> Result<Written, RecordError> {
        self.write(key, value, 0).await
    }

    async fn replace(
        &self,
        key: &RecordKey,
        value: Bytes,
        version: &Version,
    ) -> Result<Written, RecordError> {
        let BackendVersion::Revision(expected) = version.0 else {
            return Err(super::foreign_version(key));
        };
        self.write(key, value, expected).await
    }

    async fn list(
        &self,
        prefix: &RecordKey,
        after: Option<&RecordKey>,
        limit: usize,
    ) -> Result<Page, RecordError> {
        let limit = limit.min(MAX_PAGE_KEYS);
        let folder = self.path(prefix.as_str());
        let start = match after {
            // The smallest key above `after`.
            Some(after) => format!("{}\0", self.path(after.as_str())),
            None => format!("{folder}/"),
        };
        // `0` follows `/` in ASCII, so that the range ends after the last key of the folder.
        let end = format!("{folder}0");
        let body = json!({
            "key": STANDARD.encode(start),
            "range_end": STANDARD.encode(end),
            "limit": limit.to_string(),
            "keys_only": true,
        });
        let read = self.read(prefix, &body).await?;
        let skipped = self.path("").len();
        let names = read.records.iter().map(|(name, _)| name);
        let keys = names.map(|name| name.get(skipped..).unwrap_or_default().parse());
        let keys: Vec<RecordKey> = keys.collect::<Result<_, _>>()?;
        check_listing(&keys, after, limit).map_err(|reason| damaged(prefix, reason))?;
        Ok(Page {
            more: keys.len() == limit,
            keys,
        })
    }

    async fn purge(&self, key: &RecordKey) -> Result<(), RecordError> {
        let body = json!({"key": self.key(key)});
        let removed = self.client.call("/v3/kv/deleterange", &body).await;
        removed.map(drop).map_err(|failure| match failure {
            // Removing a record twice is harmless, so an unknown outcome is reported like a removal
            // that was not executed.
            Failure::Unavailable(_) => failure.of_read(key),
            failure => failure.of_write(key),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listings_with_too_many_keys_or_in_another_order_are_rejected_with_the_reason() {
        let keys = |names: &[&str]| -> Vec<RecordKey> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        let after: RecordKey = "fleet/b".parse().unwrap();
        let check = |names: &[&str], after| check_listing(&keys(names), after, 2);
        check(&[], Some(&after)).unwrap();
        check(&["fleet/a", "fleet/b"], None).unwrap();
        check(&["fleet/c", "fleet/d"], Some(&after)).unwrap();
        let error = check(&["fleet/a", "fleet/b", "fleet/c"], None).unwrap_err();
        assert!(error.contains("3 keys, but at most 2"), "{error}");
        for (names, after) in [
            (["fleet/b", "fleet/a"], None),
            (["fleet/a", "fleet/a"], None),
            (["fleet/b", "fleet/c"], Some(&after)),
        ] {
            let error = check(&names, after).unwrap_err();
            assert!(error.contains("order"), "{error}");
        }
    }
}
