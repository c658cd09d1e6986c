//! Number of running commands of clients in a sandbox, from which the host derives whether the
//! sandbox is in use.

use super::{AgentCall, AgentClient};
use crate::error::ClientError;
use crate::request_body::RequestBody;
use hyper::Method;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Maximum length of a response in bytes.
const MAX_ANSWER_BYTES: usize = 4096;
/// Maximum length of a list of processes in bytes.
const MAX_LIST_BYTES: usize = 64 * 1024;
/// Status of an agent of an earlier version, which does not know the path.
const NOT_FOUND: u16 = 404;

/// Commands that clients started. Terminals and start commands of templates are not included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct ClientCommands {
    /// Number of running commands.
    pub running: u64,
    /// Time in milliseconds since the last command ended. `None` if none has ended.
    #[serde(default)]
    pub ended_ms_ago: Option<u64>,
}

impl AgentClient {
    /// Returns the number of running commands, and the time since the last one ended.
    pub async fn commands(&self) -> Result<ClientCommands, ClientError> {
        let call = AgentCall {
            method: Method::GET,
            path: "/commands",
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, RequestBody::Whole(None)).await?;
        if answer.status.as_u16() == NOT_FOUND {
            // Reading the response to the end returns the connection to the pool.
            answer.collect(MAX_ANSWER_BYTES).await?;
            return self.listed_commands().await;
        }
        let body = self.expect_success(answer).await?;
        // The guest determines the response, so its length is bounded.
        let body = body.collect(MAX_ANSWER_BYTES).await?;
        serde_json::from_slice(&body)
            .map_err(|e| ClientError::Protocol(format!("invalid response of /commands: {e}")))
    }

    /// Counts all processes of an agent of an earlier version.
    async fn listed_commands(&self) -> Result<ClientCommands, ClientError> {
        let call = AgentCall {
            method: Method::POST,
            path: "/process.Process/List",
            content: "application/json",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, RequestBody::whole("{}")).await?;
        let answer = self.expect_success(answer).await?;
        let running = match answer.collect(MAX_LIST_BYTES).await {
            Ok(body) => count(&body)?,
            // The list exceeds the limit, so it has at least one process. The exact number is not
            // needed.
            Err(ClientError::TooLarge { .. }) => 1,
            Err(e) => return Err(e),
        };
        Ok(ClientCommands {
            running,
            ended_ms_ago: None,
        })
    }
}

/// Returns the number of processes in a list.
fn count(body: &[u8]) -> Result<u64, ClientError> {
    #[derive(Deserialize)]
    struct ProcessList {
        #[serde(default)]
        processes: Vec<IgnoredAny>,
    }
    let list: ProcessList = serde_json::from_slice(body)
        .map_err(|e| ClientError::Protocol(format!("invalid list of processes: {e}")))?;
    Ok(u64::try_from(list.processes.len()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    /// Returns the result of a call on an agent that answers the requests in this order.
    async fn commands(answers: &'static [(u16, &str)]) -> Result<ClientCommands, ClientError> {
        let agent = AgentClient::new(move || async move {
            let (near, mut far) = UnixStream::pair()?;
            tokio::spawn(async move {
                for (status, body) in answers {
                    let mut request = [0; 1024];
                    let _ = far.read(&mut request).await;
                    let length = body.len();
                    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n");
                    let _ = far.write_all(format!("{head}{body}").as_bytes()).await;
                }
            });
            Ok(near)
        });
        agent.commands().await
    }

    #[tokio::test]
    async fn agents_of_all_versions_report_commands() {
        for (answers, running, ended_ms_ago) in [
            (&[(200, r#"{"running":2}"#)][..], 2, None),
            (&[(200, r#"{"running":0,"ended_ms_ago":7}"#)], 0, Some(7)),
            (
                &[(404, ""), (200, r#"{"processes":[{"pid":1},{}]}"#)],
                2,
                None,
            ),
            (&[(404, ""), (200, "{}")], 0, None),
        ] {
            let reported = commands(answers).await.unwrap();
            let expected = ClientCommands {
                running,
                ended_ms_ago,
            };
            assert_eq!(reported, expected);
        }
    }

    #[tokio::test]
    async fn an_invalid_answer_is_an_error() {
        for answers in [
            &[(204, "")][..],
            &[(200, r#"{"running":-1}"#)],
            &[(500, "")],
            &[(404, ""), (200, "no list")],
        ] {
            assert!(commands(answers).await.is_err(), "{answers:?}");
        }
    }
}
