//! Builds of templates.

use crate::guest::LogEntry;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Maximum number of steps of a request in the form of E2B's clients.
pub const MAX_BUILD_STEPS: usize = 1000;
/// Maximum number of secrets of one build.
pub const MAX_BUILD_SECRETS: usize = 64;

/// Maximum number of keys for signatures of images of one build.
pub const MAX_VERIFY_KEYS: usize = 16;
/// Maximum number of signers of images of one build.
pub const MAX_VERIFY_IDENTITIES: usize = 16;
/// Maximum length of the subject or issuer of a signer in bytes.
pub const MAX_IDENTITY_BYTES: usize = 1024;
/// Maximum length of a trusted root in bytes.
pub const MAX_TRUST_ROOT_BYTES: usize = 128 << 10;
/// Maximum number of SSH agents of one build.
pub const MAX_BUILD_SSH_AGENTS: usize = 16;
/// Maximum length of the name of an SSH agent in bytes.
pub const MAX_SSH_ID_BYTES: usize = 64;
/// Pattern of names of SSH agents.
const SSH_ID: &str = "^[A-Za-z0-9._-]{1,64}$";

/// Body of a request to start a build: one stage in the form of E2B's clients, or a complete
/// specification. `Spec` is the type that the specification is read as.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(
    rename = "BuildStart",
    description = "Body of a request to start a build: one stage in the form of E2B's clients, or \
                   a complete specification."
)]
pub struct BuildStart<Spec = Map<String, Value>> {
    /// Complete specification, as `jiffy template build` sends it, instead of all other fields.
    pub spec: Option<Spec>,
    /// Reference of the image that the build starts from. Defaults to `e2bdev/base`.
    pub from_image: Option<String>,
    /// Template that the build starts from. Excludes `fromImage`.
    pub from_template: Option<String>,
    /// Credentials for the image's registry.
    pub from_image_registry: Option<ImageRegistry>,
    /// Steps of the build.
    #[schemars(length(max = MAX_BUILD_STEPS))]
    pub steps: Option<Vec<BuildStep>>,
    /// Command that the template's sandboxes run when they start.
    pub start_cmd: Option<String>,
    /// Command that succeeds once the start command is ready.
    pub ready_cmd: Option<String>,
    /// Do not use the build cache.
    pub force: Option<bool>,
    /// Secrets for `RUN --mount=type=secret`. They exist only during the build, and are neither
    /// stored nor logged. Only together with `spec`.
    #[schemars(length(max = MAX_BUILD_SECRETS))]
    pub secrets: Option<Vec<BuildSecret>>,
    /// Public keys in PEM (ECDSA with P-256). If not empty, one of them or of `verifyIdentities`
    /// must have signed each image of a registry, in a format of cosign. Not together with `spec`,
    /// which has a field of its own.
    #[schemars(length(max = MAX_VERIFY_KEYS))]
    pub verify_keys: Option<Vec<String>>,
    /// Identities of which one, or one of `verifyKeys`, must have signed each image of a registry
    /// (keyless signatures of cosign). Requires `verifyTrustRoot`. Not together with `spec`, which
    /// has a field of its own.
    #[schemars(length(max = MAX_VERIFY_IDENTITIES))]
    pub verify_identities: Option<Vec<SignerIdentity>>,
    /// Content of a `trusted_root.json` of Sigstore: authorities and logs that are trusted for
    /// signatures of images. If set, signatures by keys of `verifyKeys` must be in a log, too. Not
    /// together with `spec`, which has a field of its own.
    #[schemars(length(max = MAX_TRUST_ROOT_BYTES))]
    pub verify_trust_root: Option<String>,
    /// Names of the SSH agents that the client offers to `RUN --mount=type=ssh`. The client opens
    /// streams for their connections. Only together with `spec`.
    #[schemars(length(max = MAX_BUILD_SSH_AGENTS), inner(regex(pattern = SSH_ID)))]
    pub ssh: Option<Vec<String>>,
}

/// Signer of images, as its certificate names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SignerIdentity {
    /// Subject of the certificate: an e-mail address, or the URI of a workload. `*` at the end
    /// stands for any rest.
    #[schemars(length(min = 1, max = MAX_IDENTITY_BYTES))]
    pub subject: String,
    /// URL of the OpenID Connect issuer of the identity.
    #[schemars(length(min = 1, max = MAX_IDENTITY_BYTES))]
    pub issuer: String,
}

/// Secret of a build.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BuildSecret {
    /// Name by which the steps of the build refer to the secret.
    pub id: String,
    /// Value in base64. All values together have at most 512 KiB.
    pub value: String,
}

impl std::fmt::Debug for BuildSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("BuildSecret").field(&self.id).finish()
    }
}

/// Credentials for a registry.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["type"]))]
pub struct ImageRegistry {
    /// Kind of the credentials: user name and password, an access key for Amazon ECR, or a service
    /// account for Google Artifact Registry.
    #[schemars(extend("enum" = ["registry", "aws", "gcp"]))]
    pub r#type: String,
    /// User name.
    pub username: Option<String>,
    /// Password.
    pub password: Option<String>,
    /// Access key id, for `aws`.
    #[serde(rename = "awsAccessKeyId")]
    pub aws_access_key_id: Option<String>,
    /// Secret access key, for `aws`.
    #[serde(rename = "awsSecretAccessKey")]
    pub aws_secret_access_key: Option<String>,
    /// Region of the registry, for `aws`.
    #[serde(rename = "awsRegion")]
    pub aws_region: Option<String>,
    /// Key file of the service account in JSON, for `gcp`.
    #[serde(rename = "serviceAccountJson")]
    pub service_account_json: Option<String>,
}

impl std::fmt::Debug for ImageRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the secrets, because logs contain this text.
        f.debug_tuple("ImageRegistry").field(&self.r#type).finish()
    }
}

/// Step of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildStep {
    /// Instruction.
    #[schemars(extend("enum" = ["RUN", "COPY", "ENV", "WORKDIR", "USER"]))]
    pub r#type: String,
    /// Arguments of the instruction.
    pub args: Option<Vec<String>>,
    /// Hash of the files that a `COPY` copies.
    pub files_hash: Option<String>,
    /// Do not use the build cache for this and the following steps.
    pub force: Option<bool>,
}

/// State of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BuildState {
    /// Waits for its files, for its start or for other builds.
    Waiting,
    /// Running.
    Building,
    /// The template exists.
    Ready,
    /// Failed.
    Error,
}

/// Status of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildStatus {
    /// Id of the template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Id of the build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// State of the build.
    pub status: BuildState,
    /// Lines of its log.
    pub logs: Vec<String>,
    /// The same lines as entries.
    pub log_entries: Vec<LogEntry>,
    /// Cause of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<FailureReason>,
    /// Progress of a running build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<BuildProgress>,
}

/// Cause of a failed build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FailureReason {
    /// Description of the failure with a remedy.
    pub message: String,
    /// Number of the failed step, from 1, or `base` or `finalize`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

/// Progress of the current operation of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BuildProgress {
    /// Description of the operation.
    pub text: String,
    /// Completed share in percent.
    #[schemars(range(min = 0, max = 100))]
    pub percent: u8,
}

/// Lines of a build's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BuildLogs {
    /// Lines.
    pub logs: Vec<LogEntry>,
}
