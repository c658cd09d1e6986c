//! Ports of the guests of a laboratory.

use jiffy_api::{Opening, PortRefusal, Ports};
use tokio::net::UnixStream;

/// Port at which no server listens.
const CLOSED_PORT: u16 = 9;

/// Ports of guests, whose servers return all bytes that they receive.
pub struct EchoPorts;

impl Ports for EchoPorts {
    fn open<'a>(&'a self, _: &'a str, port: u16) -> Opening<'a> {
        Box::pin(async move {
            if port == CLOSED_PORT {
                return Err(PortRefusal::Closed(port));
            }
            let (guest, server) = UnixStream::pair().unwrap();
            tokio::spawn(async move {
                let (mut reader, mut writer) = server.into_split();
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
            });
            Ok(guest.into())
        })
    }
}
