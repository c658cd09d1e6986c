//! Parser of the responses of etcd's HTTP/JSON gateway (`records/etcd`). In this format, bytes are
//! base64, 64-bit integers are strings, and fields with the value zero or false are absent.

use super::MAX_RECORD_BYTES;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;

/// Header of a response.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Header {
    #[serde(default)]
    cluster_id: String,
    #[serde(default)]
    revision: String,
}

/// Response with a header.
#[derive(Debug, Deserialize)]
pub(crate) struct Headed {
    pub header: Option<Header>,
}

impl Header {
    /// Returns the id of the cluster.
    pub fn cluster(&self) -> Result<u64, String> {
        let id = self.cluster_id.parse();
        id.map_err(|_| "the response names no cluster".to_owned())
    }

    /// Returns the revision of the cluster.
    pub fn revision(&self) -> Result<i64, String> {
        positive(&self.revision)
    }
}

fn positive(text: &str) -> Result<i64, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "the response has no valid revision".to_owned())
}

/// Key with its value (base64) and the revision of its last change.
#[derive(Debug, Deserialize)]
struct KeyValue {
    key: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    mod_revision: String,
}

/// Key, value and revision of a record.
type Found = (String, (Bytes, i64));

impl KeyValue {
    fn decode(&self) -> Result<Found, String> {
        let bytes = |text: &str| {
            let bytes = STANDARD.decode(text);
            bytes.map_err(|_| "the response is not base64".to_owned())
        };
        let key = String::from_utf8(bytes(&self.key)?);
        let key = key.map_err(|_| "a key is not UTF-8".to_owned())?;
        let value = bytes(&self.value)?;
        if value.len() > MAX_RECORD_BYTES {
            return Err("it is too long".to_owned());
        }
        Ok((key, (value.into(), positive(&self.mod_revision)?)))
    }
}

/// Response to a read.
#[derive(Debug, Default, Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

/// Response to a range request.
#[derive(Debug)]
pub(crate) struct RangeAnswer {
    pub records: Vec<Found>,
}

impl RangeAnswer {
    pub fn decode(body: &[u8]) -> Result<Self, String> {
        let range: Range = parse(body)?;
        let records = range.kvs.iter().map(KeyValue::decode);
        Ok(Self {
            records: records.collect::<Result<_, _>>()?,
        })
    }
}

/// Response to a transaction, which etcd uses for conditional writes.
#[derive(Debug, Deserialize)]
struct Txn {
    header: Header,
    /// True if the condition was satisfied.
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<Step>,
}

/// Result of one request of a transaction.
#[derive(Debug, Deserialize)]
struct Step {
    #[serde(default)]
    response_range: Option<Range>,
}

/// Response to a conditional write.
#[derive(Debug)]
pub(crate) enum TxnAnswer {
    /// The record was written at this revision.
    Written(i64),
    /// The comparison failed. Contains the current record.
    Current(Option<(Bytes, i64)>),
}

impl TxnAnswer {
    pub fn decode(body: &[u8]) -> Result<Self, String> {
        let txn: Txn = parse(body)?;
        if txn.succeeded {
            return txn.header.revision().map(Self::Written);
        }
        let step = txn.responses.first();
        let range = step.and_then(|step| step.response_range.as_ref());
        let range = range.ok_or_else(|| "the response has no result".to_owned())?;
        let current = range.kvs.first().map(KeyValue::decode).transpose()?;
        Ok(Self::Current(current.map(|found| found.1)))
    }
}

/// Message of a failed request.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Message {
    #[serde(default)]
    message: String,
    #[serde(default)]
    error: String,
    /// gRPC status.
    #[serde(default)]
    pub code: i64,
}

impl Message {
    pub fn decode(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }

    /// Returns the text, without control characters and bounded in length.
    pub fn text(&self) -> String {
        let text = if self.message.is_empty() {
            &self.error
        } else {
            &self.message
        };
        let printable = text.chars().map(|c| if c.is_control() { ' ' } else { c });
        printable.take(300).collect()
    }
}

pub(crate) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|e| format!("the response is malformed: {e}"))
}

/// Decodes a response as each kind, for fuzzing.
pub fn decode_answer(body: &[u8]) {
    let _ = RangeAnswer::decode(body);
    let _ = TxnAnswer::decode(body);
    let _ = Message::decode(body).text();
    if let Ok(Headed {
        header: Some(header),
    }) = parse::<Headed>(body)
    {
        let _ = header.cluster();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_responses_are_rejected() {
        for body in [
            "",
            "[1]",
            "{\"kvs\": [{\"key\": \"YQ==\"}]}",
            "{\"kvs\": [{\"key\": \"!\", \"mod_revision\": \"1\"}]}",
            "{\"kvs\": [{\"key\": \"/w==\", \"mod_revision\": \"1\"}]}",
            "{\"kvs\": [{\"key\": \"YQ==\", \"mod_revision\": \"-1\"}]}",
        ] {
            assert!(RangeAnswer::decode(body.as_bytes()).is_err(), "{body}");
        }
        let long = STANDARD.encode(vec![0; MAX_RECORD_BYTES + 1]);
        let long = format!(
            "{{\"kvs\": [{{\"key\": \"YQ==\", \"value\": \"{long}\", \"mod_revision\": \"1\"}}]}}"
        );
        assert!(RangeAnswer::decode(long.as_bytes()).is_err());
        for body in [
            "{}",
            "{\"header\": {}, \"succeeded\": true}",
            "{\"header\": {\"revision\": \"1\"}}",
        ] {
            assert!(TxnAnswer::decode(body.as_bytes()).is_err(), "{body}");
        }
    }
}
