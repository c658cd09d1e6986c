//! Events and the audit log of a host: append-only files with bounded retention.
//!
//! An entry is one line of JSON, appended with one write to the newest of several files
//! ([`log::AppendLog`]). It therefore survives the death of the daemon. It is not flushed to
//! storage, so a power failure may lose the newest entries. Each entry has a time in microseconds
//! that is later than the time of the entry before, and that identifies the entry together with the
//! name of the host ([`EntryId`]). Ids disclose nothing about the number of entries of other
//! owners.

mod audit;
mod event;
mod feed;
mod id;
mod log;
mod rejections;
mod segment;

pub use audit::{AuditFilter, AuditLog, AuditedCall};
pub use event::Event;
pub use feed::{EventFeed, EventFilter, SandboxChoice};
pub use id::{EntryId, IdError};
pub use log::page::{Order, Page, PageQuery};
pub use log::{Dropped, LogError, Retention};
