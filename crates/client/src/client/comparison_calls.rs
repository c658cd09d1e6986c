//! Requests for comparisons.

use super::Client;
use super::calls::{NEXT_PAGE_HEADER, path_segment};
use hyper::Method;
use jiffy_api_types::Comparison;

/// Maximum number of differences on a page.
const PAGE: usize = 5000;

impl Client {
    /// Compares the files of two sandboxes or snapshots, by id or name. Returns the first `limit`
    /// differences, and whether there are more.
    pub async fn compare(
        &self,
        a: &str,
        b: &str,
        limit: usize,
    ) -> anyhow::Result<(Comparison, bool)> {
        let (a, b) = (path_segment(a)?, path_segment(b)?);
        let page = limit.clamp(1, PAGE);
        let path = format!("/compare?a={a}&b={b}&limit={page}");
        let mut next = String::new();
        let mut whole: Option<Comparison> = None;
        loop {
            let page = format!("{path}{next}");
            let called = self.call_with_headers::<Comparison>(Method::GET, &page, &());
            let (headers, mut part) = called.await?;
            let token = headers.get(NEXT_PAGE_HEADER);
            let token = token.and_then(|token| token.to_str().ok());
            let found = match &mut whole {
                Some(whole) => {
                    whole.changes.append(&mut part.changes);
                    whole
                }
                None => whole.insert(part),
            };
            let has_more = token.is_some() || found.changes.len() > limit;
            if let Some(token) = token.filter(|_| found.changes.len() < limit) {
                // Tokens are base64 for URLs, so they need no escaping.
                next = format!("&nextToken={token}");
                continue;
            }
            found.changes.truncate(limit);
            if let Some(whole) = whole {
                return Ok((whole, has_more));
            }
        }
    }
}
