//! Template builder: executes the steps of builds in sandboxes.
//!
//! `jiffy_build_spec` describes a build. The [`Builder`] runs every step in a sandbox and stores
//! the result as a snapshot, which later builds restore.

mod builder;

pub use builder::{
    BuildProgress, BuildRecord, BuildRecords, BuildRequest, BuildSecrets, BuildStatus, BuildUsage,
    Builder, BuilderError, BuilderSettings, DEFAULT_TAG, FailureReason, FoundUpload,
    IncomingUpload, LogLevel, LogLine, LogPosition, LogQuery, MAX_UPLOAD_BYTES, MAX_WAITING_BUILDS,
    PrunableBuildCache, PrunedBuildCache, RecordError, ResolvedBy, ResolvedTemplate, SshClients,
    StoredTemplate, TemplateLookup, TemplateRecord, UploadError, UploadNaming, UploadStore,
    WAITING_BUILD_TIMEOUT, WantedSize, WeakBuilder, is_visible, resolve,
};
