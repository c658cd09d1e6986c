//! Tasks of one connection, which end with the connection.

use parking_lot::Mutex;
use std::sync::Arc;
use tokio::task::JoinSet;

/// Set of tasks. Clones share the set. Dropping the [`TaskGuard`] aborts all tasks.
#[derive(Clone, Default)]
pub(crate) struct TaskSet(Arc<Mutex<JoinSet<()>>>);

/// Owner of a set of tasks.
pub(crate) struct TaskGuard(pub TaskSet);

impl TaskSet {
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.0.lock();
        // Remove finished tasks, so that the set remains small.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for TaskSet {
    fn execute(&self, task: F) {
        self.spawn(task);
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        self.0.0.lock().abort_all();
    }
}
