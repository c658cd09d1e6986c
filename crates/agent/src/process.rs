//! The service `process.Process`: start, monitoring, input and signals of processes.

pub mod child;
pub mod exit;
pub mod frame_hub;
pub mod input;
pub mod limits;
pub mod message;
pub mod oom;
pub mod oom_log;
pub mod output_pump;
pub mod pipes;
pub mod private_mounts;
pub mod program_lookup;
pub mod pty;
pub mod reaper;
pub mod service;
pub mod signal;
pub mod start;
pub mod stream;
pub mod table;
