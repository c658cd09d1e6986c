//! Handlers of the RPC service `process.Process`, by which clients start and control processes.

use super::frame_hub::Subscription;
use super::message::{
    InputRequest, ProcessInfo, SelectRequest, SignalRequest, StartRequest, StreamInputRequest,
    UpdateRequest,
};
use super::stream::EventStream;
use super::{pty, signal, start};
use crate::body::ReplyBody;
use crate::rpc::request::{self, CallInfo, RequestFrames};
use crate::rpc::{RpcCode, RpcError};
use crate::state::Agent;
use bytes::Bytes;
use hyper::body::Incoming;
use serde_json::json;
use std::rc::Rc;

/// Handles `Start`.
pub async fn start(
    agent: &Rc<Agent>,
    call: CallInfo,
    body: &mut Incoming,
) -> Result<ReplyBody, RpcError> {
    let request: StartRequest = request::single(body).await?;
    let subscription = start::start(agent, request, &call).await?;
    Ok(ReplyBody::Stream(Box::new(EventStream::new(
        subscription,
        call.keepalive,
        // The timeout of the call applies to the process: `start::start` passes it to the task that
        // forwards the output of the process (the pump).
        None,
    ))))
}

/// Handles `Connect`.
pub async fn connect(
    agent: &Rc<Agent>,
    call: CallInfo,
    body: &mut Incoming,
) -> Result<ReplyBody, RpcError> {
    let request: SelectRequest = request::single(body).await?;
    let process = agent.processes.running_or_ended(&request.process)?;
    let first = start::start_event(process.pid);
    // The process has exited: the response consists of its `start` and `end` events.
    if let Some(end) = process.end.get() {
        return Ok(ReplyBody::whole(Bytes::from([&first[..], end].concat())));
    }
    Ok(ReplyBody::Stream(Box::new(EventStream::new(
        Subscription::new(&process, first),
        call.keepalive,
        call.timeout,
    ))))
}

/// Handles `List`.
pub fn list(agent: &Agent) -> serde_json::Value {
    let processes = agent.processes.list();
    let processes: Vec<_> = processes
        .iter()
        .map(|process| ProcessInfo {
            config: &process.config,
            pid: process.pid,
            tag: process.tag.as_deref(),
        })
        .collect();
    json!({ "processes": processes })
}

/// Handles `SendSignal`.
pub fn send_signal(agent: &Agent, request: &SignalRequest) -> Result<(), RpcError> {
    let signal = signal::number(&request.signal)?;
    let process = agent.processes.running(&request.process)?;
    process.signal(signal).map_err(|e| match e.raw_os_error() {
        Some(libc::ESRCH) => RpcError::new(
            RpcCode::NotFound,
            format!("process {} not found", process.pid),
        ),
        _ => RpcError::io("cannot send the signal", &e),
    })
}

/// Handles `SendInput`.
pub async fn send_input(agent: &Agent, request: InputRequest) -> Result<(), RpcError> {
    let process = agent.processes.running(&request.process)?;
    process.input.write(&request.input).await
}

/// Handles `CloseStdin`.
pub async fn close_stdin(agent: &Agent, request: SelectRequest) -> Result<(), RpcError> {
    let process = agent.processes.running(&request.process)?;
    process.input.close().await
}

/// Handles `Update`.
pub async fn update(agent: &Agent, request: UpdateRequest) -> Result<(), RpcError> {
    let process = agent.processes.running(&request.process)?;
    let Some(size) = request.pty.and_then(|pty| pty.size) else {
        return Ok(());
    };
    let terminal =
        process.input.terminal().await.ok_or_else(|| {
            RpcError::new(RpcCode::FailedPrecondition, "the process has no terminal")
        })?;
    pty::resize(terminal.get_ref(), size)
        .map_err(|e| RpcError::io("cannot resize the terminal", &e))
}

/// Handles `StreamInput`. Each frame is read only after the previous frame was written, so that the
/// process determines the client's rate.
pub async fn stream_input(agent: &Agent, body: &mut Incoming) -> Result<(), RpcError> {
    let mut frames = RequestFrames::new(body);
    let mut target = None;
    while let Some(message) = frames.next().await? {
        let request: StreamInputRequest = request::parse(&message)?;
        if let Some(start) = request.start {
            target = Some(agent.processes.running(&start.process)?);
        }
        if let Some(data) = request.data {
            let process = target.as_ref().ok_or_else(|| {
                RpcError::new(
                    RpcCode::InvalidArgument,
                    "the first message must name the process",
                )
            })?;
            process.input.write(&data.input).await?;
        }
    }
    Ok(())
}
