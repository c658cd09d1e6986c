//! Attacks of one API key on another, against a real daemon.

mod budget;
mod isolation;
mod keys;
mod names;
mod net;
mod private_network;
mod pull;
mod registry;
mod root;
mod two_keys;
