//! Operations of the control plane, as `/openapi.json` describes them. The submodules have one
//! group of calls each; `routes/` has the handlers.

mod events;
mod functions;
mod host;
mod observe;
mod processes;
mod sandboxes;
mod secrets;
mod templates;
mod usage;
mod volumes;
mod webhooks;

pub(super) use sandboxes::merged;

use super::operation::Operation;
use jiffy_api_types::Health;
use serde_json::{Map, Value};

/// All operations.
pub(super) fn all() -> Vec<Operation> {
    let mut all = vec![
        Operation::get("/health", "health", "Health check")
            .answers::<Health>(200, "Healthy")
            .open(),
        Operation::get("/openapi.json", "openapi", "Get this document")
            .answers::<Map<String, Value>>(200, "OpenAPI document")
            .open(),
        Operation::get(
            "/.well-known/openid-configuration",
            "identityIssuer",
            "Get the description of the issuer of identity tokens (OpenID Connect Discovery)",
        )
        .answers::<Map<String, Value>>(200, "Description of the issuer")
        .open()
        .fails_with(&[404]),
        Operation::get(
            "/.well-known/jwks.json",
            "identityKeys",
            "Get the public keys that verify identity tokens (RFC 7517)",
        )
        .answers::<Map<String, Value>>(200, "Public keys")
        .open()
        .fails_with(&[404, 503]),
    ];
    all.extend(sandboxes::sandboxes());
    all.extend(observe::observe());
    all.extend(processes::processes());
    all.extend(events::events());
    all.push(events::audit());
    all.push(usage::usage());
    all.extend(templates::templates());
    all.extend(templates::recipes());
    all.extend(functions::functions());
    all.extend(secrets::secrets());
    all.extend(volumes::volumes());
    all.extend(webhooks::webhooks());
    all.extend(host::host());
    all
}
