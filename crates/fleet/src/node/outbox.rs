//! Queues of messages from this node to other members. Each member has a queue and a task, so that
//! messages arrive in their order and a slow member delays no other one. A *row* is the entry of a
//! sandbox in the coordinator's directory.

use super::messenger::Messenger;
use jiffy_fleet_core::{Body, Effect, MAX_ROWS_PER_MESSAGE, MemberId, Message, RowMessage};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Maximum number of messages that wait for a member. Further messages are dropped.
const MAX_QUEUED: usize = 256;
/// Maximum duration of a transmission.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without messages after which the task of a member ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Messages that were received as a reply.
pub(super) type Replies = (MemberId, Vec<Message>);

/// Queues of all members.
#[derive(Debug)]
pub(super) struct Outbox {
    messenger: Arc<dyn Messenger>,
    replies: mpsc::Sender<Replies>,
    /// Queues of the sending tasks by member.
    queues: HashMap<MemberId, mpsc::Sender<(String, Message)>>,
}

impl Outbox {
    pub fn new(messenger: Arc<dyn Messenger>, replies: mpsc::Sender<Replies>) -> Self {
        Self {
            messenger,
            replies,
            queues: HashMap::new(),
        }
    }

    /// Queues a message. Messages may be lost.
    pub fn send(&mut self, to: MemberId, address: String, message: Message) {
        let item = match self.queues.get(&to) {
            None => (address, message),
            Some(queue) => match queue.try_send((address, message)) {
                Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => return,
                // The task has ended.
                Err(mpsc::error::TrySendError::Closed(item)) => item,
            },
        };
        self.queues.retain(|_, queue| !queue.is_closed());
        let (queue, messages) = mpsc::channel(MAX_QUEUED);
        // The new queue is empty, so the message fits.
        let _ = queue.try_send(item);
        self.queues.insert(to, queue);
        let sender = Sender {
            to,
            messenger: self.messenger.clone(),
            replies: self.replies.clone(),
            messages,
        };
        tokio::spawn(sender.run());
    }
}

/// Task that sends messages to one member, in their order.
struct Sender {
    to: MemberId,
    messenger: Arc<dyn Messenger>,
    replies: mpsc::Sender<Replies>,
    messages: mpsc::Receiver<(String, Message)>,
}

impl Sender {
    /// Sends the queued messages to one member in order. Ends after a time without messages.
    async fn run(mut self) {
        let mut is_reachable = true;
        let mut batch = Vec::new();
        loop {
            let received = self.messages.recv_many(&mut batch, MAX_QUEUED);
            match timeout(IDLE_TIMEOUT, received).await {
                Ok(1..) => {}
                // Close the queue and continue: a message that was queued at this moment is still
                // sent, and the next one finds a closed queue and starts another task.
                Err(_) if self.messages.is_empty() => self.messages.close(),
                Err(_) => {}
                Ok(_) => return,
            }
            for (address, message) in merge(batch.drain(..)) {
                match self.transmit(&address, &message).await {
                    Ok(()) => is_reachable = true,
                    Err(reason) => {
                        if std::mem::replace(&mut is_reachable, false) {
                            tracing::warn!(member = %self.to, reason, "cannot send to a member");
                        }
                        // Messages that waited for the failed one are out of date as well. The
                        // protocol repeats all necessary messages.
                        while self.messages.try_recv().is_ok() {}
                        break;
                    }
                }
            }
        }
    }

    /// Sends one message, and passes the replies to the node.
    async fn transmit(&self, address: &str, message: &Message) -> Result<(), String> {
        let sent = self.messenger.send(self.to, address, message);
        let replies = timeout(SEND_TIMEOUT, sent).await;
        let replies = replies.map_err(|_| "no answer in time".to_owned())?;
        let replies = replies.map_err(|e| e.to_string())?;
        if !replies.is_empty() {
            // Ignore an error: the node has stopped.
            let _ = self.replies.send((self.to, replies)).await;
        }
        Ok(())
    }
}

/// Merges consecutive changes of rows into one message.
fn merge(batch: impl Iterator<Item = (String, Message)>) -> Vec<(String, Message)> {
    let mut merged: Vec<(String, Message)> = Vec::new();
    for (address, mut message) in batch {
        let is_merged = merged
            .last_mut()
            .is_some_and(|(last, former)| *last == address && append(former, &mut message));
        if !is_merged {
            merged.push((address, message));
        }
    }
    merged
}

/// Merges consecutive changes of rows in effects. Other effects are unchanged.
pub(super) fn merge_changes(effects: Vec<Effect>) -> Vec<Effect> {
    let mut merged: Vec<Effect> = Vec::new();
    for mut effect in effects {
        let is_merged = match (merged.last_mut(), &mut effect) {
            (
                Some(Effect::Send {
                    to: former_to,
                    address: former_address,
                    message: former,
                }),
                Effect::Send {
                    to,
                    address,
                    message,
                },
            ) => former_to == to && former_address == address && append(former, message),
            _ => false,
        };
        if !is_merged {
            merged.push(effect);
        }
    }
    merged
}

/// Appends the changes of a message to the former message, if their numbers follow.
fn append(former: &mut Message, message: &mut Message) -> bool {
    if (former.term, former.epoch) == (message.term, message.epoch)
        && let Body::Rows(RowMessage::Changes { first, changes }) = &mut former.body
        && let Body::Rows(RowMessage::Changes {
            first: next,
            changes: following,
        }) = &mut message.body
        && *next == *first + changes.len() as u64
        && changes.len() + following.len() <= MAX_ROWS_PER_MESSAGE
    {
        changes.append(following);
        return true;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_fleet_core::{MESSAGE_FORMAT, RowChange, SandboxHash, Term};

    fn changes(first: u64, count: u8, term: u64) -> (String, Message) {
        let changes = (0..count).map(|n| RowChange::Removed(SandboxHash([n; 16])));
        let message = Message {
            format: MESSAGE_FORMAT,
            fleet: "7kq2".to_owned().try_into().unwrap(),
            term: Term(term),
            epoch: None,
            body: Body::Rows(RowMessage::Changes {
                first,
                changes: changes.collect(),
            }),
        };
        ("h:1".to_owned(), message)
    }

    #[test]
    fn only_consecutive_changes_of_one_term_are_merged() {
        let batch = [
            changes(1, 2, 1),
            changes(3, 1, 1),
            changes(5, 1, 1),
            changes(6, 1, 2),
        ];
        let merged = merge(batch.into_iter());
        let firsts: Vec<_> = merged
            .iter()
            .map(|(_, message)| match &message.body {
                Body::Rows(RowMessage::Changes { first, changes }) => (*first, changes.len()),
                _ => panic!("another message"),
            })
            .collect();
        assert_eq!(firsts, [(1, 3), (5, 1), (6, 1)]);
    }
}
