#![no_main]
//! Messages of clients of the MCP server: each is answered, and none is an error of the server.

use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use jiffy_agent_client::ConnectionPool;
use jiffy_client::Client;
use jiffy_mcp::{ApiClients, HttpCaller, HttpServer, LastAddress, PrepareFuture, Templates};
use libfuzzer_sys::fuzz_target;
use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, LazyLock};
use tokio::io::DuplexStream;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

/// Clients of an API that cannot be reached.
struct NoApi;

impl ApiClients for NoApi {
    fn client(&self, secret: &str, _: LastAddress) -> anyhow::Result<Client> {
        let fail = || async { Err::<DuplexStream, _>(io::Error::other("no API")) };
        Client::over(ConnectionPool::new(fail), "the daemon".to_owned(), secret)
    }
}

struct NoTemplates;

impl Templates for NoTemplates {
    fn prepare(&self, template: String) -> PrepareFuture {
        Box::pin(std::future::ready(Ok(template)))
    }
}

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_all().build().unwrap());
static SERVER: LazyLock<HttpServer> =
    LazyLock::new(|| HttpServer::new(NoApi, Arc::new(NoTemplates), CancellationToken::new()));

fuzz_target!(|data: &[u8]| {
    let request = Request::post("/mcp")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .body(Full::new(Bytes::copy_from_slice(data)))
        .unwrap();
    let caller = HttpCaller {
        secret: "a",
        address: Ipv4Addr::LOCALHOST.into(),
        is_read_only: false,
    };
    let (status, body) = RUNTIME.block_on(async {
        let response = SERVER.answer(caller, request).await;
        let status = response.status();
        (
            status,
            response.into_body().collect().await.unwrap().to_bytes(),
        )
    });
    assert!(status.as_u16() < 500, "{status}: {body:?}");
});
