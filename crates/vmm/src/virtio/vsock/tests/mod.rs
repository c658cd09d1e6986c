//! What the device promises, checked with a driver that behaves like a guest's, or does not.

mod closing;
mod connecting;
mod guest;
mod hostile;
mod transfer;

use guest::{CID, Guest, Link, Pattern};
