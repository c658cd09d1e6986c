//! Node: the part of a daemon that takes part in the fleet. A daemon has one node. A *member* is
//! the daemon of one host. A *shard* is a part of the fleet's sandboxes. Its record lists the
//! members and names the coordinator.
//!
//! One task, the executor, drives [`jiffy_fleet_core::Member`]: it reports messages and answers to
//! the state machine, waits for the next event, and executes the effects. Reads and writes of the
//! shard's record, and messages to each member, are tasks of their own. A slow store or member
//! therefore delays nothing else. [`Node`] is a handle for the other parts of a daemon.
//!
//! A row of the fleet's directory states host and state of a sandbox. The rows of the local
//! sandboxes are in this process ([`rows`]). A daemon reports each change once, and the node sends
//! it to the coordinator.

mod clock;
mod executor;
mod handle;
mod host;
mod messenger;
mod outbox;
mod query;
mod rows;
mod shard;
#[cfg(feature = "client")]
mod transport;
mod view;

pub use clock::{BootClock, Clock, current_instance};
pub use handle::{
    LocateError, Members, Node, NodeConfig, NodeError, Place, PlaceError, ReserveError,
};
pub use host::{Host, ReconcileError};
pub use messenger::{Messenger, MessengerError};
pub use query::{
    Answer, Decision, Heartbeats, HostSummary, LimitedNeed, MAX_ANSWER_BYTES, MAX_QUERY_BYTES,
    NotPlaced, Operation, PlaceRequest, Placed, PlacementEnd, Query, QueryError, RowPlace,
    ShareRequest, Shares, TakenName, decode_replies, encode_replies,
};
pub use rows::row_hash;
#[cfg(feature = "client")]
pub use transport::{ChannelMessenger, MESSAGE_PATH, MessageReceiver, QUERY_PATH, QueryReceiver};
pub use view::{CoordinatorStatus, FleetStatus, NodeStatus, View};
