//! `POST /functions/{name}`: deployment of functions.
//!
//! A *permit* counts towards a limit until it is dropped.

use crate::app::App;
use crate::body::{MAX_BODY, parse_part};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::wire::function;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use jiffy_api_types::{DeploySettings, Function};
use jiffy_function_manager::owner::is_name;
use jiffy_function_manager::{
    BoxError, DeployChanges, DeployQuota, DiskQuota, FunctionError, ModuleUpload,
};
use jiffy_proto::function::MAX_MODULE_BYTES;
use jiffy_sandbox_manager::{QuotaAmount, QuotaPermit, QuotaRequest};
use multer::{Field, Multipart};

/// Bytes of disk space that are reserved per byte of a module: for the module itself and for its
/// compiled machine code. The factor is an estimate. If the machine code is larger, the reservation
/// grows.
const DISK_PER_MODULE_BYTE: u64 = 4;
/// Minimum growth of a reservation in bytes, as far as the quota permits.
const GROWTH_BYTES: u64 = 4 << 20;

/// `POST /functions/{name}`: deploys a function from a form with `settings` (JSON, optional) and
/// `module`. The module is omitted if the settings contain the digest of a stored module.
pub(in crate::routes) async fn deploy(
    State(app): State<App>,
    caller: Caller,
    Path(name): Path<String>,
    request: Request,
) -> Result<Json<Function>, ApiError> {
    let functions = app.functions()?;
    // Check the name before reading the form, which may be large.
    if !is_name(&name) {
        return Err(FunctionError::Name.into());
    }
    // The length of the form, which slightly exceeds the length of the module. Without this header,
    // the reservation grows while the module is received.
    let expected = content_length(&request).unwrap_or(0);
    let mut form = form(request)?;
    let (mut settings, mut module) = (DeploySettings::default(), None);
    while let Some(mut field) = form.next_field().await.map_err(malformed)? {
        match field.name() {
            Some("settings") => settings = parse_part(&read_settings(&mut field).await?)?,
            Some("module") if module.is_none() => {
                // Reserve before receiving, so that an upload cannot exceed the quota.
                let quota = reserve_module_space(&app, &caller, expected).await?;
                let mut upload = functions.upload_of(caller.owner_scope(), quota).await?;
                write_module(&mut field, &mut upload).await?;
                module = Some(upload);
            }
            _ => {
                let message = "the form has an unexpected part: send `settings` and `module` at most once each";
                return Err(ApiError::invalid(message));
            }
        }
    }
    let module = match (module, function::digest(&settings)?) {
        (Some(module), None) => module,
        (None, Some(digest)) => {
            let found = functions.find_module(caller.owner_scope(), digest).await?;
            let quota = reserve_module_space(&app, &caller, found.bytes()).await?;
            functions
                .copy_module(caller.owner_scope(), found, quota)
                .await?
        }
        (None, None) => {
            let message = "the form has no module: send a WebAssembly file as `module`, or the digest of \
                           an earlier module as `digest` in `settings`";
            return Err(ApiError::invalid(message));
        }
        (Some(_), Some(_)) => {
            let message = "the form has both the part `module` and a `digest` in its `settings`: send only one";
            return Err(ApiError::invalid(message));
        }
    };
    let scope = function::sandbox_key(&settings)?;
    let renew = settings.renew_sandbox_key;
    let former_key = functions.find(caller.owner_scope(), &name).ok();
    let former_key = former_key.and_then(|record| record.sandbox_key.clone());
    let sandbox_key = scope.map(|scope| app.sandbox_key(&caller, &name, scope, renew));
    let sandbox_key = sandbox_key.transpose()?;
    let changes = DeployChanges {
        sandbox_key: sandbox_key.clone(),
        ..function::changes(settings)
    };
    let deployed = functions
        .deploy(caller.owner_scope(), &name, changes, module)
        .await;
    // Revoke the key that is no longer used: the former key, or the new key after a failure.
    match &deployed {
        Ok(_) => app.revoke_unused_sandbox_key(former_key.as_ref(), sandbox_key.as_ref()),
        Err(_) => app.revoke_unused_sandbox_key(sandbox_key.as_ref(), former_key.as_ref()),
    }
    Ok(Json(app.function_info(&*deployed?)))
}

fn content_length(request: &Request) -> Option<u64> {
    let length = request.headers().get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// Reserves disk space for a module of `bytes` bytes and its machine code. If either turns out to
/// be larger, the reservation grows before the data is written.
async fn reserve_module_space(
    app: &App,
    caller: &Caller,
    bytes: u64,
) -> Result<DeployQuota, ApiError> {
    // Functions that are deployed by an `admin` key belong to the host's owner, who has no quota.
    let Some(key) = caller.key().filter(|_| caller.owner_scope().is_some()) else {
        return Ok(DeployQuota::default());
    };
    // A client may send any value as `Content-Length`.
    let bytes = bytes.min(MAX_MODULE_BYTES);
    let request = QuotaRequest {
        amount: QuotaAmount {
            disk_bytes: bytes.saturating_mul(DISK_PER_MODULE_BYTE),
            ..QuotaAmount::default()
        },
        disk_floor: None,
    };
    let permit = app.quota.reserve(key, request, None).await?;
    Ok(DeployQuota::limited(ModuleReservation { permit, used: 0 }))
}

/// Disk space that is reserved for one deployment.
#[derive(Debug)]
struct ModuleReservation {
    permit: QuotaPermit,
    /// Bytes written by the deployment.
    used: u64,
}

impl DiskQuota for ModuleReservation {
    fn grow(&mut self, bytes: u64) -> Result<(), BoxError> {
        self.used = self.used.saturating_add(bytes);
        let reserved = self.permit.disk_bytes().unwrap_or(u64::MAX);
        let missing = self.used.saturating_sub(reserved);
        if missing == 0 {
            return Ok(());
        }
        // Grow in large steps if the quota permits, because each step computes the key's whole
        // usage.
        if missing < GROWTH_BYTES && self.permit.grow(GROWTH_BYTES).is_ok() {
            return Ok(());
        }
        Ok(self.permit.grow(missing)?)
    }
}

fn form(request: Request) -> Result<Multipart<'static>, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(kind).map_err(|_| {
        ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            "the body must be `multipart/form-data` with the parts `settings` and `module`",
        )
    })?;
    let body: Body = request.into_body();
    Ok(Multipart::new(body.into_data_stream(), boundary))
}

fn malformed(error: multer::Error) -> ApiError {
    ApiError::invalid(format!("the form cannot be read: {error}"))
}

/// Reads the part `settings`, whose size is bounded.
async fn read_settings(field: &mut Field<'static>) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = field.chunk().await.map_err(malformed)? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > MAX_BODY {
            let message = format!("`settings` is longer than {MAX_BODY} bytes");
            let status = StatusCode::PAYLOAD_TOO_LARGE;
            return Err(ApiError::new(status, "body_too_large", message));
        }
    }
    Ok(bytes)
}

/// Writes the part `module` to the upload.
async fn write_module(
    field: &mut Field<'static>,
    upload: &mut ModuleUpload,
) -> Result<(), ApiError> {
    while let Some(chunk) = field.chunk().await.map_err(malformed)? {
        upload.write(&chunk)?;
    }
    Ok(())
}
