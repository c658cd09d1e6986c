//! Goals for medians on a host without VT-x (milliseconds, or MiB for memory), and reference
//! values. The reference values are the values that CubeSandbox publishes for its own host (16
//! vCPUs, PVM): averages for creates, and total times of a batch for all other operations.

/// Goal for `true` in a running guest.
pub const EXEC: f64 = 5.0;
/// Goal for the command `jiffy run -- echo hello`.
pub const RUN: f64 = 20.0;
/// Goal for a create request.
pub const CREATE: f64 = 12.0;
/// Goal for a create request and the first command together.
pub const CREATE_EXEC: f64 = 18.0;
/// Goal for the removal of a sandbox.
pub const REMOVAL: f64 = 5.0;
/// Goal for the memory of an idle sandbox.
pub const DENSITY_MIB: f64 = 5.0;

/// Returns the goal if operations are sequential.
pub fn if_sequential(goal: f64, concurrency: usize) -> Option<f64> {
    (concurrency == 1).then_some(goal)
}

/// Returns the goal if the template is `base`.
pub fn of_base(goal: f64, template: &str) -> Option<f64> {
    (template == "base").then_some(goal)
}

/// Returns the value for `key`, for example for a number of concurrent operations.
pub fn lookup(table: &[(usize, f64)], key: usize) -> Option<f64> {
    table.iter().find(|(k, _)| *k == key).map(|(_, v)| *v)
}

/// Returns the published average of a create from a template, by concurrency.
pub fn create_reference(concurrency: usize) -> Option<f64> {
    lookup(&[(1, 66.7), (10, 170.9), (20, 364.6)], concurrency)
}
