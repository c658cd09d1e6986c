//! Conversion of events and entries of the audit log to their wire types.

use crate::caller::Caller;
use crate::wire::moment;
use jiffy_api_types::{
    AuditEntry, DroppedEntries, Event as WireEvent, EventType, LifecycleEvent, LifecycleEventData,
    LifecycleEventType, Moment,
};
use jiffy_event_log::{AuditedCall, Dropped, EntryId, Event};
use jiffy_proto::agent::TEAM_ID;

/// Shown as the caller of an event if the reader must not learn the actual caller.
const ADMINISTRATOR: &str = "administrator";
/// Version of E2B's event format.
const LIFECYCLE_VERSION: &str = "v2";

fn time(time_us: u64) -> Moment {
    moment(time_us / 1000)
}

/// Converts an event to the form that `reader` may see.
pub(crate) fn event(reader: &Caller, (id, event): (EntryId, Event)) -> WireEvent {
    let short = |id: String| reader.shown_id(&id).to_owned();
    // Readers that are restricted to one owner may see the id of their own key, but of no other.
    let is_known = |caller: &String| {
        reader.owner_scope().is_none() || reader.owner_scope() == Some(caller.as_str())
    };
    let is_own = event.caller.as_ref().is_some_and(is_known);
    let shown = |caller: String| {
        if is_own {
            caller
        } else {
            ADMINISTRATOR.to_owned()
        }
    };
    let caller = event.caller.map(shown);
    WireEvent {
        id: id.to_string(),
        kind: event.kind,
        time: time(event.time_us),
        host: id.host.to_string(),
        owner: event.owner,
        caller,
        request_id: event.request.filter(|_| is_own),
        sandbox_id: event.sandbox.map(short),
        name: event.name,
        template_id: event.template.map(|name| reader.display_name(&name)),
        snapshot_id: event.snapshot,
        forked_from: event.forked_from.map(short),
        build_id: event.build,
        key_id: event.key,
        count: event.count,
        end_at: event.deadline_ms.map(moment),
        cause: event.cause,
    }
}

/// Converts an entry of the audit log.
pub(crate) fn audited((id, call): (EntryId, AuditedCall)) -> AuditEntry {
    AuditEntry {
        id: id.to_string(),
        time: time(call.time_us),
        host: id.host.to_string(),
        caller: call.caller,
        key_id: call.key,
        session_id: call.session,
        address: call.address,
        request_id: call.request,
        call: call.call,
        sandbox_id: call.sandbox,
        object: call.object,
        command: call.command,
        paths: call.paths,
        status: call.status,
        error_code: call.error,
        ms: call.ms,
        count: call.count,
    }
}

/// Converts removed entries to the form that `reader` may see. Only unrestricted readers see the
/// number of removed entries, because it includes the entries of other owners.
pub(crate) fn dropped(reader: &Caller, dropped: Dropped) -> DroppedEntries {
    DroppedEntries {
        count: Some(dropped.count).filter(|_| reader.owner_scope().is_none()),
        until: time(dropped.until_us),
    }
}

/// Converts an event of the log to E2B's format for a webhook of the API key that owns the sandbox.
/// The complete sandbox id is included.
pub fn webhook_event(id: EntryId, mut event: Event) -> Option<LifecycleEvent> {
    let owner = event.owner.as_deref().map(|owner| format!("{owner}/"));
    let template = event.template.take();
    // The names of the key's own templates are shown without the prefix `OWNER/`, the id of the
    // key.
    event.template = template.map(|name| {
        let own = owner.as_deref().and_then(|owner| name.strip_prefix(owner));
        own.map(str::to_owned).unwrap_or(name)
    });
    // `Caller::Owner` (the owner of the host) is an unrestricted reader: it sees the complete
    // sandbox id. E2B's format contains no caller that would have to be hidden.
    lifecycle(self::event(&Caller::Owner, (id, event)))
}

/// Converts an event to E2B's format. `None` if E2B's clients do not know its type.
pub(crate) fn lifecycle(event: WireEvent) -> Option<LifecycleEvent> {
    let kind = LifecycleEventType::of(event.kind)?;
    let sandbox = event.sandbox_id.unwrap_or_default();
    let template = event.template_id.unwrap_or_default();
    let set_timeout = event
        .end_at
        .filter(|_| event.kind == EventType::SandboxTimeoutChanged);
    // E2B's fields for the build and the execution have no counterpart here. The fields are
    // required, so they repeat the template and the sandbox.
    Some(LifecycleEvent {
        version: LIFECYCLE_VERSION.to_owned(),
        id: event.id,
        kind,
        event_data: set_timeout.map(|at| LifecycleEventData {
            set_timeout: Some(at),
        }),
        sandbox_build_id: template.clone(),
        sandbox_execution_id: sandbox.clone(),
        sandbox_id: sandbox,
        sandbox_team_id: TEAM_ID.to_owned(),
        sandbox_template_id: template,
        timestamp: event.time,
    })
}
