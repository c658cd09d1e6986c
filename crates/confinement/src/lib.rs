//! Functions that confine a process. Each confined process calls a few of them in this order, with
//! its own list of system calls:
//!
//! 1. descriptors and limits: [`close_descriptors`], [`set_limits`], [`prefer_for_oom_kill`]
//! 2. namespaces and files: [`leave_host`], or [`detach`] and [`FsView`], or [`enter_own_root`]
//! 3. user and capabilities: [`become_own_user`], [`drop_capabilities`], [`limit_privileges`]
//! 4. attributes of the process: [`forbid_inspection`], [`end_with_parent`]
//! 5. filters, last: [`restrict_files`], [`AllowedCalls`], [`DeniedCalls`]
//!
//! [`Cgroups`] limits the resources of processes from outside.

mod capabilities;
mod cgroups;
mod files;
mod fs_view;
mod own_root;
mod own_user;
mod process;
mod root;
mod seccomp;
mod visible_root;

pub use capabilities::{
    CapabilitySet, drop_capabilities, limit_bounding_set, limit_privileges, set_capabilities,
};
pub use cgroups::{CgroupError, Cgroups, GroupLimits};
pub use files::{restrict_everything, restrict_files};
pub use fs_view::{FsView, PROGRAM_DIRECTORIES};
pub use own_root::{OwnRoot, enter_own_root, in_new_pid_namespace};
pub use own_user::{OwnUser, become_own_user, enter_user_namespace, own_user_id, switch_user};
pub use process::{
    close_descriptors, end_with_parent, forbid_inspection, forbid_new_privileges,
    prefer_for_oom_kill, raise_descriptor_limit, set_limit, set_limits,
};
pub use root::{detach, enter_empty_root, leave_host, private_mounts};
pub use seccomp::{
    AllowedCalls, ArgumentCondition, DeniedCalls, SyscallFilter, equals, equals_long,
    equals_unsigned,
};
pub use visible_root::{MountTable, VisiblePath, enter_root};
