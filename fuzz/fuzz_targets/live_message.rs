#![no_main]
//! Messages of a browser at `/live` of the console: each has bounded effects, on terminals that the
//! tab shows. A *tab* is a browser tab with the console, which has one connection for all of its
//! terminals.

use jiffy_agent_client::PtySize;
use jiffy_console::live_messages::{
    MAX_CELLS, MAX_DISPLAYED, MAX_MESSAGE, MAX_STREAMS, RequestedTerminal, TabActions, TabMessages,
    TerminalRequest,
};
use libfuzzer_sys::fuzz_target;
use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Terminal that a tab shows. `open` counts such terminals.
struct Shown {
    stream: u32,
    open: Rc<Cell<usize>>,
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.open.set(self.open.get() - 1);
    }
}

/// Effects of the messages: the number of open terminals, and the number of failed requests.
#[derive(Default)]
struct Effects {
    open: Rc<Cell<usize>>,
    failures: usize,
}

fn check_size(size: PtySize) {
    assert!((1..=MAX_CELLS).contains(&size.cols) && (1..=MAX_CELLS).contains(&size.rows));
}

impl TabActions for Effects {
    type Shown = Shown;

    async fn show(&mut self, request: TerminalRequest) -> Option<Shown> {
        check_size(request.size);
        // A sandbox with this name does not exist.
        if request.sandbox == "x" {
            return None;
        }
        if let RequestedTerminal::New { user, shell } = &request.terminal {
            assert!(user.as_deref() != Some("") && shell.as_deref() != Some(""));
        }
        self.open.set(self.open.get() + 1);
        assert!(self.open.get() <= MAX_STREAMS);
        Some(Shown {
            stream: request.stream,
            open: self.open.clone(),
        })
    }

    async fn fail(&mut self, _: u32, _: &str) {
        self.failures += 1;
    }

    async fn resize(&mut self, _: &Shown, size: PtySize) {
        check_size(size);
    }

    fn acknowledge(&mut self, _: &Shown, _: u64) {}

    async fn input(&mut self, shown: &Shown, input: hyper::body::Bytes) {
        assert!(input.len() <= MAX_MESSAGE - size_of_val(&shown.stream));
    }

    async fn end(&mut self, _: Shown) {}

    fn follow(&mut self, _: Option<String>) {}

    fn display(&mut self, sandboxes: Vec<String>) {
        assert!(sandboxes.len() <= MAX_DISPLAYED);
    }
}

/// Runs a future that never waits.
fn run(future: impl Future<Output = ()>) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(pin!(future).poll(&mut context) == Poll::Ready(()));
}

// Messages are separated by line feeds. A message that begins with `{` is text.
fuzz_target!(|data: &[u8]| {
    let open = Rc::new(Cell::new(0));
    let mut tab = TabMessages::new(Effects {
        open: open.clone(),
        failures: 0,
    });
    for message in data.split(|byte| *byte == b'\n') {
        let message = &message[..message.len().min(MAX_MESSAGE)];
        let (shown, failures) = (tab.shown_count(), tab.actions().failures);
        match std::str::from_utf8(message) {
            Ok(text) if text.starts_with('{') => run(tab.text(text)),
            _ => run(tab.binary(hyper::body::Bytes::copy_from_slice(message))),
        }
        assert_eq!(tab.shown_count(), open.get());
        // A message opens or closes at most one terminal, and fails at most once.
        assert!(tab.shown_count().abs_diff(shown) <= 1);
        assert!(tab.actions().failures - failures <= 1);
    }
    drop(tab);
    assert_eq!(open.get(), 0);
});
