//! Tests of members, of their records and of the channel between them.

mod channel;
mod heads;
mod node;
mod records;
mod setup;
mod tables;
