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
    BuildRecord, BuildUsage, Builder, BuilderError, DEFAULT_TAG, Level, Line, Lines, Look,
    MAX_UPLOAD, MAX_WAITING_BUILDS, Meaning, NewBuild, Progressing, Prunable, Pruned, Rank, Reason,
    RecordError, Records, Settings, Status, TemplateRecord, Upload, UploadError, Uploads,
    WAITING_BUILD_LIFE, WantedSize, WeakBuilder, is_visible, now_ms, resolve,
};
