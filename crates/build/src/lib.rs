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
    Admitted, BuildRecord, Builder, BuilderError, DEFAULT_TAG, Door, Level, Line, Lines,
    MAX_UPLOAD, NewBuild, Progressing, Pruned, Reason, RecordError, Records, Room, Settings,
    Status, TemplateRecord, Upload, UploadError, Uploads, WantedSize, now_ms,
};
