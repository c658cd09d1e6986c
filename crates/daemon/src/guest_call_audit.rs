//! [`GuestCallAudit`]: records calls of clients to agents (commands, files) in the audit log. The
//! gateway recognises these calls while it forwards them.

use jiffy_api_types::AuditCaller;
use jiffy_event_log::{AuditLog, AuditedCall};
use jiffy_gateway::{GuestCall, GuestCallLog};
use jiffy_proto::internal::InternalOrigin;

/// Status of a request without a valid token.
const UNAUTHENTICATED: u16 = 401;

/// Records calls to agents in the audit log.
#[derive(Debug)]
pub struct GuestCallAudit(pub AuditLog);

impl GuestCallLog for GuestCallAudit {
    fn record(&self, call: GuestCall) {
        let (caller, key) = match call.origin.as_deref() {
            _ if call.peer.local => (AuditCaller::Owner, None),
            Some(InternalOrigin::Function { key, .. } | InternalOrigin::Sandbox { key }) => {
                (AuditCaller::Function, Some(key.clone()))
            }
            // A client without a valid token may be anyone. The call is recorded like other calls
            // of clients without a key.
            None if call.status == UNAUTHENTICATED => (AuditCaller::Unknown, None),
            None => (AuditCaller::Token, call.owner),
        };
        let address = Some(call.peer.ip.to_string()).filter(|_| !call.peer.local);
        let ms = u64::try_from(call.duration.as_millis()).unwrap_or(u64::MAX);
        self.0.record(AuditedCall {
            caller,
            key,
            address,
            request: Some(call.request_id),
            sandbox: Some(call.sandbox),
            command: call.command,
            paths: call.paths,
            ms,
            ..AuditedCall::new(call.call.to_owned(), call.status)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_event_log::{AuditFilter, PageQuery, Retention};
    use jiffy_gateway::Peer;
    use std::time::Duration;

    /// Returns a call of the agent of a sandbox.
    fn call(owner: &str, status: u16, local: bool) -> GuestCall {
        GuestCall {
            sandbox: "s".to_owned(),
            owner: Some(owner.to_owned()),
            peer: Peer {
                ip: "192.0.2.1".parse().unwrap(),
                tls: false,
                local,
            },
            origin: None,
            request_id: "r".to_owned(),
            call: "POST /process.Process/Start",
            command: Some("ls".to_owned()),
            paths: Vec::new(),
            status,
            duration: Duration::ZERO,
        }
    }

    #[test]
    fn commands_name_the_key_of_the_sandbox_and_rejected_ones_no_key() {
        let directory = tempfile::tempdir().unwrap();
        let retention = Retention {
            max_bytes: 1 << 20,
            max_age: Duration::from_secs(3600),
        };
        let log = AuditLog::open(directory.path(), None, retention).unwrap();
        let audit = GuestCallAudit(log.clone());
        // Owner of the sandbox, status, and whether the caller is the host's owner. Of the calls to
        // the sandbox of `bob`, only the one with the status 404 has the key of `bob`.
        audit.record(call("alice", 200, false));
        audit.record(call("bob", 404, false));
        audit.record(call("bob", 401, false));
        audit.record(call("bob", 200, true));
        let of = |key: &str| {
            let filter = AuditFilter {
                key: Some(key.to_owned()),
                ..AuditFilter::default()
            };
            let query = PageQuery {
                limit: 10,
                ..PageQuery::default()
            };
            log.page(&query, &filter).unwrap().entries
        };
        assert_eq!(of("alice").len(), 1);
        let (_, entry) = of("bob").remove(0);
        assert_eq!((entry.caller, entry.status), (AuditCaller::Token, 404));
        assert_eq!((of("bob").len(), entry.is_rejected()), (1, false));
    }
}
