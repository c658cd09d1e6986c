//! `POST /init`: the host changes settings of a running sandbox, for example its environment or its
//! clock. Gateways must not forward requests of clients to it, see
//! `jiffy_proto::agent::HOST_ONLY_PATHS`.

use super::error::RestError;
use crate::body::ReplyBody;
use crate::boot::environment::EnvironmentFile;
use crate::boot::identity::set_clock;
use crate::rpc::request::{self, collect};
use crate::state::Agent;
use crate::workers::CallClass;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use jiffy_proto::agent::SiteSettings;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Request to change settings of the agent.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct InitRequest {
    env_vars: Option<BTreeMap<String, String>>,
    access_token: Option<String>,
    timestamp: Option<String>,
    default_user: Option<String>,
    default_workdir: Option<String>,
    /// Removes the certificate authorities and the proxy of the host's network, so that they are
    /// not copied to another sandbox.
    withdraw_site: bool,
    /// Certificate authorities and proxy, which replace the present ones.
    site: Option<SiteSettings>,
}

/// Applies the settings in the request. Other settings are unchanged.
pub async fn answer(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let body = collect(request.into_body(), 1024 * 1024).await?;
    let init: InitRequest = request::parse(&body)?;
    let parse = |timestamp: &String| {
        crate::calendar::parse_time(timestamp)
            .ok_or_else(|| RestError::bad(format!("'{timestamp}' is not an RFC 3339 time")))
    };
    let time = init.timestamp.as_ref().map(parse).transpose()?;
    let given = |text: Option<String>| text.filter(|t| !t.is_empty());
    let user = given(init.default_user);
    if let Some(user) = &user {
        let found = agent.find_user::<RestError>(Some(user)).await;
        // An unknown user is an invalid setting here, not a failed authentication.
        found.map_err(|e| match e.status {
            StatusCode::UNAUTHORIZED => RestError::bad(e.message),
            _ => e,
        })?;
    }
    // An invalid request must change nothing, so everything was checked before.
    if let Some(time) = time {
        set_clock(time).map_err(|e| RestError::io("cannot set the clock", &e))?;
    }
    if init.withdraw_site {
        agent.withdraw_site().await?;
    }
    if let Some(site) = init.site {
        agent.install_site(site).await?;
    }
    // The block ends the borrow before the next await.
    {
        let mut settings = agent.settings.borrow_mut();
        if let Some(env) = init.env_vars {
            // Variables that are not in the request remain.
            settings.env.extend(env);
        }
        if let Some(token) = given(init.access_token) {
            settings.access_token = Some(token);
        }
        if user.is_some() {
            settings.default_user = user;
        }
        if let Some(workdir) = given(init.default_workdir) {
            settings.default_workdir = Some(workdir);
        }
    }
    let environment = EnvironmentFile::of(agent).await?;
    let what = "cannot write the environment file";
    let write = move |_: &_| environment.write().map_err(|e| RestError::io(what, &e));
    agent.workers.attempt(CallClass::Files, what, write).await?;
    Ok(super::no_content())
}
