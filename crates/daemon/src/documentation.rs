//! `/llms.txt`, `/llms-full.txt` and `/docs/...md`: the documentation of this version as texts for
//! agents. They contain nothing of the host, and need no key.

use axum::Router;
use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Directory of the pages.
const DIRECTORY: &str = "docs/";

/// Returns the routes of the texts.
pub fn routes() -> Router {
    Router::new()
        .route(
            "/llms.txt",
            get(async || text("plain", jiffy_documentation::index(DIRECTORY))),
        )
        .route(
            "/llms-full.txt",
            get(async || text("plain", jiffy_documentation::full())),
        )
        .route("/docs/{*path}", get(page))
}

/// Answers with a page of the documentation as Markdown.
async fn page(Path(path): Path<String>) -> Response {
    match jiffy_documentation::page(&path) {
        Some(page) => text("markdown", page.text),
        None => (
            StatusCode::NOT_FOUND,
            "unknown page: `GET /llms.txt` lists all pages\n",
        )
            .into_response(),
    }
}

/// Returns an answer of the media type `text/{kind}`.
fn text(kind: &str, content: impl IntoResponse) -> Response {
    let kind = format!("text/{kind}; charset=utf-8");
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    (headers, content).into_response()
}
