//! Templates built step by step in sandboxes.
//!
//! [`spec`] says what is to be built, whoever wrote it: a Dockerfile, an SDK, the command. [`dockerfile`] reads it from a Dockerfile,
//! and [`context`] finds the files that it copies. The [`Builder`] builds it: every step runs
//! in a sandbox, and its result is a snapshot that later builds take up.

mod builder;
pub mod context;
pub mod dockerfile;
pub mod expand;
pub mod spec;

pub use builder::{
    BuildProgress, BuildRecord, BuildRecords, BuildRequest, BuildStatus, BuildUsage, Builder,
    BuilderError, BuilderSettings, DEFAULT_TAG, FailureReason, IncomingUpload, LogLevel, LogLine,
    LogQuery, MAX_UPLOAD_BYTES, MAX_WAITING_BUILDS, PrunableBuildCache, PrunedBuildCache,
    RecordError, ResolvedBy, ResolvedTemplate, TemplateRecord, UploadError, UploadStore,
    VisibilityLookup, WAITING_BUILD_TIMEOUT, WantedSize, WeakBuilder, is_visible, now_ms, resolve,
};
