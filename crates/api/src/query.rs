//! Query parameters of a request.

use crate::body::folded;
use crate::error::ApiError;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Decoded parameters of a request. Names are accepted in camel case and in snake case. An empty
/// value counts as absent in [`Self::get`] and [`Self::pairs`], and is an error in the other
/// methods.
pub(crate) struct Query(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Self::parse(parts.uri.query().unwrap_or_default())
    }
}

impl Query {
    /// Parses a query. Invalid UTF-8 is rejected, because a lossy conversion would change the
    /// meaning of the request.
    pub fn parse(query: &str) -> Result<Self, ApiError> {
        let pairs = pairs(query);
        let pairs = pairs.ok_or_else(|| ApiError::invalid("the query is not valid UTF-8"))?;
        Ok(Self(pairs))
    }

    /// Returns the first non-empty value of a parameter.
    pub fn get(&self, name: &str) -> Option<&str> {
        // Clients send empty values for parameters that they do not use.
        self.values(name).find(|value| !value.is_empty())
    }

    /// Returns the values of a parameter, which may be empty.
    fn values(&self, name: &str) -> impl Iterator<Item = &str> {
        let name = folded(name);
        let named = self.0.iter().filter(move |(n, _)| folded(n) == name);
        named.map(|(_, value)| value.as_str())
    }

    /// Parses a whole number within `range`.
    pub fn number(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.values(name).next() else {
            return Ok(None);
        };
        let number = text.parse().ok().filter(|n| range.contains(n));
        number.map(Some).ok_or_else(|| {
            ApiError::invalid(format!(
                "`{name}` must be a whole number from {} to {}",
                range.start(),
                range.end()
            ))
        })
    }

    /// Parses a value that must be one of the names in `words`. Returns the value of that name.
    pub fn word<T: Copy>(&self, name: &str, words: &[(&str, T)]) -> Result<Option<T>, ApiError> {
        let Some(text) = self.values(name).next() else {
            return Ok(None);
        };
        one_of(name, text, words).map(Some)
    }

    /// Parses several names of `words`, separated by commas or in repeated parameters.
    pub fn words<T: Copy>(
        &self,
        name: &str,
        words: &[(&str, T)],
    ) -> Result<Option<Vec<T>>, ApiError> {
        let mut found = Vec::new();
        for value in self.values(name) {
            for text in value.split(',') {
                found.push(one_of(name, text, words)?);
            }
        }
        Ok(Some(found).filter(|f| !f.is_empty()))
    }

    /// Parses `true` or `false`. Defaults to `false`.
    pub fn flag(&self, name: &str) -> Result<bool, ApiError> {
        let words = [("true", true), ("false", false)];
        Ok(self.word(name, &words)?.unwrap_or(false))
    }

    /// Parses an RFC 3339 timestamp. Returns milliseconds since 1970.
    pub fn moment(&self, name: &str) -> Result<Option<i64>, ApiError> {
        let Some(text) = self.values(name).next() else {
            return Ok(None);
        };
        // An unencoded `+` of a UTC offset arrives as a space.
        let text = text.replace(' ', "+");
        let moment: Result<jiff::Timestamp, _> = text.parse();
        match moment {
            Ok(moment) => Ok(Some(moment.as_millisecond())),
            Err(_) => Err(ApiError::invalid(format!(
                "`{name}` must be an RFC 3339 timestamp, like 2026-01-31T12:00:00Z"
            ))),
        }
    }

    /// Parses pairs `k=v&k2=v2` inside one parameter. E2B's clients encode three times: each
    /// key and value, then the pairs as a query, then the query as a parameter value.
    pub fn pairs(&self, name: &str) -> Result<BTreeMap<String, String>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(BTreeMap::new());
        };
        let part = |text: &str| Some(percent_decode_str(text).decode_utf8().ok()?.into_owned());
        let pairs = pairs(value).and_then(|pairs| {
            let parts = pairs.iter().map(|(k, v)| Some((part(k)?, part(v)?)));
            parts.collect()
        });
        pairs.ok_or_else(|| ApiError::invalid(format!("`{name}` is not valid UTF-8")))
    }
}

/// Decodes the pairs of a query. `None` if they are not valid UTF-8.
fn pairs(query: &str) -> Option<Vec<(String, String)>> {
    let decoded = |part: &str| {
        // Forms encode a space as a plus sign.
        let part = part.replace('+', " ");
        Some(percent_decode_str(&part).decode_utf8().ok()?.into_owned())
    };
    let parts = query.split('&').filter(|part| !part.is_empty());
    let pairs = parts.map(|part| {
        // A parameter without a value counts as empty.
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        Some((decoded(name)?, decoded(value)?))
    });
    pairs.collect()
}

/// Returns the value of the name `text` in `words`.
fn one_of<T: Copy>(name: &str, text: &str, words: &[(&str, T)]) -> Result<T, ApiError> {
    let found = words.iter().find(|(word, _)| *word == text);
    found.map(|(_, value)| *value).ok_or_else(|| {
        // The error lists all valid names.
        let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        ApiError::invalid(format!("`{name}` must be one of {}", names.join(", ")))
    })
}
