//! Deployment of a module.

use crate::app::App;
use crate::body::{MAX_BODY, parse};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::wire::function::DeploySettings;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use jiffy_engine::Engine;
use jiffy_function_host::owner::is_name;
use jiffy_function_host::{DeployChanges, FunctionError, ModuleUpload};
use jiffy_host::{QuotaAmount, QuotaRequest};
use multer::{Field, Multipart};
use serde_json::Value;

/// Bytes on disk that are reserved per byte of a module: itself and its machine code.
const DISK_PER_MODULE_BYTE: u64 = 4;

/// `POST /functions/{name}`: a form with `settings` (JSON, may be absent) and `module`, which is
/// absent if the settings name it by its digest.
pub(in crate::routes) async fn deploy<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(name): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let functions = app.functions()?;
    if !is_name(&name) {
        return Err(FunctionError::Name.into());
    }
    let mut form = form(request)?;
    let (mut settings, mut module) = (DeploySettings::default(), None);
    while let Some(mut field) = form.next_field().await.map_err(malformed)? {
        match field.name() {
            Some("settings") => settings = parse(&small(&mut field).await?)?,
            Some("module") if module.is_none() => {
                let mut upload = functions.upload_of(caller.bounds()).await?;
                receive(&mut field, &mut upload).await?;
                module = Some(upload);
            }
            _ => {
                let message = "the form has a part that is neither `settings` nor the one `module`";
                return Err(ApiError::invalid(message));
            }
        }
    }
    let module = match (module, settings.digest()?) {
        (Some(module), None) => module,
        (None, Some(digest)) => functions.module(caller.bounds(), digest).await?,
        (None, None) => {
            let message = "the form needs the part `module`, a WebAssembly file, or the digest of \
                           one that you deployed before in its `settings`";
            return Err(ApiError::invalid(message));
        }
        (Some(_), Some(_)) => {
            let message =
                "the form has the part `module` or a `digest` in its `settings`, not both";
            return Err(ApiError::invalid(message));
        }
    };
    let _room = match caller.key().filter(|_| caller.bounds().is_some()) {
        Some(key) => {
            let amount = QuotaAmount {
                disk_bytes: module.bytes().saturating_mul(DISK_PER_MODULE_BYTE),
                ..QuotaAmount::default()
            };
            let request = QuotaRequest {
                amount,
                disk_floor: None,
            };
            Some(app.quota.reserve(key, request, None).await?)
        }
        None => None,
    };
    let scope = settings.sandbox_key()?;
    let renew = settings.renew_sandbox_key;
    let former = functions.find(caller.bounds(), &name).ok();
    let former = former.and_then(|record| record.sandbox_key.clone());
    let granted = scope.map(|scope| app.sandbox_key(&caller, &name, scope, renew));
    let granted = granted.transpose()?;
    let changes = DeployChanges {
        sandbox_key: granted.clone(),
        ..settings.into()
    };
    let deployed = functions
        .deploy(caller.bounds(), &name, changes, module)
        .await;
    match &deployed {
        Ok(_) => app.end_sandbox_key(former.as_ref(), granted.as_ref()),
        Err(_) => app.end_sandbox_key(granted.as_ref(), former.as_ref()),
    }
    Ok(Json(app.shown_function(&*deployed?)))
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

/// A part of bounded size.
async fn small(field: &mut Field<'static>) -> Result<Vec<u8>, ApiError> {
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

async fn receive(field: &mut Field<'static>, upload: &mut ModuleUpload) -> Result<(), ApiError> {
    while let Some(chunk) = field.chunk().await.map_err(malformed)? {
        upload.write(&chunk)?;
    }
    Ok(())
}
