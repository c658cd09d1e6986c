//! Behaviour at panics: a panic aborts each process of Jiffy, independent of the profile with which
//! it was compiled.

/// Makes a panic of any thread abort this process. Released programs are compiled in this way.
/// Programs of a test run use the same libraries as the tests, which unwind, and therefore need
/// this call.
pub fn abort_at_panics() {
    // The default hook still prints the message and location.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}
