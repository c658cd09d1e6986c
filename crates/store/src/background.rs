//! Threads for hashing and compression, which leave the processors to guests and requests.

use crate::StoreError;
use tokio::sync::oneshot;

/// Of nice(2): about a tenth of the processor time of a thread that competes.
const NICE: i32 = 10;

/// Runs `work` on a thread of its own with low priority; the result is lost if it panics.
pub(crate) fn spawn<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<oneshot::Receiver<T>, StoreError> {
    let (sender, receiver) = oneshot::channel();
    let run = move || {
        // Of this thread only (setpriority(2), notes). Refused, it costs others a little time.
        let _ = rustix::process::setpriority_process(None, NICE);
        let _ = sender.send(work());
    };
    let thread = std::thread::Builder::new().name("push".to_owned());
    let spawned = thread.spawn(run);
    spawned.map_err(|e| StoreError::Source(format!("a thread cannot be started: {e}")))?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn work_in_the_background_has_a_low_priority_and_its_caller_keeps_its_own() {
        let own = || rustix::process::getpriority_process(None).unwrap();
        let before = own();
        let inside = super::spawn(own).unwrap().await.unwrap();
        assert_eq!(inside, super::NICE.max(before));
        assert_eq!(own(), before);
        let panics = super::spawn(move || assert_eq!(own(), -1)).unwrap();
        assert!(panics.await.is_err());
    }
}
