//! Pagination of lists.
//!
//! The token of the next page is the position of the last item of the current page. Items that are
//! added or removed between two requests therefore do not shift the remaining pages.

use crate::error::ApiError;
use crate::query::Query;
use axum::Json;
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiffy_sandbox_manager::{ListOrder, ListPosition};
use serde::Serialize;

/// Header with the token of the next page; absent on the last page.
pub(crate) const NEXT: HeaderName = HeaderName::from_static("x-next-token");
/// Maximum and default number of items per page.
pub(crate) const MAX_PAGE_SIZE: usize = 100;
/// Maximum length of a token in bytes. In lists by name, a token contains `[owner/]name`.
const MAX_TOKEN_BYTES: usize = 128;

/// Position of an item in its list: creation time and id. In lists by name, 0 and the name.
pub(crate) type PagePosition = ListPosition;

/// Requested page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Page {
    limit: usize,
    after: Option<PagePosition>,
    /// True if the newest item is first.
    descending: bool,
}

impl Page {
    /// Parses the page from the parameters of a request.
    pub fn from_query(query: &Query) -> Result<Self, ApiError> {
        let limit = query.number("limit", 1..=MAX_PAGE_SIZE as u64)?;
        let orders = [("asc", false), ("desc", true)];
        Ok(Self {
            limit: limit.map_or(MAX_PAGE_SIZE, |l| {
                usize::try_from(l).unwrap_or(MAX_PAGE_SIZE)
            }),
            after: query.get("nextToken").map(parse_token).transpose()?,
            // By default, the newest entry is first.
            descending: query.word("order", &orders)?.unwrap_or(true),
        })
    }

    /// Parses a page of a list sorted by name in ascending order. The page size defaults to
    /// `default_limit`.
    pub fn by_name(query: &Query, default_limit: usize) -> Result<Self, ApiError> {
        // Validate a present limit as in other lists: only the default differs.
        let limit = query.get("limit").map(|_| Self::from_query(query));
        let limit = limit.transpose()?.map_or(default_limit, |page| page.limit);
        Ok(Self {
            limit,
            after: query.get("nextToken").map(parse_token).transpose()?,
            descending: false,
        })
    }

    /// Returns the name after which the page begins. `None` for the first page.
    pub fn after_name(&self) -> Option<&str> {
        self.after.as_ref().map(|(_, name)| name.as_str())
    }

    /// Returns the maximum number of items of the page.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the token of the page after the item `name`, for lists by name.
    pub fn next_name(name: &str) -> Option<HeaderValue> {
        token(&(0, name.to_owned()))
    }

    /// Returns the order of the list and the start of the page.
    pub fn order(&self) -> ListOrder {
        ListOrder {
            descending: self.descending,
            after: self.after.clone(),
        }
    }

    /// Returns the number of items to fetch. One item more than the limit shows whether a next page
    /// exists.
    pub fn fetch_limit(&self) -> usize {
        // Cannot overflow: the limit is at most `MAX_PAGE_SIZE` or the default of a list.
        self.limit + 1
    }

    /// Returns the response with a page of `found`, at most [`Self::fetch_limit`] objects in the
    /// order of `name`. `shown` converts an object to its form in the response.
    pub fn response_by_name<T, S: Serialize>(
        &self,
        mut found: Vec<T>,
        name: impl Fn(&T) -> &str,
        shown: impl Fn(T) -> S,
    ) -> Response {
        let has_more = found.len() > self.limit;
        found.truncate(self.limit);
        let next = found.last().filter(|_| has_more);
        let next = next.and_then(|last| Self::next_name(name(last)));
        let shown: Vec<S> = found.into_iter().map(shown).collect();
        with_next(Json(shown).into_response(), next)
    }

    /// Returns whether an item at `position` is on this page or a later one.
    pub fn reaches(&self, position: &PagePosition) -> bool {
        self.after.as_ref().is_none_or(|after| {
            if self.descending {
                position < after
            } else {
                position > after
            }
        })
    }

    /// Returns the items of the page and the token of the next page.
    pub fn cut<T>(
        &self,
        items: Vec<T>,
        position_of: impl Fn(&T) -> PagePosition,
    ) -> (Vec<T>, Option<HeaderValue>) {
        self.cut_merged(items, false, position_of)
    }

