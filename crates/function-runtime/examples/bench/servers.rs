//! Measured servers: plain hyper, and functions with each reset, all in this process. A *reset* is
//! a method of cleaning the memory of an instance after a request.

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jiffy_function_runtime::compile;
use jiffy_function_runtime::direct::{self, DirectClient};
use jiffy_function_runtime::engine;
use jiffy_function_runtime::epoch_ticker::EpochTicker;
use jiffy_function_runtime::server::FunctionServer;
use jiffy_function_runtime::tenant::Tenant;
use jiffy_proto::function::{DirectAccess, FunctionLimits, SlotReset, TenantLimits};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;

pub const OWNER: &str = "bench";
/// Measured functions: `core-N` is a core module that writes to N pages of its memory, and `http`
/// is a component of wasi:http.
pub const FUNCTIONS: [&str; 5] = ["core-0", "core-1", "core-16", "core-256", "http"];
/// Examples, and request bodies for them.
pub const EXAMPLES: [(&str, &str); 5] = [
    ("c", "123456789"),
    ("go", "abc"),
    ("rust", "a b a"),
    ("javascript", r#"{"b": 1, "a": [true, null]}"#),
    ("python", "name,age\nAda,36\n"),
];
/// Compiled modules by the name of the example.
pub type Examples = BTreeMap<&'static str, Vec<u8>>;

/// Compiles the examples with a module in `directory`.
pub fn built_examples(directory: String) -> Examples {
    let compiling = engine::compiling().unwrap();
    let built = EXAMPLES.iter().filter_map(|(name, _)| {
        let module = std::fs::read(format!("{directory}/{name}.wasm")).ok()?;
        Some((*name, compile::compile(&compiling, &module, OWNER).unwrap()))
    });
    built.collect()
}

/// Compiles a module.
pub fn compiled(module: &[u8]) -> Vec<u8> {
    compile::compile(&engine::compiling().unwrap(), module, OWNER).unwrap()
}

/// Function servers with one reset.
pub struct FunctionServers {
    pub reset: SlotReset,
    pub server: FunctionServer,
    /// Addresses of direct listeners by function.
    pub addresses: BTreeMap<&'static str, SocketAddr>,
}

/// Returns a module that writes a byte to each of `pages` pages. It answers with the text of its
/// data, which has 20 bytes.
pub fn core_module(pages: usize) -> Vec<u8> {
    let end = 65536 + pages * 4096;
    let text = format!(
        r#"(module (memory (export "memory") 64) (data (i32.const 0) "200\n\nhello, function")
            (func (export "jiffy_buf") (param i32) (result i32) (i32.const 4096))
            (func (export "jiffy_handle") (param i32 i32) (result i32)
              (local $i i32)
              (local.set $i (i32.const 65536))
              (block $done (loop $next
                (br_if $done (i32.ge_u (local.get $i) (i32.const {end})))
                (i32.store8 (local.get $i) (i32.const 1))
                (local.set $i (i32.add (local.get $i) (i32.const 4096)))
                (br $next)))
              (i32.const 20))
            (func (export "jiffy_out") (result i32) (i32.const 0)))"#
    );
    wat::parse_str(text).unwrap()
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Starts a plain hyper server.
pub async fn serve_plain() -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_nodelay(true).unwrap();
            let service = service_fn(|_| async {
                let body = Full::new(Bytes::from_static(b"hello, function"));
                Ok::<_, Infallible>(hyper::Response::new(body))
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    address
}

/// Starts servers of all functions.
pub async fn serve_functions(reset: SlotReset, examples: &Examples) -> FunctionServers {
    let limits = TenantLimits {
        slots: 256,
        reset,
        ..TenantLimits::default()
    };
    let engine = engine::running(&limits).unwrap();
    let ticker = EpochTicker::start(&engine).unwrap();
    let tenant = Arc::new(Tenant::new(OWNER, limits, engine).unwrap());
    let compiling = engine::compiling().unwrap();
    let server = FunctionServer::new(tenant.clone(), ticker.clone());
    let mut addresses = BTreeMap::new();
    for name in FUNCTIONS {
        let module = match name.strip_prefix("core-") {
            Some(pages) => core_module(pages.parse().unwrap()),
            None => wat::parse_bytes(include_bytes!("../../tests/guests/http.wat"))
                .unwrap()
                .into_owned(),
        };
        let file = compile::compile(&compiling, &module, OWNER).unwrap();
        let digest = *blake3::hash(&file).as_bytes();
        let limits = FunctionLimits::default();
        let loaded = tenant.load(&ticker, name, &file, &digest, limits.into());
        loaded.await.unwrap();
        tenant.publish(name, DirectAccess::Public).unwrap();
        let (listener, address) = listen().await;
        tokio::spawn(accept(listener, server.clone(), name));
        addresses.insert(name, address);
    }
    for (name, file) in examples {
        let limits = FunctionLimits {
            memory_mib: 256,
            ..FunctionLimits::default()
        };
        let digest = *blake3::hash(file).as_bytes();
        let loaded = tenant.load(&ticker, name, file, &digest, limits.into());
        loaded.await.unwrap();
    }
    FunctionServers {
        reset,
        server,
        addresses,
    }
}

/// Serves connections in the state in which the daemon hands them over.
async fn accept(listener: TcpListener, server: FunctionServer, name: &'static str) {
    let host = listener.local_addr().unwrap().to_string();
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        let client = DirectClient::new(&stream, name.to_owned(), &host).unwrap();
        let server = server.clone();
        tokio::spawn(async move {
            let (_open, receiver) = watch::channel(true);
            let _ = direct::serve(&server, stream, &client, receiver).await;
        });
    }
}
