//! Client of the guest agent.
