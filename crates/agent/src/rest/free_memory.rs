//! `POST /free-memory/report`: makes the kernel report all free memory to the host.

use super::error::RestError;
use super::file_query::parameter;
use crate::body::ReplyBody;
use crate::state::Agent;
use crate::workers::CallClass;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use std::{fs, io};

/// Parameter of the guest kernel (`kernel/patches/0025`). A write returns when all free memory is
/// reported.
const REPORT_ALL: &str = "/sys/module/page_reporting/parameters/report_all";

/// Reports the free memory. Responds after the report is complete.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let username = parameter(request.uri(), "username");
    super::only_root(agent, username.as_deref(), "memory reports are").await?;
    // The write lasts until the report is complete. `Archive` is the class of calls that may last
    // up to 60 s without progress. In this class, the call uses no thread of the calls on files.
    let write = |_: &_| fs::write(REPORT_ALL, "1");
    let what = "cannot report free memory";
    match agent.workers.run(CallClass::Archive, what, write).await? {
        Ok(()) => Ok(super::no_content()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(RestError::new(
            StatusCode::NOT_FOUND,
            "this kernel does not report free memory on request",
        )),
        Err(e) => Err(RestError::io("cannot report free memory", &e)),
    }
}
