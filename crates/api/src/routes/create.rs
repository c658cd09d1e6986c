//! `POST /sandboxes` and `POST /v2/sandboxes`: create a sandbox.

use crate::app::App;
use crate::audit::CreatedSandbox;
use crate::body::{Raw, parse};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::header_rules::parse_rules;
use crate::idempotency::{digest, key_of};
use crate::lookup::Origin;
use crate::mcp_servers;
use crate::network::{check_rules, with_template};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use jiffy_api_types::{
    AutoResume, MAX_AUTHORITIES_BYTES, MAX_NAME, MAX_PAIRS, MAX_VALUE, NetworkSettings,
    NewLifecycle, NewSandbox, OnNodeLoss, OnTimeout, Proxy, SnapshotContent,
};
use jiffy_engine_api::SandboxSize;
use jiffy_proto::agent::SiteSettings;
use jiffy_sandbox_manager::{
    CreateSpec, Creation, SandboxSettings, SandboxSource, SiteError, authorities,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Metadata key with which CubeSandbox's clients request directories of the host.
const HOST_MOUNT: &str = "host-mount";

/// `POST /v2/sandboxes`: always creates a secure sandbox, whose agent requires a token.
pub(super) async fn create_v2(
    state: State<App>,
    caller: Caller,
    headers: HeaderMap,
    body: Raw,
) -> Result<Response, ApiError> {
    create(state, caller, headers, body, Some(true)).await
}

/// `POST /sandboxes`: the field `secure` of the body determines whether the agent requires a token.
pub(super) async fn create_v1(
    state: State<App>,
    caller: Caller,
    headers: HeaderMap,
    body: Raw,
) -> Result<Response, ApiError> {
    create(state, caller, headers, body, None).await
}

/// Creates a sandbox once per `Idempotency-Key`: a repeated request returns the first response.
async fn create(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    body: Raw,
    secure: Option<bool>,
) -> Result<Response, ApiError> {
    let Some(key) = key_of(&headers)? else {
        return create_once(&app, &caller, &body, secure, None).await;
    };
    // The digest includes the version of the call, because the same body may mean another sandbox.
    let request = digest(&format!("create {secure:?}"), &body.0);
    // In a fleet, the record of the sandbox contains the key and outlives this process. The
    // responses in `replays` are in memory.
    if let Some(answer) = app.earlier_create(&caller, &key, &request) {
        return answer;
    }
    let (replays, owner) = (app.replays.clone(), caller.owner_id());
    let creation = app.creation(&key, &request);
    let work = async move {
        create_once(&app, &caller, &body, secure, creation)
            .await
            .into_response()
    };
    replays.execute_once(owner, key, request, work).await
}

/// Creates a sandbox. `secure`, if present, overrides the field in the body. `creation`
/// (idempotency key and digest of the request) is stored in the record of the sandbox.
async fn create_once(
    app: &App,
    caller: &Caller,
    Raw(body, ignored): &Raw,
    secure: Option<bool>,
    creation: Option<Creation>,
) -> Result<Response, ApiError> {
    let request: NewSandbox = parse(body, ignored)?;
    // Functions create sandboxes on their own host.
    let selects_host = app.fleet.is_some() && !matches!(caller, Caller::Function(_));
    reject_unsupported(&request, selects_host)?;
    crate::fleet::scope::check(&request)?;
    let requested_size = (request.cpu_count, request.memory_mb, request.disk_size_mb);
    // `_held` protects a fetched snapshot from garbage collection until the sandbox is created.
    let (origin, _held) = app.origin_or_fetched(caller, &request.template_id).await?;
    if let Origin::Template(info) = &origin {
        mcp_servers::check(request.mcp.as_ref(), &info.reference())?;
    }
    let engine = match &origin {
        Origin::Snapshot(snapshot) => Some(snapshot.engine().to_owned()),
        Origin::Template(_) => request.engine.clone(),
    };
    let template_network = match &origin {
        Origin::Template(info) => info.network.clone().unwrap_or_default(),
        Origin::Snapshot(_) => Arc::default(),
    };
    let idle_timeout_s = app.idle_timeout(caller, Some(&origin), request.idle_timeout)?;
    let (source, size, reserved_size) = match origin {
        Origin::Template(info) => {
            let size = SandboxSize {
                vcpus: requested_size.0.unwrap_or(info.size.vcpus),
                memory_mib: requested_size.1.unwrap_or(info.size.memory_mib),
                disk_mib: requested_size.2.unwrap_or(info.size.disk_mib),
            };
            size.check().map_err(|e| ApiError::invalid(e.to_string()))?;
            (SandboxSource::Template(info.reference()), Some(size), size)
        }
        // The memory of a snapshot cannot be resized.
        Origin::Snapshot(_) if requested_size != (None, None, None) => {
            return Err(ApiError::invalid(
                "a sandbox created from a snapshot has the snapshot's size: omit `cpuCount`, \
                 `memoryMB` and `diskSizeMB`",
            ));
        }
        Origin::Snapshot(snapshot) => (
            SandboxSource::Snapshot(snapshot.id().to_owned()),
            None,
            snapshot.size(),
        ),
    };
    let pause_content = SnapshotContent::with_memory(request.auto_pause_memory);
    app.check_content(engine.as_deref(), pause_content)?;
    let owner = caller.owner_id();
    let rules = request.network.as_ref().and_then(|n| n.rules.as_ref());
    let identity_tokens = app.identity_tokens(request.iam)?;
    let rules = app.header_rules(owner.as_deref(), parse_rules(rules)?, &identity_tokens)?;
    let has_rules = !rules.is_empty();
    let network = request.network.as_ref();
    let proxy = network.and_then(|n| n.egress_proxy.clone());
    let joined = network.and_then(|n| n.join.clone());
    let (egress_proxy, egress_proxy_secrets) = app.egress_proxy(owner.as_deref(), proxy)?.unzip();
    let allowed = request.allow_internet_access;
    let (network, allowed) = with_template(request.network, allowed, &template_network);
    let network = check_rules(network, allowed)?;
    let header_authority = has_rules.then(|| app.header_authority()).transpose()?;
    let spec = CreateSpec {
        source,
        size,
        name: request.name,
        engine: request.engine,
        prefetch: request.prefetch.unwrap_or_default(),
        env: env(request.env_vars.or(request.envs))?,
        settings: SandboxSettings {
            owner,
            metadata: metadata(request.metadata)?,
            timeout_s: app.config.timeout_or_default(request.timeout)?,
            pause_content,
            on_timeout: on_timeout(request.auto_pause, request.lifecycle.as_ref()),
            idle_timeout_s,
            // Requests resume a sandbox that was paused because there were none.
            auto_resume: auto_resume(request.auto_resume, request.lifecycle.as_ref())
                .unwrap_or(idle_timeout_s.is_some()),
            // Defaults to secure. An insecure sandbox accepts requests to its agent without a
            // token.
            secure: secure.unwrap_or(request.secure != Some(false)),
            network: NetworkSettings {
                rules,
                egress_proxy,
                ..network
            },
            site: site(request.ca_certificates, request.proxy)?,
            header_authority,
            egress_proxy_secrets,
            identity_tokens,
            volumes: app.volumes_of_new(caller, request.volume_mounts).await?,
            creation,
        },
    };
    // Reserve before creating. The permit is held until the sandbox is counted as used.
    let pauses = spec.settings.pauses();
    let _permit = app
        .quota
        .reserve_new(caller, reserved_size, 1, pauses)
        .await?;
    if let Some(joined) = joined {
        app.reserve_network(caller, &joined).await?;
    }
    let sandbox = app.sandboxes.create(spec).await?;
    let answer = Json(app.answer(caller, &sandbox));
    let mut response = (StatusCode::CREATED, answer).into_response();
    let created = CreatedSandbox(sandbox.id().to_owned());
    response.extensions_mut().insert(created);
    Ok(response)
}

/// Rejects options that this host does not support, instead of ignoring them. `selects_host` states
/// whether the coordinator, one host of a fleet, selects the host of the sandbox.
fn reject_unsupported(request: &NewSandbox, selects_host: bool) -> Result<(), ApiError> {
    let refusals = [
        (
            request.on_node_loss == Some(OnNodeLoss::Restore),
            "`onNodeLoss: restore` is not supported: no host may start a sandbox while its lost host \
             may still run it; use `wait`, and resume with `from: stored` after a loss",
        ),
        (
            !selects_host && request.host_labels.as_ref().is_some_and(|l| !l.is_empty()),
            "`hostLabels` is not supported: this host is in no fleet, or a function creates the sandbox; omit `hostLabels`",
        ),
        (
            request
                .metadata
                .as_ref()
                .is_some_and(|m| m.contains_key(HOST_MOUNT)),
            "`metadata.host-mount` is not supported: sandboxes cannot mount directories of the host",
        ),
    ];
    match refusals.iter().find(|(is_present, _)| *is_present) {
        Some((_, why)) => Err(ApiError::unsupported_option(*why)),
        None => Ok(()),
    }
}

fn on_timeout(auto_pause: Option<bool>, lifecycle: Option<&NewLifecycle>) -> OnTimeout {
    let nested = lifecycle.and_then(|l| l.on_timeout);
    match (auto_pause, nested) {
        // The top-level field takes precedence.
        (Some(true), _) | (None, Some(OnTimeout::Pause)) => OnTimeout::Pause,
        (Some(false), _) | (None, Some(OnTimeout::Kill) | None) => OnTimeout::Kill,
    }
}

/// Returns whether the sandbox resumes automatically, if the request states this. The top-level
/// field takes precedence.
fn auto_resume(flag: Option<AutoResume>, lifecycle: Option<&NewLifecycle>) -> Option<bool> {
    let flag = flag.and_then(|a| a.enabled);
    flag.or(lifecycle.and_then(|l| l.auto_resume))
}

/// Checks the certificate authorities and the proxy of a request.
fn site(certificates: Option<String>, proxy: Option<Proxy>) -> Result<SiteSettings, ApiError> {
    let invalid = |what: &str, e: SiteError| ApiError::invalid(format!("`{what}`: {e}"));
    let authorities = match certificates.as_deref().filter(|pem| !pem.is_empty()) {
        Some(pem) => authorities(pem, MAX_AUTHORITIES_BYTES),
        None => Ok(Vec::new()),
    };
    let proxy = proxy.map(|body| {
        jiffy_sandbox_manager::proxy(&body.url, body.no_proxy.as_deref().unwrap_or_default())
    });
    Ok(SiteSettings {
        authorities: authorities.map_err(|e| invalid("caCertificates", e))?,
        proxy: proxy.transpose().map_err(|e| invalid("proxy", e))?,
    })
}

fn metadata(pairs: Option<BTreeMap<String, String>>) -> Result<BTreeMap<String, String>, ApiError> {
    let pairs = pairs.unwrap_or_default();
    check_size("metadata", &pairs)?;
    Ok(pairs)
}

/// Checks the environment variables of a request.
fn env(pairs: Option<BTreeMap<String, String>>) -> Result<BTreeMap<String, String>, ApiError> {
    let pairs = pairs.unwrap_or_default();
    check_size("envVars", &pairs)?;
    let nul = |s: &String| s.contains('\0');
    for (name, value) in &pairs {
        // The guest's environment is a list of `name=value` strings that end with NUL.
        if name.is_empty() || name.contains('=') || nul(name) || nul(value) {
            return Err(ApiError::invalid(format!(
                "`envVars`: `{}` is not a valid environment variable: a name must be non-empty and \
                 without `=`, and names and values must not contain NUL",
                crate::lookup::short(name)
            )));
        }
    }
    Ok(pairs)
}

fn check_size(what: &str, pairs: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let is_longer = |text: &String, limit: usize| text.chars().count() > limit;
    let is_too_large = pairs.len() > MAX_PAIRS
        || pairs
            .iter()
            .any(|(k, v)| is_longer(k, MAX_NAME) || is_longer(v, MAX_VALUE));
    if is_too_large {
        return Err(ApiError::invalid(format!(
            "`{what}` is too large: at most {MAX_PAIRS} entries, with names of at most {MAX_NAME} and values of at most {MAX_VALUE} characters"
        )));
    }
    Ok(())
}
