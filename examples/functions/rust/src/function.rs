//! Interface wasi:http/proxy around the handler.

use crate::handler::handle;
use wasip2::exports::http::incoming_handler::Guest;
use wasip2::http::types::{
    Fields, IncomingRequest, Method, OutgoingBody, OutgoingResponse, ResponseOutparam,
};
use wasip2::io::streams::StreamError;

/// Bytes of one read and of one write. A host accepts at least 4 KiB.
const CHUNK_BYTES: usize = 4096;

struct Function;
wasip2::http::proxy::export!(Function);

impl Guest for Function {
    fn handle(request: IncomingRequest, response_out: ResponseOutparam) {
        let method = match request.method() {
            Method::Get => "GET".to_owned(),
            Method::Post => "POST".to_owned(),
            Method::Other(name) => name,
            other => format!("{other:?}").to_uppercase(),
        };
        let path = request.path_with_query().unwrap_or_default();
        let (status, kind, body) = handle(&method, &path, &read(&request));
        let headers = Fields::new();
        headers
            .append("content-type", kind.as_bytes())
            .expect("a valid header");
        let response = OutgoingResponse::new(headers);
        response.set_status_code(status).expect("a valid status");
        let outgoing = response.body().expect("the body is taken once");
        ResponseOutparam::set(response_out, Ok(response));
        let stream = outgoing.write().expect("the stream is taken once");
        for chunk in body.as_bytes().chunks(CHUNK_BYTES) {
            // The client may have disconnected.
            if stream.blocking_write_and_flush(chunk).is_err() {
                return;
            }
        }
        drop(stream);
        let _ = OutgoingBody::finish(outgoing, None);
    }
}

fn read(request: &IncomingRequest) -> Vec<u8> {
    let body = request.consume().expect("the body is taken once");
    let stream = body.stream().expect("the stream is taken once");
    let mut bytes = Vec::new();
    loop {
        match stream.blocking_read(CHUNK_BYTES as u64) {
            Ok(chunk) => bytes.extend(chunk),
            Err(StreamError::Closed) => return bytes,
            Err(error) => panic!("reading the body: {error:?}"),
        }
    }
}