    /// Like [`Self::cut`], for pages of several lists. With `has_more`, one of the lists continues
    /// after its page.
    pub fn cut_merged<T>(
        &self,
        items: Vec<T>,
        has_more: bool,
        position_of: impl Fn(&T) -> PagePosition,
    ) -> (Vec<T>, Option<HeaderValue>) {
        let mut sorted: Vec<(PagePosition, T)> =
            items.into_iter().map(|i| (position_of(&i), i)).collect();
        sorted.sort_by(|a, b| a.0.cmp(&b.0));
        if self.descending {
            sorted.reverse();
        }
        // The caller may have passed items of earlier pages.
        sorted.retain(|(position, _)| self.reaches(position));
        // One entry more than the limit was fetched, to detect a next page (`fetch_limit`).
        let has_next = has_more || sorted.len() > self.limit;
        sorted.truncate(self.limit);
        let last = sorted.last().filter(|_| has_next);
        let next = last.and_then(|(position, _)| token(position));
        (sorted.into_iter().map(|(_, item)| item).collect(), next)
    }
}

/// Adds the token of the next page to the response with a page.
pub(crate) fn with_next(mut response: Response, next: Option<HeaderValue>) -> Response {
    if let Some(next) = next {
        response.headers_mut().insert(NEXT, next);
    }
    response
}

fn token((ms, id): &PagePosition) -> Option<HeaderValue> {
    // Encoded, because clients must not interpret the token.
    let token = URL_SAFE_NO_PAD.encode(format!("{ms}:{id}"));
    HeaderValue::from_str(&token).ok()
}

/// Returns the error for an invalid token.
pub(crate) fn unknown_token() -> ApiError {
    ApiError::invalid(
        "`nextToken` is invalid: use the value of the header `x-next-token` of the previous page",
    )
}

fn parse_token(token: &str) -> Result<PagePosition, ApiError> {
    let bad = unknown_token;
    if token.len() > MAX_TOKEN_BYTES {
        return Err(bad());
    }
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| bad())?;
    let text = String::from_utf8(bytes).map_err(|_| bad())?;
    // Names and ids may contain a colon, but the time does not.
    let (ms, id) = text.split_once(':').ok_or_else(bad)?;
    Ok((ms.parse().map_err(|_| bad())?, id.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(query: &str) -> Result<Page, ApiError> {
        Page::from_query(&Query::parse(query)?)
    }

    proptest! {
        #[test]
        fn joined_pages_are_the_whole_list(
            items in proptest::collection::btree_set((0u64..20, "[a-z]{1,4}"), 0..60),
            limit in 1usize..8,
            descending: bool,
        ) {
            let order = if descending { "desc" } else { "asc" };
            let mut expected: Vec<PagePosition> = items.iter().cloned().collect();
            if descending {
                expected.reverse();
            }
            let (mut seen, mut token) = (Vec::new(), String::new());
            loop {
                let query = format!("limit={limit}&order={order}&nextToken={token}");
                let (mut part, next) = page(&query).unwrap().cut(items.iter().cloned().collect(), Clone::clone);
                prop_assert!(part.len() <= limit);
                seen.append(&mut part);
                match next {
                    Some(next) => token = next.to_str().unwrap().to_owned(),
                    None => break,
                }
            }
            prop_assert_eq!(seen, expected);
        }

        #[test]
        fn later_pages_are_complete_when_items_of_earlier_ones_are_removed(
            count in 2u64..30,
            limit in 1usize..10,
        ) {
            let all: Vec<PagePosition> = (0..count).map(|n| (n, format!("i{n}"))).collect();
            let (first, next) = page(&format!("limit={limit}")).unwrap().cut(all.clone(), Clone::clone);
            let rest: Vec<PagePosition> = all.into_iter().filter(|i| !first.contains(i)).collect();
            if let Some(next) = next {
                let query = format!("limit=100&nextToken={}", next.to_str().unwrap());
                let (mut second, _) = page(&query).unwrap().cut(rest.clone(), Clone::clone);
                second.reverse();
                prop_assert_eq!(second, rest);
            }
        }

        #[test]
        fn any_page_token_is_a_position_or_refused(token in ".{0,200}") {
            let _ = parse_token(&token);
        }
    }

    #[test]
    fn page_parameters_out_of_bounds_are_refused() {
        for bad in [
            "limit=0",
            "limit=101",
            "limit=-1",
            "limit=x",
            "order=up",
            "nextToken=%2B%2B",
        ] {
            assert!(page(bad).is_err(), "{bad}");
        }
        assert_eq!(page("").unwrap().limit, 100);
    }
}
