//! Panics, which end a process of Jiffy whichever profile it was compiled with.

/// Makes a panic of any thread abort this process. Programs for users are compiled that way; those
/// of a run of all tests share libraries with the tests, which unwind.
pub fn abort_at_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}
