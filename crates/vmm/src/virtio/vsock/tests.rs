//! Tests of the device with a well-behaved driver and a hostile one. The header of a packet has 44
//! bytes (`HEADER_BYTES`).

mod batching;
mod closing;
mod connecting;
mod guest;
mod hostile;
mod transfer;

use guest::{GUEST_CID, GuestSocket, Pattern, VsockGuest};
